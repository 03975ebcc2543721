"""An engine's first step times are measured before it serves, and what disturbed it is left out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

from headrace_engine.meter import EngineMeter, Step
from headrace_engine.rehearsal import rehearsal_prompts, rehearse
from headrace_kvstore.identity.salts import is_isolated
from tests.support.clock import Clock


def test_of_each_step_the_fastest_time_is_learned() -> None:
    """The first step of 16 tokens took 107 ms, the next 34: were the first one learned, prompts of
    50 tokens would look three times too dear. So they would beside other engines that start."""
    meter, rng = EngineMeter(), random.Random(0)

    async def generate(
        ids: list[int], tokens: int, name: str, salt: str
    ) -> AsyncGenerator[None, None]:
        usual_s = 0.02 + 0.0008 * len(ids)
        busy = 1.0 if salt.split("-")[2] == "1" else rng.uniform(2.0, 20.0)
        meter.step(Step(len(ids), 0, 0, 0, 0, busy * usual_s))
        yield

    asyncio.run(rehearse(generate, meter, rehearsal_prompts(8192, 49152), 64))
    assert meter.step_time.samples == 5
    assert meter.steps_total == 3 * (5 + 4 + 16)
    assert abs(meter.step_time.seconds(50) - 0.06) < 0.006
    meter.step(Step(50, 0, 0, 0, 0, 0.06))
    assert meter.step_time.samples == 6, "behind the rehearsal every step is learned"
    assert len(meter.on_step) == 0


def test_what_rows_take_is_measured_and_not_told_from_prompts() -> None:
    """A row takes 2 ms here, a prompt's token a tenth of that. From prompts alone 16 rows were let
    in where 4 make a step a quarter longer."""
    meter = EngineMeter()

    async def generate(
        ids: list[int], tokens: int, name: str, salt: str
    ) -> AsyncGenerator[None, None]:
        if len(ids) > 1:
            meter.step(Step(len(ids), 0, 0, 0, 0, 0.03 + 0.0002 * len(ids)))
        elif name.endswith("-0"):  # the engine steps for all at once
            rows = int(name.split("-")[-2])
            meter.step(Step(0, rows - 1, 0, 0, 0, 9.0))  # one has not begun yet
            meter.step(Step(0, rows, 0, 0, 0, 0.03 + 0.002 * rows))
        yield

    asyncio.run(rehearse(generate, meter, rehearsal_prompts(8192, 49152), 64))
    assert meter.step_time.samples == 5 + 2
    for rows in (8, 16, 24):
        assert abs(meter.step_time.seconds(rows=rows) / (0.03 + 0.002 * rows) - 1) < 0.1


def test_an_engine_of_few_sequences_is_asked_for_as_many_rows() -> None:
    meter = EngineMeter()

    async def generate(
        ids: list[int], tokens: int, name: str, salt: str
    ) -> AsyncGenerator[None, None]:
        if len(ids) == 1:
            meter.step(Step(0, 2, 0, 0, 0, 0.04))
        yield

    asyncio.run(rehearse(generate, meter, rehearsal_prompts(8192, 49152), 2))
    assert meter.step_time.samples == 2


def test_on_a_slow_machine_long_prompts_are_computed_once(clock: Clock) -> None:
    lengths: list[int] = []

    async def generate(
        ids: list[int], tokens: int, name: str, salt: str
    ) -> AsyncGenerator[None, None]:
        if len(ids) > 1:
            lengths.append(len(ids))
        clock.now_s += len(ids) / 1000 if len(ids) > 1 else 0.0
        yield

    asyncio.run(rehearse(generate, EngineMeter(), rehearsal_prompts(8192, 100), 64, clock))
    assert lengths == [16, 96, 384, 1536, 1920, 16, 96, 384, 16, 96, 384]


def test_a_slow_first_time_says_nothing_of_the_machine(clock: Clock) -> None:
    """A card makes its kernels then."""
    lengths: list[int] = []

    async def generate(
        ids: list[int], tokens: int, name: str, salt: str
    ) -> AsyncGenerator[None, None]:
        if len(ids) > 1:
            lengths.append(len(ids))
        clock.now_s += 10.0 if salt.endswith("-0") else 0.01
        yield

    asyncio.run(rehearse(generate, EngineMeter(), rehearsal_prompts(8192, 100), 64, clock))
    assert lengths == 3 * [16, 96, 384, 1536, 1920]


def test_prompts_fit_the_model() -> None:
    assert [len(ids) for ids in rehearsal_prompts(8192, 49152)] == [16, 96, 384, 1536, 1920]
    assert [len(ids) for ids in rehearsal_prompts(64, 100)] == [16, 59]
    assert max(max(ids) for ids in rehearsal_prompts(64, 100)) < 100


def test_the_beginnings_of_one_time_share_a_salt_and_no_two_times_do() -> None:
    salts: list[str] = []

    async def generate(
        ids: list[int], tokens: int, name: str, salt: str
    ) -> AsyncGenerator[None, None]:
        if len(ids) > 1:
            salts.append(salt)
        yield

    prompts = rehearsal_prompts(8192, 100)
    asyncio.run(rehearse(generate, EngineMeter(), prompts, 64))
    assert all(prompts[-1][: len(ids)] == ids for ids in prompts)
    assert [len(set(salts[n : n + 5])) for n in (0, 5, 10)] == [1, 1, 1]
    assert len(set(salts)) == 3
    assert all(map(is_isolated, salts)), "the store would keep what nobody asks for"


def test_an_engine_that_knows_its_step_times_only_warms_up() -> None:
    meter, asked = EngineMeter(), []

    async def generate(
        ids: list[int], tokens: int, name: str, salt: str
    ) -> AsyncGenerator[None, None]:
        asked.append(len(ids))
        meter.step(Step(len(ids), 0, 0, 0, 0, 5.0))
        yield

    known = [Step(16, 0, 0, 0, 0, 0.03), Step(384, 0, 0, 0, 0, 0.3), Step(0, 4, 0, 8, 0, 0.04)]
    learned = asyncio.run(
        rehearse(generate, meter, rehearsal_prompts(8192, 49152), 64, known=known)
    )
    assert learned == known
    assert asked == [16, 96, 1, 1, 1, 1]
    assert meter.step_time.samples == len(known)
    assert abs(meter.step_time.seconds(384) - 0.3) < 0.05
    assert meter.learns


def test_the_learned_steps_are_returned_for_the_next_start() -> None:
    meter = EngineMeter()

    async def generate(
        ids: list[int], tokens: int, name: str, salt: str
    ) -> AsyncGenerator[None, None]:
        meter.step(Step(len(ids), 0, 0, 0, 0, 0.02 + 0.0008 * len(ids)))
        yield

    learned = asyncio.run(rehearse(generate, meter, rehearsal_prompts(8192, 49152), 64))
    assert sorted(step.prompt for step in learned) == [16, 96, 384, 1536, 1920]

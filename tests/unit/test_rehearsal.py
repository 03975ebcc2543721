"""An engine's first step times are measured before it serves, its very first steps left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from headrace_engine.meter import EngineMeter, Step
from headrace_engine.rehearsal import rehearsal_prompts, rehearse


def test_the_first_time_teaches_nothing() -> None:
    """A first step of 16 tokens took 107 ms, the next 34: were the first one learned, prompts of
    50 tokens would look three times too dear."""
    meter, seen = EngineMeter(), set[int]()

    async def generate(ids: list[int], tokens: int, name: str) -> AsyncGenerator[None, None]:
        usual_s = 0.02 + 0.0008 * len(ids)
        meter.step(Step(len(ids), 0, 0, 0, 0, usual_s if len(ids) in seen else 0.1 + usual_s))
        seen.add(len(ids))
        yield

    asyncio.run(rehearse(generate, meter, rehearsal_prompts(8192, 49152)))
    assert meter.step_time.samples == 6
    assert meter.steps_total == 9
    assert abs(meter.step_time.seconds(50) - 0.06) < 0.006


def test_prompts_fit_the_model() -> None:
    assert [len(ids) for ids in rehearsal_prompts(8192, 49152)] == [16, 96, 384]
    assert [len(ids) for ids in rehearsal_prompts(64, 100)] == [16, 59]
    assert max(max(ids) for ids in rehearsal_prompts(64, 100)) < 100


def test_no_two_prompts_share_a_salt() -> None:
    names: list[str] = []

    async def generate(ids: list[int], tokens: int, name: str) -> AsyncGenerator[None, None]:
        names.append(name)
        yield

    asyncio.run(rehearse(generate, EngineMeter(), rehearsal_prompts(8192, 100)))
    assert len(set(names)) == len(names) == 9

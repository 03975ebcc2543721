"""A replica's health check: it fails while the engine has requests and makes no step."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_decode.http.engine_health import (
    HUNG,
    MAX_GAP_S,
    MAX_STEPS,
    MIN_HUNG_S,
    UNFITTED_HUNG_S,
    EngineHealth,
    hung_s,
)
from headrace_engine.meter import EngineMeter, Progress, Step


class Engine:
    steps, running, now = 0, 0, 0.0
    longest_step_s: float | None = 0.01

    def health(self) -> EngineHealth:
        async def well(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        def progress() -> Progress:
            return Progress(self.steps, self.running, self.longest_step_s)

        return EngineHealth(well, progress, lambda: self.now)


async def asked(health: EngineHealth, path: str = "/health") -> int:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await health({"type": "http", "path": path}, None, send)
    assert len(sent) == 1 or sent[1]["body"] == HUNG
    return int(sent[0]["status"])


async def asked_each_second(health: EngineHealth, engine: Engine, seconds: float) -> int:
    """The last answer."""
    until_s = engine.now + seconds
    status = await asked(health)
    while engine.now + 1.0 <= until_s:
        engine.now += 1.0
        status = await asked(health)
    return status


async def test_an_idle_engine_is_well_for_ever() -> None:
    engine = Engine()
    assert await asked_each_second(engine.health(), engine, 20 * MIN_HUNG_S) == 200


async def test_an_engine_that_makes_steps_is_well() -> None:
    engine = Engine()
    health, engine.running = engine.health(), 1
    for engine.steps in range(5):
        assert await asked_each_second(health, engine, MIN_HUNG_S) == 200


async def test_without_a_step_for_long_it_is_not_and_after_one_it_is_again() -> None:
    engine = Engine()
    health, engine.running = engine.health(), 1
    assert await asked_each_second(health, engine, MIN_HUNG_S) == 200
    engine.now += 0.1
    assert await asked(health) == 503
    assert await asked(health, "/v1/models") == 200, "only the health check tells"
    engine.steps = 1
    assert await asked(health) == 200


async def test_an_engine_whose_steps_are_long_has_the_time_that_they_take() -> None:
    engine = Engine()
    engine.longest_step_s = 25.0
    health, engine.running = engine.health(), 1
    assert await asked_each_second(health, engine, MAX_STEPS * 25.0) == 200
    engine.now += 1.0
    assert await asked(health) == 503


async def test_the_time_counts_from_the_first_question_about_requests() -> None:
    engine = Engine()
    health = engine.health()
    await asked(health)
    engine.now, engine.running = 5 * MIN_HUNG_S, 2
    assert await asked(health) == 200
    engine.now += MIN_HUNG_S / 2
    engine.running = 0
    assert await asked(health) == 200
    engine.now, engine.running = 9 * MIN_HUNG_S, 2
    assert await asked(health) == 200


async def test_an_old_question_says_nothing_of_the_time_in_between() -> None:
    """A request that was aborted before its first step leaves the count of steps as it was."""
    engine = Engine()
    health, engine.running = engine.health(), 1
    assert await asked(health) == 200
    engine.now += 20 * MIN_HUNG_S + MAX_GAP_S
    assert await asked(health) == 200, "another request, a while later"


def test_the_bound_follows_the_fit_of_the_engine_s_own_steps() -> None:
    meter = EngineMeter()
    assert hung_s(meter.progress(2048, 625, 16)) == UNFITTED_HUNG_S
    for _ in range(20):
        meter.step(Step(2048, 0, 0, 0.0, 2048 * 1024.0, 8.0))
    meter.load(1, 0, 0.1)
    slow = hung_s(meter.progress(2048, 625, 16))
    assert slow > MAX_STEPS * 8.0
    meter.load(1, 0, 0.9)
    assert hung_s(meter.progress(2048, 625, 16)) > slow, "more KV is attended to"


@pytest.mark.parametrize(("longest_s", "bound_s"), [(0.0, MIN_HUNG_S), (1e4, MAX_STEPS * 1e4)])
def test_no_engine_hangs_before_a_kernel_has_been_compiled(
    longest_s: float, bound_s: float
) -> None:
    assert hung_s(Progress(0, 1, longest_s)) == bound_s

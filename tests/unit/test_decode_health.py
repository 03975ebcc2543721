"""A replica's health check: it fails while the engine has requests and makes no step."""

from __future__ import annotations

from typing import Any

from headrace_decode.health import HUNG_S, Health


class Engine:
    steps, running, now = 0, 0, 0.0

    def health(self) -> Health:
        async def well(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        return Health(well, lambda: (self.steps, self.running), lambda: self.now)


async def asked(health: Health, path: str = "/health") -> int:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await health({"type": "http", "path": path}, None, send)
    return int(sent[0]["status"])


async def test_an_idle_engine_is_well_for_ever() -> None:
    engine = Engine()
    health = engine.health()
    for engine.now in (0.0, 10 * HUNG_S, 20 * HUNG_S):
        assert await asked(health) == 200


async def test_an_engine_that_makes_steps_is_well() -> None:
    engine = Engine()
    health, engine.running = engine.health(), 1
    for engine.steps in range(5):
        engine.now += HUNG_S
        assert await asked(health) == 200


async def test_without_a_step_for_long_it_is_not_and_after_one_it_is_again() -> None:
    engine = Engine()
    health, engine.running = engine.health(), 1
    assert await asked(health) == 200
    engine.now = HUNG_S
    assert await asked(health) == 200
    engine.now = HUNG_S + 0.1
    assert await asked(health) == 503
    assert await asked(health, "/v1/models") == 200, "only the health check tells"
    engine.steps = 1
    assert await asked(health) == 200


async def test_the_time_counts_from_the_first_question_about_requests() -> None:
    engine = Engine()
    health = engine.health()
    await asked(health)
    engine.now, engine.running = 5 * HUNG_S, 2
    assert await asked(health) == 200
    engine.now += HUNG_S / 2
    engine.running = 0
    assert await asked(health) == 200
    engine.now, engine.running = 9 * HUNG_S, 2
    assert await asked(health) == 200

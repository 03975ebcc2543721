"""A request of many prompts lets others in between them."""

from __future__ import annotations

import asyncio
import contextvars

from headrace_decode.turns import PROMPTS, Prompts, turn


async def begin(begun: list[str], name: str) -> None:
    await turn()
    begun.append(name)


def request(begun: list[str], name: str, prompts: int) -> list[asyncio.Task[None]]:
    """The tasks of a request's prompts."""

    def start() -> list[asyncio.Task[None]]:
        PROMPTS.set(Prompts())
        return [asyncio.create_task(begin(begun, name)) for _ in range(prompts)]

    return contextvars.copy_context().run(start)


async def test_each_prompt_has_a_turn_of_the_loop_and_a_neighbour_waits_for_one() -> None:
    begun: list[str] = []
    many = request(begun, "many", 100)
    most = before = 0
    neighbour: list[asyncio.Task[None]] = []
    while not all(task.done() for task in many):
        await asyncio.sleep(0)
        most, before = max(most, begun.count("many") - before), begun.count("many")
        if before == 10 and not neighbour:
            neighbour = request(begun, "neighbour", 1)
    assert most == 1
    assert begun.index("neighbour") < 20
    assert len(begun) == 101


async def test_what_is_no_request_does_not_wait() -> None:
    begun: list[str] = []
    await begin(begun, "own")
    assert begun == ["own"]

"""Long work of an event loop: others go on between its pieces."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from time import perf_counter
from typing import Any

import msgspec
import pytest

from headrace_decode.apis.middleware import LONG_BYTES, REST_S_A_BYTE, ApiMiddleware
from headrace_decode.apis.request_checks import EngineAbilities
from headrace_decode.http.event_loop import PIECE_BYTES, run_then_rest
from headrace_decode.resume.emitted import EmittedChoice, encode_line
from headrace_decode.resume.journal import Journal
from headrace_decode.resume.recorder import _outputs

WORK_S = 0.02


def work() -> str:
    end_s = perf_counter() + WORK_S
    while perf_counter() < end_s:
        pass
    return "done"


def fail() -> None:
    work()
    raise ValueError("wrong")


async def turns_beside(awaited: Awaitable[object]) -> int:
    """Turns of the loop that another task has meanwhile."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await awaited
    task.cancel()
    return turns


async def test_a_rest_is_as_long_as_the_work() -> None:
    began_s = perf_counter()
    assert await run_then_rest(work) == "done"
    assert perf_counter() - began_s >= 2 * WORK_S


async def test_work_that_fails_is_followed_by_a_rest_too() -> None:
    began_s = perf_counter()
    with pytest.raises(ValueError, match="wrong"):
        await run_then_rest(fail)
    assert perf_counter() - began_s >= 2 * WORK_S


async def test_others_go_on_while_a_client_s_stream_is_read() -> None:
    had = (encode_line((EmittedChoice(0, (5,)),)) + b"data: {}\n\n") * 50_000
    journal = Journal(sends_lines=True)
    assert await turns_beside(journal.read(had)) > len(had) // PIECE_BYTES
    assert journal.progress == 50_000


async def test_others_go_on_while_lines_are_read() -> None:
    lines = encode_line((EmittedChoice(0, (5,)),)) * 50_000
    read: list[object] = []

    async def reading() -> None:
        read.extend(await _outputs(lines))

    assert await turns_beside(reading()) > len(lines) // PIECE_BYTES
    assert read == [(EmittedChoice(0, (5,)),)] * 50_000


@pytest.mark.parametrize("cut", [b":hr [", b"data: {}\n\n", b":hr []"])
async def test_lines_that_are_none_are_an_error_in_any_piece(cut: bytes) -> None:
    with pytest.raises(ValueError, match="line"):
        await _outputs(encode_line((EmittedChoice(0, (5,)),)) * 5_000 + cut)


async def test_long_bodies_reach_the_application_one_after_the_other() -> None:
    came: list[tuple[int, float]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        came.append((len((await receive())["body"]), perf_counter()))

    layer = ApiMiddleware(app, EngineAbilities(), lambda: False)

    def ask(text: str) -> Awaitable[None]:
        body = msgspec.json.encode({"prompt": text})

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        return layer(scope, receive, None)

    await asyncio.gather(*(ask("x" * 2 * LONG_BYTES) for _ in range(4)), ask("x"))
    (first, _), *long_ones = came
    assert first < LONG_BYTES, "a short body waits for none"
    apart_s = [later - earlier for (_, earlier), (_, later) in itertools.pairwise(long_ones)]
    assert min(apart_s) >= REST_S_A_BYTE * LONG_BYTES

"""The serving benchmark's clients, against a server that streams what we tell it to."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from benchmarks.serving.arm import engine_flags
from benchmarks.serving.load import Load, run
from benchmarks.serving.workloads import Conversation

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GAP_S = 0.02


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def content(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


def usage(tokens: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": 50, "completion_tokens": tokens})


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
DONE = b"data: [DONE]\n\n"


def streams(*chunks: bytes, seen: list[dict[str, Any]] | None = None) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(GAP_S)
        return response

    return answer


@asynccontextmanager
async def server(handler: Handler, path: str = "/v1/chat/completions") -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask(handler: Handler, *talks: Conversation, clients: int = 1, tokens: int = 2) -> Load:
    async with server(handler) as url:
        return await run(url, "m", talks, clients, output_tokens=tokens)


HELLO = Conversation(None, ("hello",))


async def test_ttft_is_taken_at_the_first_chunk_with_content() -> None:
    load = await ask(streams(ROLE, content("a"), content("b"), usage(2), DONE), HELLO)
    (sample,) = load.samples
    assert sample.error is None
    assert (sample.text, sample.prompt_tokens, sample.output_tokens) == ("ab", 50, 2)
    assert len(sample.arrivals_s) == 2
    assert sample.ttft_s is not None and sample.ttft_s >= GAP_S
    assert sample.arrivals_s[1] - sample.arrivals_s[0] >= 0.5 * GAP_S


async def test_events_may_be_cut_anywhere_and_share_a_read() -> None:
    whole = ROLE + content("a") + content("b") + usage(2) + DONE
    for cut in (1, 30, len(ROLE) + 20, len(whole) - 5):
        load = await ask(streams(whole[:cut], whole[cut:]), HELLO)
        assert load.samples[0].error is None
        assert load.samples[0].text == "ab"


async def test_every_request_asks_for_exactly_so_many_greedy_tokens() -> None:
    seen: list[dict[str, Any]] = []
    await ask(streams(content("a"), usage(2), seen=seen), HELLO)
    assert seen == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_a_conversation_carries_its_history() -> None:
    seen: list[dict[str, Any]] = []
    talk = Conversation("be brief", ("one", "two"))
    await ask(streams(content("yes"), usage(2), seen=seen), talk)
    assert [m["content"] for m in seen[1]["messages"]] == ["be brief", "one", "yes", "two"]
    assert [m["role"] for m in seen[1]["messages"]] == ["system", "user", "assistant", "user"]


async def test_so_many_clients_ask_at_once_and_no_more() -> None:
    now = most = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            return await streams(content("a"), usage(2))(request)
        finally:
            now -= 1

    load = await ask(answer, *[HELLO] * 9, clients=3)
    assert len(load.samples) == 9
    assert most == 3


async def test_an_answer_of_another_length_is_an_error() -> None:
    load = await ask(streams(content("a"), usage(1)), HELLO)
    assert load.samples[0].error == "1 tokens came instead of 2"


async def test_a_refusal_is_an_error_and_ends_the_conversation() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="busy")

    load = await ask(refuse, Conversation(None, ("one", "two")))
    assert [s.error for s in load.samples] == ["HTTP 503: busy"]


async def test_an_error_inside_the_stream_is_an_error() -> None:
    load = await ask(streams(content("a"), event(error={"message": "engine died"})), HELLO)
    assert "engine died" in (load.samples[0].error or "")


async def test_nobody_listening_is_an_error() -> None:
    load = await run("http://127.0.0.1:9", "m", [HELLO], 1)
    assert load.samples[0].error is not None


def test_the_plain_engine_gets_the_same_settings_but_the_connector() -> None:
    kwargs = {
        "kv_transfer_config": {"kv_connector": "NixlConnector"},
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "dtype": "float32",
        "max_model_len": 8192,
    }
    assert engine_flags(kwargs) == [
        *("--enforce-eager", "--no-enable-prefix-caching"),
        *("--dtype", "float32", "--max-model-len", "8192"),
    ]

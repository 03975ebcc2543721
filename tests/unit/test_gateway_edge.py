"""The edge of the gateway: deadlines, answers that are held, headers, names and slashes."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from headrace.config.gateway import GatewaySettings
from headrace.gateway import build_gateway_app
from headrace.gateway.admin_schemas import WarmRequest
from headrace.gateway.corpora import CorpusPart
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress import limits
from headrace.gateway.ingress.allowed_hosts import AllowedHosts, host_name
from headrace.gateway.relay.retry import MAX_BUFFERED_BYTES, MAX_ERROR_BYTES
from tests.unit.gateway_fakes import (
    CHAT,
    MESSAGES,
    MODEL,
    PROMPT,
    Bench,
    FakeCluster,
    FakeReplica,
    answer,
    begin_stream,
    cut,
    gateway_over,
    soon,
)

JSON = {"content-type": "application/json"}
LARGE = {**PROMPT, "user": "x" * 300_000, "stream": True}


@contextmanager
def unread(port: int, body: Any, path: str = CHAT) -> Iterator[socket.socket]:
    """A client that asks and never reads."""
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        sock.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(sent) + sent)
        yield sock


async def nothing_is_held(bench: Bench, limit_s: float = 15.0) -> None:
    """No task, connection or byte of a budget is left of any client."""
    state = bench.gateway.uvicorn_server.server_state
    await soon(lambda: bench.app.body_reader.held_bytes == 0, limit_s)
    await soon(lambda: bench.app.relaying == 0, limit_s)
    await soon(lambda: not state.tasks and not state.connections, limit_s)


# Deadlines.


async def endless(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """A stream without end, as fast as it is read."""
    response = await begin_stream(request, {"x-headrace-replay": "1"})
    while True:
        await response.write(b"data: %s\n\n" % (b"x" * 10_000))


async def test_a_deadline_ends_a_stream_that_nobody_reads_with_all_that_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.gateway.request_context.REFUSAL_TIMEOUT_S", 0.3)
    async with gateway_over(endless, request_timeout_s=0.5) as bench:
        with unread(bench.gateway.port, LARGE):
            await soon(lambda: bench.app.relaying == 1)
            await soon(lambda: bench.app.relaying == 0)
            assert bench.app.body_reader.held_bytes == 0, "before the client could be told"
            await nothing_is_held(bench, 5.0)


async def test_a_deadline_ends_an_answer_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.request_context.REFUSAL_TIMEOUT_S", 0.3)

    async def large(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"a" * 20_000_000)

    async with gateway_over(large, request_timeout_s=0.5) as bench:
        with unread(bench.gateway.port, PROMPT):
            await soon(lambda: bench.app.relaying == 1)
            await nothing_is_held(bench, 5.0)


async def test_a_client_that_hangs_up_after_the_deadline_is_not_waited_for() -> None:
    async with gateway_over(endless, request_timeout_s=0.3) as bench:
        with unread(bench.gateway.port, LARGE):
            await soon(lambda: bench.app.relaying == 1)
            await asyncio.sleep(0.6)
        await nothing_is_held(bench, 2.0)


async def test_sixty_clients_that_do_not_read_hold_no_more_than_their_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.gateway.request_context.REFUSAL_TIMEOUT_S", 0.3)
    async with gateway_over(endless, request_timeout_s=1.0) as bench:
        opened = [unread(bench.gateway.port, LARGE) for _ in range(60)]
        for each in opened:
            each.__enter__()
        await soon(lambda: bench.app.relaying > 0)
        await nothing_is_held(bench)
        for each in opened:
            each.__exit__(None, None, None)


async def test_a_deadline_before_the_head_could_be_written_is_still_answered() -> None:
    replica = await FakeReplica(answer).start()
    app = build_gateway_app(GatewaySettings(request_timeout_s=0.5), FakeCluster([replica]), MODEL)
    sent: list[dict[str, Any]] = []
    asked = [{"type": "http.request", "body": json.dumps(PROMPT).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            await asyncio.Event().wait()  # the client reads nothing of the answer before
        sent.append(message)

    headers = [(name.encode(), value.encode()) for name, value in JSON.items()]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
    await app(scope, receive, send)
    assert [message.get("status") for message in sent] == [504, None]
    await app.aclose()
    await replica.stop()


async def test_documents_have_a_deadline_too() -> None:
    class Slow(FakeCluster):
        async def metrics(self) -> bytes:
            await asyncio.Event().wait()
            return b""

    async with (
        gateway_over(answer, backend=Slow(), request_timeout_s=0.3) as bench,
        bench.client.get("/metrics") as response,
    ):
        assert response.status == 504
        assert response.headers["connection"] == "close"


# Answers that are no streams.


@pytest.mark.parametrize(
    "size", [0, 10, MAX_BUFFERED_BYTES, MAX_BUFFERED_BYTES + 1, 5 * MAX_BUFFERED_BYTES]
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_answer_of_any_size_is_passed_on_whole(size: int, chunked: bool) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]

    async def answers(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = web.Response(body=body)
        if chunked:
            response.enable_chunked_encoding()
        return response

    async with gateway_over(answers) as bench:
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 200
            assert await response.read() == body
        assert bench.app.body_reader.held_bytes == 0


async def test_of_a_large_answer_no_more_is_held_than_the_client_reads() -> None:
    written = 0

    async def large(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"content-length": "100000000"})
        await response.prepare(request)
        for _ in range(1_000):
            await response.write(b"a" * 100_000)
            written += 100_000
        return response

    async with gateway_over(large) as bench:
        with unread(bench.gateway.port, PROMPT):
            await soon(lambda: written > MAX_BUFFERED_BYTES)
            await asyncio.sleep(0.5)
            assert written < 20_000_000  # most of it in the kernel's buffers between the two
            assert 0 < bench.app.body_reader.held_bytes <= 2 * MAX_BUFFERED_BYTES
        await nothing_is_held(bench)


async def test_answers_for_which_the_budget_has_no_room_are_passed_on_all_the_same() -> None:
    body = b"a" * 500_000

    async def large(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    async with (
        gateway_over(large, body_budget_bytes=20_000, max_body_bytes=10_000) as bench,
        bench.client.post(CHAT, json=PROMPT) as response,
    ):
        assert await response.read() == body


async def test_a_large_answer_that_breaks_off_is_not_taken_for_whole() -> None:
    async def breaks(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"a" * 3 * MAX_BUFFERED_BYTES)
        await asyncio.sleep(0.1)
        cut(request)
        return response

    async with gateway_over(breaks) as bench:
        with pytest.raises(Exception, match=r"payload|closed|disconnected|Connection"):
            async with bench.client.post(CHAT, json=PROMPT) as response:
                await response.read()
        await nothing_is_held(bench)


@pytest.mark.parametrize("path, shape", [(CHAT, "error"), (MESSAGES, "type")])
@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_an_error_of_a_replica_is_at_most_64_kib(path: str, shape: str, status: int) -> None:
    async def verbose(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "x" * 10_000_000}, status=status)

    async with gateway_over(verbose) as bench, bench.client.post(path, json=PROMPT) as response:
        body = await response.read()
        assert response.status == status
        assert len(body) < 1_000
        assert shape in json.loads(body)


async def test_an_error_of_a_replica_that_is_short_is_its_own() -> None:
    said = json.dumps({"error": {"message": "y" * (MAX_ERROR_BYTES - 100)}}).encode()

    async def short(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.Response(body=said, status=400)

    async with gateway_over(short) as bench, bench.client.post(CHAT, json=PROMPT) as response:
        assert await response.read() == said


# Log-probabilities.


@pytest.mark.parametrize(
    "more, size, passes",
    [
        ({"n": 128, "max_tokens": 8192, "logprobs": True, "top_logprobs": 20}, 100, False),
        ({"n": 128, "logprobs": True, "top_logprobs": 20}, 100, False),
        ({"n": 1, "max_tokens": 32768, "logprobs": True, "top_logprobs": 20}, 100, True),
        ({"n": 4, "logprobs": True, "top_logprobs": 20}, 100, True),
        ({"n": 128, "max_tokens": 16, "logprobs": True, "top_logprobs": 20}, 100, True),
        ({"n": 128, "max_tokens": 8192}, 100, True),
        ({"prompt": ["x"] * 1024, "n": 16, "max_tokens": 16, "logprobs": 20}, 9000, False),
        ({"prompt": ["x"] * 1024, "logprobs": 5}, 9000, True),
        ({"prompt": "x", "prompt_logprobs": 20}, 8_000_000, False),
        ({"prompt": "x", "echo": True, "logprobs": 20}, 8_000_000, False),
        ({"prompt": "x", "prompt_logprobs": 20}, 100_000, True),
        ({"n": 10**4000, "max_tokens": 10**4000, "logprobs": True}, 9000, False),
        ({"n": "many", "max_tokens": [], "logprobs": {}, "top_logprobs": "x"}, 100, True),
    ],
)
def test_an_answer_cannot_have_millions_of_log_probabilities(
    more: dict[str, Any], size: int, passes: bool
) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], **more}
    if "prompt" in more:
        del asked["messages"]
    if passes:
        limits.check_logprobs(asked, size)
    else:
        with pytest.raises(ApiError, match="log-probabilities"):
            limits.check_logprobs(asked, size)


@pytest.mark.parametrize("field", ["messages", "input"])
def test_a_message_cannot_have_very_many_parts(field: str) -> None:
    few, many = ([{"role": "user", "content": [{}] * n}] for n in (1_000, 40_000))
    limits.check_fields({field: few})
    for wrong in (many, [many], [{"role": "user", "tool_calls": [[{}] * 40_000]}]):
        with pytest.raises(ApiError, match="parts"):
            limits.check_fields({field: wrong})


@pytest.mark.parametrize(
    "model, body",
    [
        (CorpusPart, {"texts": [1] * 1_000_000}),
        (CorpusPart, {f"x{n}": 1 for n in range(250_000)}),
        (WarmRequest, {"prompts": [["x"] * 1_000_000]}),
        (WarmRequest, {"prompts": [1] * 1_000_000}),
        (WarmRequest, {"chats": [[{}] * 250_000]}),
        (WarmRequest, {"chats": [[]] * 250_000}),
    ],
)
def test_a_malformed_administrative_request_is_refused_at_once(model: Any, body: Any) -> None:
    began_s = time.thread_time()
    with pytest.raises(ApiError) as refused:
        limits.validated(model, body)
    assert time.thread_time() - began_s < 0.25
    assert len(refused.value.message) < 500


# Headers.


async def test_each_connection_header_names_headers_that_are_not_passed_on() -> None:
    async with gateway_over(answer) as bench:
        body = json.dumps(PROMPT).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.port)
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            "connection: x-a\r\nconnection: X-B, close\r\nx-a: 1\r\nx-b: 2\r\nx-c: 3\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert b" 200 " in await reader.read()
        writer.close()
        (seen,) = bench.replica.seen
        assert "x-a" not in seen.headers and "x-b" not in seen.headers
        assert seen.headers["x-c"] == "3"


async def test_no_header_of_an_answer_comes_twice() -> None:
    async def repeats(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        own = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return web.json_response({}, headers={**own, "x-other": "kept"})

    async with gateway_over(repeats) as bench:
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/health")):
            async with bench.client.request(method, path, json=PROMPT) as response:
                names = [name.lower() for name in response.headers]
                assert len(names) == len(set(names)), names
                assert response.headers["cache-control"] == "no-store"


# Slashes.


@pytest.mark.parametrize(
    "method, path, place",
    [
        ("POST", CHAT + "/", CHAT),
        ("GET", "/v1/models/", "/v1/models"),
        ("GET", "/v1/models///", "/v1/models"),
        ("GET", "/health/?a=b&c", "/health?a=b&c"),
        ("GET", "/headrace/v1/status/", "/headrace/v1/status"),
        ("GET", "/headrace/v1/corpora/", "/headrace/v1/corpora"),
        ("GET", "/headrace/v1/store/", "/headrace/v1/store"),
    ],
)
async def test_a_slash_too_many_is_307_as_with_vllm(method: str, path: str, place: str) -> None:
    async with gateway_over(answer) as bench:
        async with bench.client.post(CHAT, json=PROMPT):
            pass  # the gateway knows the replicas' routes now
        ask = bench.client.request
        async with ask(method, path, json=PROMPT, allow_redirects=False) as response:
            assert (response.status, response.headers["location"]) == (307, place)
        async with ask(method, path, json=PROMPT) as response:
            assert response.status == 200


@pytest.mark.parametrize("path", ["//evil.example/", "/nothing/", "/v1/nothing//", "//"])
async def test_a_slash_after_nothing_is_404(path: str) -> None:
    async with gateway_over(answer) as bench:
        async with bench.client.post(CHAT, json=PROMPT):
            pass
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert b" 404 " in (await reader.read()).partition(b"\r\n")[0]
        writer.close()


# Names.


@pytest.mark.parametrize(
    "host, options, status",
    [
        ("127.0.0.1:8000", {}, 200),
        ("[::1]:8000", {}, 200),
        ("localhost", {}, 200),
        ("LOCALHOST.:8000", {}, 200),
        ("a.localhost:1", {}, 200),
        ("10.1.2.3", {}, 200),
        ("headrace", {}, 200),
        ("headrace.llm.svc.cluster.local:8000", {}, 200),
        ("evil.example", {}, 403),
        ("evil.example:8000", {}, 403),
        ("127.0.0.1.evil.example", {}, 403),
        ("localhost.evil.example", {}, 403),
        ("llm.example.com", {"host": "llm.example.com"}, 200),
        ("llm.example.com:80", {"allowed_hosts": ("LLM.example.com",)}, 200),
        ("x.example.com", {"allowed_hosts": ("*.example.com",)}, 200),
        ("example.com", {"allowed_hosts": ("*.example.com",)}, 403),
        ("evil.example", {"allowed_hosts": ("*",)}, 200),
        ("evil.example", {"api_keys": ("right-key",)}, 200),
    ],
)
async def test_without_keys_a_request_for_another_name_is_403(
    host: str, options: dict[str, Any], status: int
) -> None:
    headers = {"host": host, "authorization": "Bearer right-key"}
    async with gateway_over(answer, **options) as bench:
        async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
            assert response.status == status
            if status == 403:
                assert (await response.json())["error"]["code"] == "host_not_allowed"
        async with bench.client.get("/health", headers=headers) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    "host, status", [("localhost", 200), ("127.0.0.6", 200), ("headrace", 403), ("10.1.2.3", 403)]
)
async def test_without_keys_only_names_of_this_machine_administer(host: str, status: int) -> None:
    """A sidecar that delivers from loopback, such as Istio's, keeps the `Host` of its client."""
    async with (
        gateway_over(answer) as bench,
        bench.client.get("/headrace/v1/status", headers={"host": host}) as response,
    ):
        assert response.status == status


def test_a_host_is_read_with_and_without_its_port() -> None:
    assert host_name(b"A.b:80") == host_name(b"a.b.") == "a.b"
    assert host_name(b"[::1]:80") == host_name(b"::1") == "::1"
    AllowedHosts([]).check(None)

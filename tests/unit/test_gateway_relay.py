"""The relay when all goes well: bytes and headers, streams, hang-ups, time limits, reports."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from headrace.config.key_file import KeyEntry, KeyFile, hash_of, write_keys
from tests.unit.gateway_fakes import (
    BODY,
    CHAT,
    EVENTS,
    MODEL,
    PROMPT,
    TOKEN,
    FakeReplica,
    answer,
    begin_stream,
    gateway_over,
    soon,
    stall,
    stream,
)


async def test_the_replica_gets_the_clients_bytes_and_path_unchanged() -> None:
    body = b'{ "messages" :[], "x": 1.0,  "\xc3\xa9": "\\u00e9" }'
    async with gateway_over(answer) as bench:
        headers = {"content-type": "application/json"}
        url = "/v1/completions?a=1&b=%20"
        async with bench.client.post(url, data=body, headers=headers) as response:
            assert response.status == 200
        seen = bench.replica.seen[0]
        assert seen[BODY] == body
        assert seen.path_qs == "/v1/completions?a=1&b=%20"


async def test_the_client_gets_the_replicas_status_headers_and_bytes_unchanged() -> None:
    body = b'{"error":{"message":"no such model","code":404}}'

    async def refuse(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        headers = {"content-type": "application/json", "x-extra": "1"}
        return web.Response(status=404, body=body, headers=headers)

    async with gateway_over(refuse) as bench, bench.client.post(CHAT, json=PROMPT) as response:
        assert (response.status, await response.read()) == (404, body)
        assert response.headers["x-extra"] == "1"
        assert response.headers["x-headrace-replica"] == "decode-1"
        assert len(response.headers.getall("date")) == 1


async def test_a_compressed_answer_stays_compressed() -> None:
    async def gzip(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"\x1f\x8bnot really", headers={"content-encoding": "gzip"})

    async with gateway_over(gzip) as bench, bench.client.post(CHAT, json=PROMPT) as response:
        assert await response.read() == b"\x1f\x8bnot really"


async def test_headers_that_are_not_for_the_replica_are_left_out() -> None:
    async with gateway_over(answer, api_keys=("key",)) as bench:
        headers = {
            "authorization": "Bearer key",
            "x-headrace-internal": "forged",
            "x-headrace-other": "forged",
            "connection": "x-hop",
            "x-hop": "1",
            "te": "trailers",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "tracestate": "a=b",
            "x-mine": "kept",
        }
        async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
            assert response.status == 200
        seen = bench.replica.seen[0].headers
        assert seen.getall("x-headrace-internal") == [TOKEN]
        assert not {"authorization", "x-headrace-other", "x-hop", "te"} & {k.lower() for k in seen}
        for name in ("traceparent", "tracestate", "x-mine"):
            assert seen[name] == headers[name]
        assert seen["content-type"] == "application/json"
        assert "gzip" in seen["accept-encoding"]


async def test_a_plain_request_id_goes_through_and_comes_back() -> None:
    async with gateway_over(answer) as bench:
        headers = {"x-request-id": "my.id:1_2-3"}
        async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
            assert response.headers.getall("x-request-id") == ["my.id:1_2-3"]
        assert bench.replica.seen[0].headers.getall("x-request-id") == ["my.id:1_2-3"]


@pytest.mark.parametrize("given", [None, "", "with space", "a" * 129, "é"])
async def test_any_other_request_id_is_replaced(given: str | None) -> None:
    async with gateway_over(answer) as bench:
        headers = {} if given is None else {"x-request-id": given}
        async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
            made = response.headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", made)
        assert bench.replica.seen[0].headers["x-request-id"] == made


async def test_a_stream_arrives_byte_for_byte_and_event_by_event() -> None:
    go_on = asyncio.Event()

    async def slow(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(EVENTS[0])
        await go_on.wait()
        for event in EVENTS[1:]:
            await response.write(event)
        return response

    async with gateway_over(slow) as bench, bench.client.post(CHAT, json=PROMPT) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert await response.content.readany() == EVENTS[0]
        go_on.set()
        assert await response.content.read() == b"".join(EVENTS[1:])


async def test_an_event_in_pieces_is_passed_on_whole() -> None:
    async def pieces(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        for piece in (b"da", b'ta: {"i":0}\n', b'\ndata: {"i"', b":1}\n\nrest"):
            await response.write(piece)
            await asyncio.sleep(0.03)
        return response

    async with gateway_over(pieces) as bench, bench.client.post(CHAT, json=PROMPT) as response:
        chunks = [chunk async for chunk in response.content.iter_any()]
        assert chunks == [EVENTS[0], EVENTS[1], b"rest"]


async def test_a_large_stream_to_a_slow_reader_is_whole() -> None:
    event = b"data: " + b"x" * 5000 + b"\n\n"

    async def many(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        for _ in range(2000):
            await response.write(event)
        return response

    async with gateway_over(many) as bench, bench.client.post(CHAT, json=PROMPT) as response:
        await asyncio.sleep(0.3)
        assert await response.read() == event * 2000


async def test_large_bodies_pass_both_ways() -> None:
    async def echo(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.Response(body=request[BODY])

    body = json.dumps({"prompt": "x" * 7_000_000})
    async with gateway_over(echo) as bench:
        headers = {"content-type": "application/json"}
        async with bench.client.post("/v1/completions", data=body, headers=headers) as response:
            assert await response.read() == body.encode()


async def test_a_client_that_leaves_before_the_answer_aborts_it_at_the_replica() -> None:
    async with gateway_over(stall) as bench:
        task = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await soon(lambda: len(bench.replica.seen) == 1)
        task.cancel()
        await soon(lambda: bench.replica.aborted == 1, limit_s=1)


async def test_a_client_that_leaves_mid_stream_aborts_it_at_the_replica() -> None:
    async def endless(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(EVENTS[0])
        await asyncio.sleep(3600)
        return response

    async with gateway_over(endless) as bench:
        response = await bench.client.post(CHAT, json=PROMPT)
        assert await response.content.readany() == EVENTS[0]
        response.close()
        await soon(lambda: bench.replica.aborted == 1, limit_s=1)


async def test_a_client_that_leaves_while_a_whole_answer_is_gathered_aborts_it() -> None:
    async def half(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"half":')
        await asyncio.sleep(3600)
        return response

    async with gateway_over(half) as bench:
        task = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await soon(lambda: len(bench.replica.seen) == 1)
        await asyncio.sleep(0.05)
        task.cancel()
        await soon(lambda: bench.replica.aborted == 1, limit_s=1)


async def test_a_client_that_leaves_while_no_replica_is_ready_frees_its_place() -> None:
    async with gateway_over(max_concurrent=1) as bench:
        task = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await asyncio.sleep(0.2)
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 429
        task.cancel()
        await asyncio.sleep(0.2)
        bench.cluster.members.append(await FakeReplica(answer).start())
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 200


async def test_time_up_before_the_first_byte_is_504_and_aborts() -> None:
    async with gateway_over(stall, request_timeout_s=0.3) as bench:
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "request_timeout"
        await soon(lambda: bench.replica.aborted == 1, limit_s=1)


async def test_time_up_mid_stream_is_an_error_event_and_a_clean_end_without_done() -> None:
    async def endless(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(EVENTS[0] + b"data: {half")
        await asyncio.sleep(3600)
        return response

    async with gateway_over(endless, request_timeout_s=0.3) as bench:
        async with bench.client.post(CHAT, json=PROMPT) as response:
            events = (await response.read()).split(b"\n\n")
        assert events[0] + b"\n\n" == EVENTS[0]
        assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == "request_timeout"
        assert events[2:] == [b""]
        await soon(lambda: bench.replica.aborted == 1, limit_s=1)


async def test_connections_to_the_replica_are_kept_and_reused() -> None:
    peers = set()

    async def note(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return await (stream if len(peers) % 2 else answer)(replica, request)

    async with gateway_over(note) as bench:
        for _ in range(6):
            async with bench.client.post(CHAT, json=PROMPT) as response:
                await response.read()
        assert len(peers) == 1


async def test_requests_spread_over_replicas_that_are_busy() -> None:
    async with gateway_over(stall, stall) as bench:
        tasks = [asyncio.create_task(bench.client.post(CHAT, json=PROMPT)) for _ in range(6)]
        members = bench.cluster.members
        await soon(lambda: sum(len(member.seen) for member in members) == 6)
        assert [len(member.seen) for member in members] == [3, 3]
        for task in tasks:
            task.cancel()


async def test_one_log_line_a_request_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headrace.gateway"):
        async with gateway_over(stream) as bench:
            headers = {"x-request-id": "r1"}
            async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
                await response.read()
    lines = [record for record in caplog.records if record.name == "headrace.gateway"]
    assert len(lines) == 1
    line: Any = lines[0]
    assert (line.request_id, line.method, line.path, line.status) == ("r1", "POST", CHAT, 200)
    assert line.replica == "decode-1" and line.bytes == len(b"".join(EVENTS))
    assert 0 < line.ttft_ms < line.total_ms


class Counts:
    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.tenants: list[tuple[str, int, int | None]] = []
        self.own: list[float] = []
        self.refusals: list[tuple[int, str]] = []
        self.lost: list[str] = []
        self.states: list[tuple[int, int, float]] = []

    def request_done(self, *args: Any) -> None:
        self.done.append(args)

    def tenant_done(self, tenant: str, model: str, status: int, tokens: int | None) -> None:
        self.tenants.append((tenant, status, tokens))

    def own_seconds(self, seconds: float) -> None:
        self.own.append(seconds)

    def refused(self, status: int, code: str) -> None:
        self.refusals.append((status, code))

    def techniques(self, applied: str) -> None:
        assert applied == "exact"

    def replica_lost(self, model: str, when: str) -> None:
        self.lost.append(when)

    def state(self, *told: Any) -> None:
        self.states.append(told)


async def test_metrics_tell_status_times_and_the_gateways_own_share() -> None:
    counts = Counts()
    async with gateway_over(stream, metrics=counts) as bench:
        async with bench.client.post(CHAT, json=PROMPT) as response:
            await response.read()
        async with bench.client.post(CHAT, data=b"{") as response:
            await response.read()
        await soon(lambda: len(counts.done) == 2)
    model, path, status, ttft_s, seconds, streamed = counts.done[0]
    assert (model, path, status, streamed) == (MODEL, CHAT, 200, True)
    assert 0 < ttft_s < seconds
    assert counts.done[1][:4] == (MODEL, CHAT, 400, None)
    assert len(counts.own) == 1 and 0 < counts.own[0] < 0.1
    assert [status for status, _ in counts.refusals] == [400] and counts.refusals[0][1]
    model, ready, relaying, oldest_s = counts.states[-1]
    assert model == MODEL and ready == 1 and relaying >= 0 and oldest_s == 0.0
    assert counts.tenants == [], "without keys there are no tenants"


async def test_requests_and_answer_tokens_are_counted_for_the_tenant_of_the_key(
    tmp_path: Path,
) -> None:
    async def usage(_: FakeReplica, request: web.Request) -> web.Response:
        return web.json_response({"usage": {"completion_tokens": 7}})

    file, counts = tmp_path / "keys.yaml", Counts()
    entry = KeyEntry(name="till", hash=hash_of(b"right"), tenant="shop")
    write_keys(file, KeyFile(keys=[entry]))
    async with gateway_over(usage, metrics=counts, api_keys_file=str(file)) as bench:
        for key in ("right", "wrong"):
            headers = {"authorization": f"Bearer {key}"}
            async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
                await response.read()
        await soon(lambda: len(counts.done) == 2)
    assert counts.tenants == [("shop", 200, 7)]


async def test_the_gateways_own_share_leaves_out_the_wait_for_a_replica() -> None:
    counts = Counts()
    async with gateway_over(metrics=counts) as bench:
        task = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await asyncio.sleep(0.3)
        bench.cluster.members.append(await FakeReplica(answer).start())
        assert (await task).status == 200
        await soon(lambda: len(counts.own) == 1)
    assert counts.own[0] < 0.1


async def test_a_hang_up_is_counted_as_499() -> None:
    counts = Counts()
    async with gateway_over(stall, metrics=counts) as bench:
        task = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await soon(lambda: len(bench.replica.seen) == 1)
        task.cancel()
        await soon(lambda: len(counts.done) == 1)
    assert counts.done[0][2] == 499


async def test_a_whole_client_library_works_through_it() -> None:
    async with (
        gateway_over(stream) as bench,
        aiohttp.ClientSession() as client,
        client.post(bench.url + CHAT, json=PROMPT, expect100=True) as response,
    ):
        assert await response.read() == b"".join(EVENTS)


async def test_a_gateway_that_stops_answers_what_it_cannot_finish_with_an_error() -> None:
    async with gateway_over() as bench:
        bench.cluster.members.clear()
        waiting = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await asyncio.sleep(0.3)
        await bench.gateway.stop(1.0)
        response = await waiting
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "gateway_stopping"


async def test_a_stream_that_a_stopping_gateway_cuts_ends_with_an_error() -> None:
    async def begin(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(EVENTS[0])
        await asyncio.sleep(3600)
        return response

    async with gateway_over(begin) as bench:
        response = await bench.client.post(CHAT, json=PROMPT)
        assert await response.content.readany() == EVENTS[0]
        await bench.gateway.stop(1.0)
        assert b"gateway_stopping" in await response.read()

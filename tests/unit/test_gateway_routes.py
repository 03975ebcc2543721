"""Relaying by what the replicas offer: what is found, refused and guarded, and in whose words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from headrace.gateway import ReplicaInfo
from headrace.gateway.errors import ApiError
from headrace.gateway.relay.dialect import DIALECTS
from headrace.gateway.route_table import RouteTable
from headrace.observability.gateway_metrics import GatewayMetrics
from headrace_decode.http.public_routes import Route
from tests.unit.gateway_fakes import (
    BODY,
    CHAT,
    MESSAGES,
    MODEL,
    PROMPT,
    RESPONSES,
    ROUTES,
    FakeCluster,
    FakeReplica,
    answer,
    begin_stream,
    cut,
    gateway_over,
    soon,
)

BY_ID = RESPONSES + "/{response_id}"


# The table


def test_a_path_is_found_by_its_template() -> None:
    table = RouteTable(ROUTES)
    assert set(table.at(CHAT)) == {"POST"}
    assert table.at(f"{RESPONSES}/resp_1.2:a-b")["GET"].path == BY_ID
    assert table.at(f"{RESPONSES}/resp_1/cancel")["POST"].path == BY_ID + "/cancel"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/v1",
        CHAT + "/",
        CHAT + "/render",
        "//v1/responses",
        f"{RESPONSES}/",
        f"{RESPONSES}/..",
        f"{RESPONSES}/a/b",
        f"{RESPONSES}/a b",
        f"{RESPONSES}/a\r\nx-headrace-internal: 1",
        f"{RESPONSES}/a?b",
        f"{RESPONSES}/a#b",
        f"{RESPONSES}/%2e%2e",
        f"{RESPONSES}/" + "x" * 129,
        f"{RESPONSES}/é",
        BY_ID,
        "/v1/x/chat/completions",
    ],
)
def test_any_other_path_is_not_found(path: str) -> None:
    assert not RouteTable(ROUTES).at(path)


def test_an_unknown_field_of_a_replicas_answer_is_ignored() -> None:
    told = {"replica_id": "a", "url": "http://x", "colour": "red"}
    route = {"method": "GET", "path": "/x", "api": "openai", "takes_json": False, "more": 1}
    info = ReplicaInfo.of({**told, "routes": [route], "prices": None})
    assert info == ReplicaInfo("a", "http://x", routes=(Route("GET", "/x", takes_json=False),))


# What is relayed


async def test_a_route_that_a_replica_offers_is_relayed_and_any_other_is_not_found() -> None:
    async with gateway_over(answer) as bench:
        for path in (CHAT, RESPONSES, MESSAGES):
            async with bench.client.post(path, json=PROMPT) as response:
                assert response.status == 200
            assert bench.replica.seen[-1].path == path
        for path in ("/tokenize", "/scale_elastic_ep", "/sleep", "/v1/load_lora_adapter"):
            async with bench.client.post(path, json=PROMPT) as response:
                assert response.status == 404
        async with bench.client.get(RESPONSES) as response:
            assert (response.status, response.headers["allow"]) == (405, "POST")
        assert len(bench.replica.seen) == 3


async def test_what_replicas_offer_later_is_relayed_from_then_on() -> None:
    async with gateway_over(answer) as bench:
        async with bench.client.post("/tokenize", json=PROMPT) as response:
            assert response.status == 404
        bench.replica.routes = (*ROUTES, Route("POST", "/tokenize"))
        asked = bench.cluster.asked
        await soon(lambda: bench.cluster.asked > asked)
        async with bench.client.post("/tokenize", json=PROMPT) as response:
            assert response.status == 200


async def test_what_was_offered_is_known_while_no_replica_is_there() -> None:
    async with gateway_over(answer, queue_timeout_s=0.3) as bench:
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 200
        bench.cluster.members.clear()
        asked = bench.cluster.asked
        await soon(lambda: bench.cluster.asked > asked)
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 503
        async with bench.client.post("/tokenize", json=PROMPT) as response:
            assert response.status == 404


async def test_before_any_replica_has_told_an_unknown_path_waits_for_one() -> None:
    async with gateway_over() as bench:
        tasks = [
            asyncio.create_task(bench.client.post(path, json=PROMPT))
            for path in (RESPONSES, "/unknown")
        ]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks)
        bench.cluster.members.append(await FakeReplica(answer).start())
        assert [(await asyncio.wait_for(task, 2)).status for task in tasks] == [200, 404]


async def test_a_route_without_a_body_gets_none() -> None:
    async with gateway_over(answer) as bench:
        async with bench.client.post(f"{RESPONSES}/resp_1/cancel", data=b"not json") as response:
            assert response.status == 200
        async with bench.client.get(f"{RESPONSES}/resp_1?stream=true") as response:
            assert response.status == 200
        cancel, get = bench.replica.seen
        assert (cancel.path, cancel[BODY]) == (f"{RESPONSES}/resp_1/cancel", b"")
        assert get.path_qs == f"{RESPONSES}/resp_1?stream=true"


async def test_the_metrics_know_a_route_by_its_template() -> None:
    seen: list[str] = []

    class Metrics(GatewayMetrics):
        def request_done(self, model: str, path: str, *rest: Any) -> None:
            seen.append(path)

    async with gateway_over(answer, metrics=Metrics()) as bench:
        for path in (f"{RESPONSES}/resp_1", f"{RESPONSES}/resp_2", "/nothing"):
            async with bench.client.get(path) as response:
                await response.read()
    assert seen == [BY_ID, BY_ID]


# What guards one guards all


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_each_route_that_takes_a_body_is_guarded_alike(path: str) -> None:
    async with gateway_over(answer, api_keys=("k",), max_body_bytes=1000) as bench:

        async def status(body: bytes, **headers: str) -> int:
            given = {"content-type": "application/json", "authorization": "Bearer k"} | headers
            async with bench.client.post(path, data=body, headers=given) as response:
                return response.status

        assert await status(b"{}", authorization="Bearer x") == 401
        assert await status(b"{") == 400
        assert await status(b"[]") == 400
        assert await status(b'{"structured_outputs": 1}') == 400
        assert await status(b"{}", **{"content-type": "text/plain"}) == 400
        assert await status(b" " * 1001) == 413
        assert bench.replica.seen == []


async def test_a_key_may_come_as_anthropics_clients_send_it_and_goes_no_further() -> None:
    async with gateway_over(answer, api_keys=("right",)) as bench:
        for headers, status in (
            ({"x-api-key": "right"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({"x-api-key": "right", "authorization": "Bearer wrong"}, 401),
        ):
            async with bench.client.post(MESSAGES, json=PROMPT, headers=headers) as response:
                assert response.status == status
        [request] = bench.replica.seen
        assert "x-api-key" not in request.headers


# In whose words


async def test_a_refusal_has_the_shape_of_the_api_that_was_asked() -> None:
    async with gateway_over(answer, api_keys=("k",)) as bench:
        shapes = {}
        for path in (CHAT, RESPONSES, MESSAGES):
            async with bench.client.post(path, json=PROMPT) as response:
                assert response.status == 401
                shapes[path] = await response.json()
        assert shapes[CHAT] == shapes[RESPONSES]
        assert shapes[CHAT]["error"]["code"] == "invalid_api_key"
        message = shapes[CHAT]["error"]["message"]
        assert shapes[MESSAGES] == {
            "type": "error",
            "error": {"type": "authentication_error", "message": message},
        }


RESPONSE_EVENT = (
    b'event: response.created\ndata: {"type":"response.created","sequence_number":6}\n\n'
)
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
MESSAGE_EVENT = b'event: message_start\ndata: {"type":"message_start"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


async def streamed(path: str, *events: bytes, breaks: bool = True) -> bytes:
    """What the client gets of a stream whose replica dies behind these events."""

    async def handler(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(b"".join(events))
        await asyncio.sleep(0.05)
        if breaks:
            cut(request)
        return response

    async with gateway_over(handler) as bench, bench.client.post(path, json=PROMPT) as response:
        return await response.read()


@pytest.mark.parametrize(
    ("path", "events"),
    [(RESPONSES, (RESPONSE_EVENT, COMPLETED)), (MESSAGES, (MESSAGE_EVENT, STOP))],
)
async def test_streams_of_each_api_are_passed_on_byte_for_byte(
    path: str, events: tuple[bytes, ...]
) -> None:
    assert await streamed(path, *events, breaks=False) == b"".join(events)
    assert await streamed(path, *events) == b"".join(events), "it was over"


async def test_a_stream_that_breaks_off_ends_with_an_error_that_its_client_understands() -> None:
    got = (await streamed(RESPONSES, RESPONSE_EVENT)).removeprefix(RESPONSE_EVENT)
    assert got.startswith(b"event: error\ndata: ") and got.endswith(b"\n\n")
    data = json.loads(got.removeprefix(b"event: error\ndata: "))
    assert (data["type"], data["sequence_number"]) == ("error", 7)
    assert data["error"]["code"] == "replica_lost"

    got = (await streamed(MESSAGES, MESSAGE_EVENT)).removeprefix(MESSAGE_EVENT)
    data = json.loads(got.removeprefix(b"event: error\ndata: "))
    assert (data["type"], data["error"]["type"]) == ("error", "api_error")


@pytest.mark.parametrize("api", DIALECTS)
def test_an_error_event_ends_its_own_stream_or_is_told_from_an_answer(api: str) -> None:
    dialect = DIALECTS[api]
    event = dialect.event(ApiError(502, "x"), b"")
    assert event.startswith(dialect.events.failed)
    assert not dialect.is_over(b"")


async def test_a_stream_that_begins_with_a_dying_engines_error_is_asked_for_again() -> None:
    calls = 0

    async def handler(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        response = await begin_stream(request)
        failed = b'event: error\ndata: {"type":"error","error":{"type":"internal_error"}}\n\n'
        await response.write(STOP if calls > 1 else failed)
        return response

    async with gateway_over(handler, handler) as bench:
        for member in bench.cluster.members:
            member.healthy = False
        async with bench.client.post(MESSAGES, json=PROMPT) as response:
            assert await response.read() == STOP
    assert calls == 2


# Pages of other sites

PREFLIGHT = {
    "origin": "https://chat.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type,authorization",
}


async def test_no_page_may_call_unless_its_site_is_allowed() -> None:
    async with gateway_over(answer) as bench:
        async with bench.client.options(CHAT, headers=PREFLIGHT) as response:
            assert response.status == 405
            assert "access-control-allow-origin" not in response.headers
        headers = {"origin": PREFLIGHT["origin"]}
        async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
            assert "access-control-allow-origin" not in response.headers
        assert "origin" not in bench.replica.seen[0].headers


async def test_a_page_of_an_allowed_site_may_call_what_is_relayed_but_no_administration() -> None:
    site = PREFLIGHT["origin"]
    async with gateway_over(answer, allowed_origins=(site,), api_keys=("k",)) as bench:
        async with bench.client.options(MESSAGES, headers=PREFLIGHT) as response:
            assert response.status == 200, "without a key, as browsers ask"
            assert response.headers["access-control-allow-origin"] == site
        other = PREFLIGHT | {"origin": "https://evil.example"}
        async with bench.client.options(MESSAGES, headers=other) as response:
            assert response.status == 400
        async with bench.client.post(CHAT, json=PROMPT, headers={"origin": site}) as response:
            assert response.status == 401, "and the page can read why"
            assert response.headers["access-control-allow-origin"] == site
        preflight = PREFLIGHT | {
            "access-control-request-method": "PUT",
            "authorization": "Bearer k",
        }
        async with bench.client.options("/headrace/v1/router", headers=preflight) as response:
            assert response.status == 405
            assert "access-control-allow-origin" not in response.headers


async def test_a_backend_that_asks_nobody_leaves_the_routes_known() -> None:
    class Flaky(FakeCluster):
        async def replicas(self) -> list[ReplicaInfo]:
            if self.asked:
                raise RuntimeError("no controller")
            return await super().replicas()

    replica = await FakeReplica(answer).start()
    try:
        async with (
            gateway_over(backend=Flaky([replica])) as bench,
            bench.client.post(MESSAGES, json={"model": MODEL}) as response,
        ):
            assert response.status == 200
    finally:
        await replica.stop()

"""The gateway's own documents, mounting, listening and traces."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
from aiohttp import web

from headrace.config.gateway import GatewaySettings
from headrace.gateway import PortTakenError, build_gateway_app, serve_gateway
from headrace.gateway.ingress import connection
from headrace.gateway.openapi import openapi_document
from tests.unit.batch_fakes import batch_state
from tests.unit.gateway_fakes import (
    CHAT,
    MODEL,
    PROMPT,
    FakeCluster,
    FakeReplica,
    answer,
    asked_from_elsewhere,
    gateway_over,
    soon,
    stall,
)
from tests.unit.responses_replica import state_in


async def test_health_is_open_and_tells_whether_a_replica_is_ready() -> None:
    async with (
        gateway_over(answer, api_keys=("k",)) as bench,
        bench.client.get("/health") as response,
    ):
        assert response.status == 200
        assert (await response.json())["status"] == "ok"
    async with gateway_over() as bench, bench.client.get("/health") as response:
        assert response.status == 503


async def test_a_gateway_without_replicas_takes_the_request_that_starts_one() -> None:
    """Kubernetes would otherwise send it none, if both roles were scaled to zero."""
    async with gateway_over() as bench:
        bench.cluster.starts_on_demand = True
        async with bench.client.get("/health") as response:
            assert response.status == 200
            assert (await response.json())["status"] == "unavailable"


async def test_plans_metrics_and_version_are_served_in_their_types() -> None:
    async with gateway_over(answer) as bench:
        async with bench.client.get("/headrace/v1/plans/known") as response:
            assert (await response.json())["kind"] == "local"
        async with bench.client.get("/headrace/v1/plans/other") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "plan_not_found"
        async with bench.client.get("/metrics") as response:
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert b"headrace_requests 1" in await response.read()
        async with bench.client.get("/version") as response:
            assert set(await response.json()) == {"version"}
        async with bench.client.get("/") as response:
            assert CHAT in (await response.json())["endpoints"]


async def test_plans_can_be_forced_and_set_free_and_nothing_else_is_taken() -> None:
    async with gateway_over(answer) as bench:
        for policy in ("local", "remote", "cost"):
            async with bench.client.put("/headrace/v1/router", json={"policy": policy}) as response:
                assert response.status == 200
                assert await response.json() == {"policy": policy, "replicas": 1}
            assert bench.cluster.policy == policy
        for wrong, field in (
            ({}, "policy"),
            ({"policy": "fast"}, "policy"),
            ({"policy": 1}, "policy"),
            ({"policy": "cost", "more": 1}, "more"),
        ):
            async with bench.client.put("/headrace/v1/router", json=wrong) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == field
        async with bench.client.get("/headrace/v1/router") as response:
            assert (response.status, response.headers["allow"]) == (405, "PUT")


async def test_plans_can_be_forced_only_from_the_gateways_own_machine() -> None:
    asked = "PUT", "/headrace/v1/router", b'{"policy": "local"}'
    assert (await asked_from_elsewhere(FakeCluster(), *asked))["status"] == 403


async def test_drafting_is_changed() -> None:
    async with gateway_over(answer) as bench:
        for command in (
            {"mode": "off"},
            {"mode": "static:16"},
            {"draft_cap": 4},
            {"draft_cap": None, "mode": "auto"},
        ):
            async with bench.client.put("/headrace/v1/speculation", json=command) as response:
                assert response.status == 200
                [now] = (await response.json())["replicas"]
            assert bench.cluster.told[-1] == command
            assert now["replica_id"] == "decode-1", "it tells how each replica stands afterwards"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({}, "mode"),
        ({"mode": "off", "for_s": 60}, "for_s"),
        ({"mode": "on"}, "mode"),
        ({"mode": "static:0"}, "mode"),
        ({"mode": None}, "mode"),
        ({"draft_cap": -1}, "draft_cap"),
        ({"draft_cap": True}, "draft_cap"),
        ({"draft_cap": 4, "until": 60}, "until"),
    ],
)
async def test_a_wrong_change_of_drafting_is_told_by_its_field(
    wrong: dict[str, Any], param: str
) -> None:
    async with (
        gateway_over(answer) as bench,
        bench.client.put("/headrace/v1/speculation", json=wrong) as response,
    ):
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (400, "invalid_value", param)
        assert error["type"] == "invalid_request_error"
        assert bench.cluster.told == [], "no replica was told"


async def test_prompts_are_warmed_and_nothing_else_is_taken() -> None:
    chat = [{"role": "system", "content": "You are kind."}]
    async with gateway_over(answer) as bench:
        body = {"prompts": ["a", [1, 2]], "chats": [chat], "cache_salt": "t", "pin": True}
        async with bench.client.post("/headrace/v1/warm", json=body) as response:
            assert response.status == 200
            assert await response.json() == {"prompts": [[{"stored_tokens": 128}]] * 3}
        bodies = [{"prompt": "a"}, {"prompt": [1, 2]}, {"messages": chat}]
        assert bench.cluster.warmed == [(body, "t", True) for body in bodies]
        for wrong, field in (
            ({}, "prompts"),
            ({"prompts": [""]}, "prompts"),
            ({"prompts": [[1, True]]}, "prompts"),
            ({"prompts": ["a"] * 257}, "prompts"),
            ({"chats": [[]]}, "chats"),
            ({"chats": [["hello"]]}, "chats"),
            ({"prompts": ["a"], "pin": 1}, "pin"),
            ({"prompts": ["a"], "cache_salt": 1}, "cache_salt"),
            ({"prompt": "a"}, "prompt"),
            ({"prompts": ["a"], "tenant": "shop"}, "tenant"),  # there are no keys
        ):
            async with bench.client.post("/headrace/v1/warm", json=wrong) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == field
        async with bench.client.get("/headrace/v1/warm") as response:
            assert (response.status, response.headers["allow"]) == (405, "POST")


async def test_the_status_has_what_can_be_told_and_names_what_cannot() -> None:
    class Broken(FakeCluster):
        async def status(self) -> dict[str, Any]:
            raise RuntimeError("broken")

    async with (
        gateway_over(backend=Broken()) as bench,
        bench.client.get("/headrace/v1/status") as response,
    ):
        status = await response.json()
    assert response.status == 200
    assert status["incomplete"] == ["replicas: RuntimeError: broken"]
    assert status["gateway"]["relaying"] == 0 and "replicas" not in status
    assert status["health"]["problems"] == [
        "no decode replica answers",
        "the status lacks replicas: RuntimeError: broken",
    ]


async def test_a_status_whose_health_cannot_be_judged_is_a_status_all_the_same() -> None:
    cluster = FakeCluster(told_status={"replicas": [{"role": "decode", "router": 7}]})
    async with (
        gateway_over(backend=cluster) as bench,
        bench.client.get("/headrace/v1/status") as response,
    ):
        status = await response.json()
    assert response.status == 200 and "health" not in status
    assert any(part.startswith("health: ") for part in status["incomplete"])


async def test_a_backend_that_fails_is_a_500_in_the_same_shape() -> None:
    class Broken(FakeCluster):
        async def plan(self, request_id: str) -> dict[str, Any] | None:
            raise RuntimeError("broken")

    async with (
        gateway_over(backend=Broken()) as bench,
        bench.client.get("/headrace/v1/plans/x") as response,
    ):
        assert response.status == 500
        assert (await response.json())["error"]["code"] == "internal_error"


async def test_models_are_the_replicas_and_one_can_be_had_by_its_name() -> None:
    listing = {"object": "list", "data": [{"id": "org/model", "object": "model"}]}

    async def models(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        assert (request.method, request.path) == ("GET", "/v1/models")
        return web.json_response(listing)

    async with gateway_over(models) as bench:
        async with bench.client.get("/v1/models") as response:
            assert await response.json() == listing
        for path in ("/v1/models/org/model", "/v1/models/org%2Fmodel"):
            async with bench.client.get(path) as response:
                assert await response.json() == listing["data"][0]
        async with bench.client.get("/v1/models/other") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_an_error_of_the_replica_is_not_told_as_a_missing_model(status: int) -> None:
    wrong = {"error": {"message": "broken", "type": "x", "param": None, "code": status}}

    async def models(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.json_response(wrong, status=status)

    async with gateway_over(models) as bench, bench.client.get("/v1/models/org") as response:
        assert (response.status, await response.json()) == (status, wrong)


async def test_a_change_that_takes_longer_than_a_body_may_is_made_and_answered() -> None:
    """The time for the body is over once the body is there."""

    class Slow(FakeCluster):
        async def set_policy(self, policy: str) -> int:
            await asyncio.sleep(0.3)
            return await super().set_policy(policy)

    async with (
        gateway_over(answer, backend=Slow(), body_timeout_s=0.1) as bench,
        bench.client.put("/headrace/v1/router", json={"policy": "local"}) as response,
    ):
        assert response.status == 200


async def test_a_change_ends_when_the_time_for_the_whole_request_is_over() -> None:
    class Hanging(FakeCluster):
        async def set_policy(self, policy: str) -> int:
            await asyncio.sleep(60)
            return 0

    async with (
        gateway_over(answer, backend=Hanging(), request_timeout_s=0.2) as bench,
        bench.client.put("/headrace/v1/router", json={"policy": "local"}) as response,
    ):
        assert response.status == 504


THEIRS: dict[str, Any] = {
    "paths": {
        CHAT: {
            "post": {
                "summary": "Chat",
                "requestBody": {
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/A"}}}
                },
                "responses": {"400": {"description": "theirs"}},
            }
        },
        "/scale_elastic_ep": {"post": {"responses": {}}},
    },
    "components": {
        "schemas": {
            "A": {"properties": {"b": {"anyOf": [{"$ref": "#/components/schemas/B"}]}}},
            "B": {"type": "string"},
            "Unused": {"type": "string"},
        }
    },
}


async def test_every_documented_operation_is_routed(tmp_path: Path) -> None:
    kept = {"state": state_in(tmp_path), "batch_state": batch_state(tmp_path)}
    async with gateway_over(answer, **kept) as bench:
        async with bench.client.get("/openapi.json") as response:
            document = await response.json()
        assert len(document["paths"]) > 5
        for path, operations in document["paths"].items():
            there = re.sub(r"\{\w+\}", "x", path)
            async with bench.client.request("TRACE", there) as response:
                assert response.status == 405, f"{path}: {response.status}"
                allowed = response.headers["allow"].lower().split(", ")
            assert set(operations) - {"parameters"} <= set(allowed), path


async def test_the_schema_is_the_replicas_for_what_is_relayed_and_ours_for_the_rest() -> None:
    async with gateway_over(answer, api_keys=("k",)) as bench:
        bench.cluster.document = THEIRS
        headers = {"authorization": "Bearer k"}
        await soon(lambda: bench.cluster.asked > 0)
        async with bench.client.get("/openapi.json", headers=headers) as response:
            document = await response.json()
        async with bench.client.get("/", headers=headers) as response:
            assert set((await response.json())["endpoints"]) == set(document["paths"])
    chat = document["paths"][CHAT]["post"]
    assert chat["summary"] == "Chat"
    assert set(chat["responses"]) >= {"200", "400", "401", "404", "408", "413", "429", "503", "504"}
    assert chat["responses"]["400"] == {"description": "theirs"}
    assert "/scale_elastic_ep" not in document["paths"]
    schemas = document["components"]["schemas"]
    assert {"A", "B", "Error"} <= set(schemas) and "Unused" not in schemas
    assert document["security"] and document["paths"]["/health"]["get"]["security"] == []


async def test_the_schema_without_a_replica_is_not_remembered() -> None:
    async with gateway_over(answer) as bench:
        for theirs, summary in (({}, None), (THEIRS, "Chat")):
            bench.cluster.document = theirs
            await soon(lambda: bench.cluster.asked > 0)
            async with bench.client.get("/openapi.json") as response:
                document = await response.json()
            assert document["paths"][CHAT]["post"].get("summary") == summary


def test_the_schema_takes_good_changes_and_refuses_bad_ones() -> None:
    document = openapi_document("1", GatewaySettings(), keys_on=False)
    assert "security" not in document
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = {ref for ref in _references(document) if ref not in schemas}
    assert not names
    change = jsonschema.Draft202012Validator(schemas["SpeculationUpdate"])
    assert change.is_valid({"mode": "static:4"})
    for bad in ({"mode": "on"}, {"draft_cap": -1}, {"until": 1}, {"mode": "off", "for_s": 60}):
        assert not change.is_valid(bad)


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"].rpartition("/")[2]] if "$ref" in node else []
        return own + [ref for value in node.values() for ref in _references(value)]
    return [ref for value in node for ref in _references(value)] if isinstance(node, list) else []


async def test_it_works_below_a_root_path() -> None:
    async with gateway_over(answer) as bench:
        app = build_gateway_app(GatewaySettings(), bench.cluster, MODEL)
        sent: list[Any] = []

        async def mounted(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "root_path": "/llm"}, receive, send)

        server = await serve_gateway(mounted, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.port}/llm"
        async with bench.client.post(url + CHAT, json=PROMPT) as response:
            assert response.status == 200, sent
        assert bench.replica.seen[-1].path == CHAT
        async with bench.client.get(url + "/health") as response:
            assert response.status == 200
        await server.stop(grace_s=1)


async def test_it_starts_without_lifespan_events() -> None:
    cluster = FakeCluster([await FakeReplica(answer).start()])
    app = build_gateway_app(GatewaySettings(), cluster, MODEL)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(PROMPT).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    forever = asyncio.Event()
    first = True

    async def receive_once() -> Any:
        nonlocal first
        if first:
            first = False
            return await receive()
        await forever.wait()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
    await app(scope, receive_once, send)
    assert sent[0]["status"] == 200
    await app.aclose()
    await cluster.members[0].stop()


async def test_a_taken_port_is_one_clear_line() -> None:
    async with gateway_over(answer) as bench:
        with pytest.raises(
            PortTakenError, match=r"^port \d+ on 127.0.0.1 is taken; set gateway.port"
        ):
            await serve_gateway(answer, "127.0.0.1", bench.gateway.port)


async def test_gateways_may_share_a_port() -> None:
    cluster = FakeCluster()
    app = build_gateway_app(GatewaySettings(), cluster, MODEL)
    first = await serve_gateway(app, "127.0.0.1", 0, reuse_port=True)
    second = await serve_gateway(app, "127.0.0.1", first.port, reuse_port=True)
    assert first.port == second.port
    await first.stop(grace_s=1)
    await second.stop(grace_s=1)


async def test_a_slow_or_endless_request_head_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    async with gateway_over(answer) as bench:
        for begin, status in ((b"", b""), (b"GET / HTTP/1.1\r\nx", b" 408 ")):
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.port)
            writer.write(begin)
            async with asyncio.timeout(2):
                assert status in await reader.read()
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.port)
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * (connection.MAX_HEAD_BYTES + 9))
        async with asyncio.timeout(2):
            assert b" 431 " in await reader.readline()
        writer.close()


async def test_stopping_ends_at_once_when_nothing_runs() -> None:
    async with gateway_over(answer) as bench:
        async with asyncio.timeout(10):
            await bench.gateway.stop(grace_s=60)
        with pytest.raises(aiohttp.ClientError):
            await bench.client.get("/health")


async def test_stopping_cuts_off_what_still_runs_behind_its_grace() -> None:
    async with gateway_over(stall) as bench:
        asked = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await soon(lambda: bool(bench.replica.seen))
        await bench.gateway.stop(grace_s=0.1)
        assert (await asked).status == 503
        await soon(lambda: bench.replica.aborted == 1)


async def test_with_a_tracer_a_span_wraps_the_request_and_goes_on_to_the_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry import trace

    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    async with gateway_over(answer) as bench:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {"traceparent": parent}
        async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
            await response.read()
        seen = bench.replica.seen[0].headers.getall("traceparent")
    [span] = exporter.get_finished_spans()
    assert span.kind == trace.SpanKind.SERVER
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert seen == [f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"]
    assert span.attributes["http.response.status_code"] == 200


async def test_a_mode_that_no_replica_has_is_kept_and_said_to_be() -> None:
    class Plain(FakeCluster):
        async def set_speculation(self, command: dict[str, Any]) -> list[dict[str, Any]]:
            return []

    command = {"mode": "off"}
    async with (
        gateway_over(answer, backend=Plain()) as bench,
        bench.client.put("/headrace/v1/speculation", json=command) as response,
    ):
        told = await response.json()
        assert told["replicas"] == []
        assert told["note"].startswith("No replica uses speculative decoding.")

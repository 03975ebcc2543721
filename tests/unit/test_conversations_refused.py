"""Requests about conversation state that are refused, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.unit import responses_replica
from tests.unit.gateway_fakes import MODEL, RESPONSES, Bench, abort_connection, gateway_over
from tests.unit.responses_replica import client_of, respond, sent, state_in

bench = responses_replica.bench


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"previous_response_id": "x" * 201}, "previous_response_id"),
        ({"conversation": 1}, "conversation"),
        ({"conversation": {}}, "conversation"),
        ({"store": "yes"}, "store"),
        ({"background": 1}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"previous_response_id": "a", "conversation": "b"}, "previous_response_id"),
    ],
)
async def test_wrong_fields_are_refused_by_name(
    bench: Bench, fields: dict[str, Any], param: str
) -> None:
    reply = await bench.client.post(RESPONSES, json={"input": "x", **fields})
    assert reply.status == 400
    assert (await reply.json())["error"]["param"] == param
    assert not bench.replica.seen


UNKNOWN = ["resp_x", "resp_" + "0" * 40, "conv_" + "0" * 40, "", "resp_" + "0" * 41, "🦊"]


@pytest.mark.parametrize("previous", UNKNOWN)
async def test_what_is_not_kept_is_not_found(bench: Bench, previous: str) -> None:
    for field in ("previous_response_id", "conversation"):
        if field == "conversation" and previous.startswith("conv"):
            continue
        reply = await bench.client.post(RESPONSES, json={"input": "x", field: previous})
        assert reply.status == 404, field
        assert "not found" in (await reply.json())["error"]["message"]


async def test_another_tenants_response_is_not_found(tmp_path: Path) -> None:
    keys = ["key-of-the-first", "key-of-the-second"]
    async with gateway_over(respond, state=state_in(tmp_path), api_keys=keys) as bench:
        one, two = client_of(bench, keys[0]), client_of(bench, keys[1])
        made = await one.responses.create(model=MODEL, input="One")
        conversation = await one.conversations.create()
        for call in (
            two.responses.retrieve(made.id),
            two.responses.delete(made.id),
            two.responses.cancel(made.id),
            two.responses.input_items.list(made.id),
            two.responses.create(model=MODEL, input="x", previous_response_id=made.id),
            two.conversations.retrieve(conversation.id),
            two.conversations.delete(conversation.id),
            two.conversations.items.list(conversation.id),
            two.responses.create(model=MODEL, input="x", conversation=conversation.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await one.responses.retrieve(made.id)).id == made.id
        await one.close()
        await two.close()


async def test_a_conversation_longer_than_a_body_is_refused_by_its_size(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    async with gateway_over(respond, state=state, max_body_bytes=3_000) as bench:
        previous = None
        for _ in range(5):
            reply = await bench.client.post(
                RESPONSES, json={"input": "x" * 500, "previous_response_id": previous}
            )
            if reply.status != 200:
                break
            previous = (await reply.json())["id"]
        error = (await reply.json())["error"]
        assert (reply.status, error["code"]) == (400, "conversation_too_long")
        assert "3000 is the limit" in error["message"] and len(bench.replica.seen) == 3


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", f"{RESPONSES}/resp_1", "GET, HEAD, DELETE"),
        ("POST", f"{RESPONSES}/resp_1/input_items", "GET, HEAD"),
        ("GET", f"{RESPONSES}/resp_1/cancel", "POST"),
        ("GET", "/v1/conversations", "POST"),
        ("PUT", "/v1/conversations/conv_1", "GET, HEAD, POST, DELETE"),
        ("DELETE", "/v1/conversations/conv_1/items", "GET, HEAD, POST"),
        ("POST", "/v1/conversations/conv_1/items/a", "GET, HEAD, DELETE"),
    ],
)
async def test_each_route_names_its_methods(
    bench: Bench, method: str, path: str, allow: str
) -> None:
    reply = await bench.client.request(method, path)
    assert (reply.status, reply.headers["allow"]) == (405, allow)


@pytest.mark.parametrize(
    "path",
    [
        f"{RESPONSES}/resp_1/x",
        f"{RESPONSES}/resp_1/cancel/x",
        "/v1/conversations//items",
        "/v1/conversations/conv_1/x",
        "/v1/conversations/conv_1/items/a/b",
        "/v1/conversations/conv_1/items",
        "/v1/conversations/conv_1",
        "/v1/conversations/conv_1/items/a",
    ],
)
async def test_other_paths_are_not_found(bench: Bench, path: str) -> None:
    assert (await bench.client.get(path)).status == 404


async def test_without_state_the_routes_are_the_replicas(tmp_path: Path) -> None:
    async with gateway_over(respond) as bench:
        reply = await bench.client.post(RESPONSES, json={"input": "x", "background": True})
        assert sent(bench)["background"] is True and "request_id" not in sent(bench)
        assert "store" not in await reply.json()


async def test_a_request_that_kills_replicas_is_known_again_by_its_own_bytes(
    tmp_path: Path,
) -> None:
    """The id that each request gets changes nothing about that."""
    async with gateway_over(abort_connection, state=state_in(tmp_path)) as bench:
        first = await bench.client.post(RESPONSES, json={"input": "x"})
        again = await bench.client.post(RESPONSES, json={"input": "x"})
        other = await bench.client.post(RESPONSES, json={"input": "y"})
        assert [first.status, again.status, other.status] == [502, 422, 502]

"""A decode replica's own port: only who has its token gets in, over HTTP only."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_decode.http.internal_port import (
    INTERNAL_HEADER,
    PLAN,
    PLAN_HEADER,
    TENANT,
    InternalPort,
)


async def passed(scope: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """What of a scope reaches the application behind, and what is sent back."""
    reached: list[str] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        plan = PLAN.get()
        reached.append(f"{scope['type']} {TENANT.get()}" + (f" {plan!r}" if plan else ""))

    async def receive() -> dict[str, Any]:
        return {"type": f"{scope['type']}.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await InternalPort(app, "token")(scope, receive, send)
    return reached, sent


@pytest.mark.parametrize(
    "headers", [[], [(INTERNAL_HEADER, b"other")], [(b"authorization", b"token")]]
)
async def test_without_the_token_nothing_gets_in(headers: list[tuple[bytes, bytes]]) -> None:
    reached, sent = await passed({"type": "http", "path": "/", "headers": headers})
    assert reached == [] and sent[0]["status"] == 403


async def test_with_the_token_a_request_gets_in() -> None:
    headers = [(INTERNAL_HEADER, b"token")]
    assert await passed({"type": "http", "path": "/", "headers": headers}) == (["http None"], [])


async def test_the_gateways_plan_is_there_for_this_request_only() -> None:
    headers = [(INTERNAL_HEADER, b"token"), (PLAN_HEADER, b"{}")]
    assert await passed({"type": "http", "path": "/", "headers": headers}) == (
        ["http None b'{}'"],
        [],
    )
    assert PLAN.get() is None


@pytest.mark.parametrize("kind", ["websocket", "webtransport", "anything"])
async def test_nothing_but_http_gets_in_even_with_the_token(kind: str) -> None:
    headers = [(INTERNAL_HEADER, b"token")]
    reached, sent = await passed({"type": kind, "path": "/", "headers": headers})
    assert reached == [] and sent == [{"type": "websocket.close", "code": 1008}]


async def test_the_application_starts_and_stops_with_the_server() -> None:
    assert (await passed({"type": "lifespan"}))[0] == ["lifespan None"]

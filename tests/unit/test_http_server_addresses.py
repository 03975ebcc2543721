"""A gateway at `::` is reached at all addresses of its machine, and knows its clients' own."""

from __future__ import annotations

import json
import socket
from typing import Any

import aiohttp
import pytest

from headrace.gateway.ingress import http_server
from headrace.gateway.ingress.http_server import serve_gateway
from headrace_kvstore.protocol.address import host_port


async def tell_client(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = json.dumps(scope["client"][0]).encode()
        await send({"type": "http.response.body", "body": body})


async def seen(host: str, port: int, headers: dict[str, str] | None = None) -> str:
    """The client's address, as the gateway tells it."""
    url = f"http://{host_port(host, port)}"
    async with aiohttp.ClientSession(url) as client, client.get("/", headers=headers) as response:
        return str(await response.json(content_type=None))


@pytest.mark.skipif(not http_server._has_ipv6(), reason="this machine has no IPv6")
async def test_both_families_reach_it_and_have_their_own_addresses() -> None:
    server = await serve_gateway(tell_client, "::", 0)
    try:
        for host in ("127.0.0.1", "::1"):
            assert await seen(host, server.port) == host
    finally:
        await server.stop(grace_s=1)


@pytest.mark.skipif(not http_server._has_ipv6(), reason="this machine has no IPv6")
async def test_a_proxy_is_trusted_by_its_ipv4_address() -> None:
    server = await serve_gateway(tell_client, "::", 0, trusted_proxies=["127.0.0.0/8"])
    try:
        forwarded = {"x-forwarded-for": "192.0.2.7"}
        assert await seen("127.0.0.1", server.port, forwarded) == "192.0.2.7"
        assert await seen("::1", server.port, forwarded) == "::1"
    finally:
        await server.stop(grace_s=1)


async def test_without_ipv6_it_is_reached_at_ipv4_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_has_ipv6", lambda: False)
    server = await serve_gateway(tell_client, "::", 0)
    try:
        assert server.host == "0.0.0.0"
        assert await seen("127.0.0.1", server.port) == "127.0.0.1"
        with pytest.raises(http_server.PortTakenError, match="is taken"):
            http_server.bind("::", server.port)
    finally:
        await server.stop(grace_s=1)


def test_ports_of_one_machine_are_shared_between_gateways_at_all_addresses() -> None:
    first = http_server.bind("::", 0, reuse_port=True)
    with first, http_server.bind("::", first.getsockname()[1], reuse_port=True) as second:
        assert first.getsockname()[1] == second.getsockname()[1]
        assert isinstance(second, socket.socket)

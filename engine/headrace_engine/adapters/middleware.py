"""Lets requests name adapters in `model`, and lists the adapters in `/v1/models`.

ASGI, around vLLM's application. A request that names an adapter finds it registered with vLLM. A
name that is neither the model's nor an adapter's passes unchanged: vLLM refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from headrace_engine.adapters.registry import AdapterRegistry
from headrace_engine.adapters.sources import AdapterError, AdapterUnreachableError
from headrace_engine.asgi_body import read_body, send_whole, with_body

Message = MutableMapping[str, Any]
ASGIApp = Callable[[Message, Any, Any], Awaitable[None]]
MODELS = "/v1/models"


class _Named(msgspec.Struct):
    model: Any = None


_decode_named = msgspec.json.Decoder(_Named).decode


class AdapterMiddleware:
    """ASGI application that finds the adapters which requests name.

    Args:
        app: vLLM's application.
        registry: the replica's adapters.
    """

    def __init__(self, app: ASGIApp, registry: AdapterRegistry) -> None:
        self._app, self._registry = app, registry

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "POST":
            await self._post(scope, receive, send)
        elif scope["method"] == "GET" and scope["path"] == MODELS:
            names = await self._registry.names()
            await self._app(scope, receive, _ModelList(send, names).send)
        else:
            await self._app(scope, receive, send)

    async def _post(self, scope: Message, receive: Any, send: Any) -> None:
        body = await read_body(receive)
        if body is None:
            return
        try:
            name = _decode_named(body).model
        except msgspec.DecodeError:
            name = None  # vLLM refuses it, or it is no JSON
        if isinstance(name, str) and name != self._registry.settings.model_id:
            try:
                await self._registry.find(name)
            except AdapterError as error:
                await _refuse(send, *refusal(name, error))
                return
        await self._app(*with_body(scope, body, receive), send)


def refusal(name: str, error: AdapterError) -> tuple[int, dict[str, Any]]:
    """Return the status and the error, in OpenAI's shape, for an adapter that cannot be used."""
    unreachable = isinstance(error, AdapterUnreachableError)
    return 503 if unreachable else 400, {
        "message": f"The LoRA adapter {name[:200]!r} cannot be used: {error}",
        "type": "server_error" if unreachable else "invalid_request_error",
        "param": "model",
        "code": "adapter_unreachable" if unreachable else "adapter_invalid",
    }


def with_adapters(listing: bytes, names: list[str]) -> bytes:
    """Return vLLM's list of models with a card for each adapter."""
    document = json.loads(listing)
    models = [card for card in document["data"] if card.get("parent") is None]
    kept = {key: models[0].get(key) for key in ("object", "created", "owned_by", "permission")}
    # vLLM's own cards of adapters have paths on this machine, which are not for clients.
    cards = [{"id": name, **kept, "root": name, "parent": models[0]["id"]} for name in names]
    return json.dumps({**document, "data": models + cards}).encode()


class _ModelList:
    """The answer of `/v1/models`, collected and completed."""

    def __init__(self, send: Any, names: list[str]) -> None:
        self._send, self._names = send, names
        self._start: Message | None = None
        self._body: list[bytes] = []

    async def send(self, message: Message) -> None:
        """Send an ASGI message; the body only when it is whole."""
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = with_adapters(b"".join(self._body), self._names)
                await send_whole(self._send, self._start, body)


async def _refuse(send: Any, status: int, error: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    start = {"type": "http.response.start", "status": status, "headers": headers}
    await send_whole(send, start, json.dumps({"error": error}).encode())

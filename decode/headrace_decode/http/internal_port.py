"""The replica's own port, which only gateways may use; they name a request's tenant, its plan and
the longest time for which it may have KV retained.

The port is open to the cluster's network. The gateway checks API keys and limits, so no other
client may use the port. A gateway proves itself with the replica's token.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from headrace_decode.planning.fanout_limiter import FANOUT, Fanout

INTERNAL_HEADER = b"x-headrace-internal"
TENANT_HEADER = b"x-headrace-tenant"
PLAN_HEADER = b"x-headrace-plan"
MAX_RETENTION_HEADER = b"x-headrace-max-retention"
REQUEST_ID_HEADER = b"x-request-id"
KEYS_TARGET = "/headrace/internal/keys"
"""Path at which `headrace_decode.rendering.keys` answers."""
GATEWAY_ONLY = {
    "message": "This port is for the gateway only.",
    "type": "forbidden",
    "param": None,
    "code": 403,
}

TENANT: ContextVar[str | None] = ContextVar("headrace_tenant", default=None)
"""Tenant of the request that this task answers; None if no API keys are configured."""
REQUEST_ID: ContextVar[str | None] = ContextVar("headrace_request_id", default=None)
"""The client's id of the request that this task answers; None for the replica's own requests."""
PLAN: ContextVar[bytes | None] = ContextVar("headrace_plan", default=None)
"""The gateway's plan for the request that this task answers, as received and not checked."""
MAX_RETENTION: ContextVar[float] = ContextVar("headrace_max_retention", default=0.0)
"""Maximum seconds for which the request that this task answers may have its KV retained."""

ASGIApp = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class InternalPort:
    """ASGI application that passes on HTTP requests with the replica's token and no others."""

    def __init__(self, app: ASGIApp, token: str):
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        token, tenant, plan, request_id, retention_s = b"", None, None, None, 0.0
        for name, value in scope["headers"]:
            if name == INTERNAL_HEADER:
                token = value
            elif name == TENANT_HEADER:
                tenant = value.decode("latin-1")
            elif name == PLAN_HEADER:
                plan = value
            elif name == MAX_RETENTION_HEADER and value.isdigit():
                retention_s = float(value)
            elif name == REQUEST_ID_HEADER:
                request_id = value.decode("latin-1")
        if not hmac.compare_digest(token, self._token):
            headers = [(b"content-type", b"application/json")]
            body = json.dumps({"error": GATEWAY_ONLY}).encode()
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        tenant_before, plan_before = TENANT.set(tenant), PLAN.set(plan)
        prompts_before, id_before = FANOUT.set(Fanout()), REQUEST_ID.set(request_id)
        retention_before = MAX_RETENTION.set(retention_s)
        try:
            await self._app(scope, receive, send)
        finally:
            TENANT.reset(tenant_before)
            PLAN.reset(plan_before)
            FANOUT.reset(prompts_before)
            REQUEST_ID.reset(id_before)
            MAX_RETENTION.reset(retention_before)

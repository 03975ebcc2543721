"""Cross-origin resource sharing (CORS): the sites whose pages may call the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.middleware.cors import CORSMiddleware

from headrace.config.gateway import GatewaySettings
from headrace.gateway.asgi import Receive, Scope, Send


def cors(
    settings: GatewaySettings, app: Callable[[Scope, Receive, Send], Awaitable[None]]
) -> CORSMiddleware | None:
    """Return the middleware that vLLM's own server uses; None while no site is allowed."""
    if not settings.allowed_origins:
        return None
    return CORSMiddleware(
        app, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
    )

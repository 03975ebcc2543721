"""Decides which routes of vLLM's application are open to clients.

vLLM's server also has routes for its operator: loading adapters, sleeping, pausing, profiling,
remote procedure calls, resizing, clearing caches, and generating from raw engine parameters. A
route is public only if its handler is defined in one of vLLM's `api_router` modules for text
generation, which `API_MODULES` names. Any other route is not public: one that a later vLLM adds
elsewhere, one of an endpoint plugin, a websocket. The replica serves only the public routes and the
few of `KEPT_MODULES`, and reports the public ones to the gateway.

Pure, except for FastAPI's route classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Mount

API_MODULES: tuple[tuple[str, str], ...] = (
    (r"vllm\.entrypoints\.openai\.responses\.api_router", "responses"),
    (r"vllm\.entrypoints\.openai\.\w+\.api_router", "openai"),
    (r"vllm\.entrypoints\.anthropic\.api_router", "anthropic"),
    (r"vllm\.entrypoints\.cohere\.api_router", "openai"),
    (r"vllm\.entrypoints\.generate\.\w+\.api_router", "openai"),
    (r"vllm\.entrypoints\.serve\.tokenize\.api_router", "openai"),
    (r"vllm\.entrypoints\.scale_out\.(de)?render\.api_router", "openai"),
)
"""(pattern of a handler's module, the API whose error shape and stream format the handler has)."""

KEPT_MODULES = (
    "fastapi",
    "prometheus_fastapi_instrumentator",
    "ray",
    "vllm.entrypoints.serve.instrumentator",
)
"""Routes that a replica serves but the gateway does not relay: health, metrics, documents."""

ADDRESS_PATHS = frozenset({"/kv_event_sources"})
"""Paths within `KEPT_MODULES` that name an engine's internal addresses, and are removed."""

_METRICS = "/metrics"
_PLAIN_SEGMENT = re.compile(r"[^{}]*|\{\w+\}")


@dataclass(frozen=True, slots=True)
class Route:
    """One public operation.

    Attributes:
        method: the HTTP method.
        path: FastAPI's template, such as `/v1/responses/{response_id}`.
        api: one of the API names in `API_MODULES`.
        takes_json: whether the request has a JSON object as its body.
    """

    method: str
    path: str
    api: str = "openai"
    takes_json: bool = True


def api_of(module: str) -> str | None:
    """Return the API that a handler's module belongs to; None if it is not for clients."""
    return next((api for pattern, api in API_MODULES if re.fullmatch(pattern, module)), None)


def public_routes(app: FastAPI) -> list[Route]:
    """Return the operations of the application that clients may use."""
    return sorted(_public(app.routes), key=lambda route: (route.path, route.method))


def keep_public_routes(app: FastAPI) -> None:
    """Remove every route that is neither public nor of `KEPT_MODULES`, and `ADDRESS_PATHS`."""
    public = {route.path for route in _public(app.routes)}
    app.router.routes[:] = [route for route in app.router.routes if _is_kept(route, public)]


def _public(routes: Iterable[Any]) -> Iterable[Route]:
    for route in routes:
        api = api_of(_module(route)) if isinstance(route, APIRoute) else None
        if api is None or not all(map(_PLAIN_SEGMENT.fullmatch, route.path.split("/"))):
            continue
        for method in route.methods:
            # vLLM declares `validate_json_request` for handlers that read the body themselves.
            takes_json = route.body_field is not None or bool(route.dependencies)
            yield Route(method, route.path, api, takes_json)


def _is_kept(route: Any, public: set[str]) -> bool:
    if isinstance(route, Mount):
        return route.path == _METRICS
    module = _module(route)
    if isinstance(route, APIRoute) and api_of(module) is not None:
        return route.path in public
    if getattr(route, "path", None) in ADDRESS_PATHS:
        return False
    return any(module == kept or module.startswith(kept + ".") for kept in KEPT_MODULES)


def _module(route: Any) -> str:
    return str(getattr(getattr(route, "endpoint", None), "__module__", ""))

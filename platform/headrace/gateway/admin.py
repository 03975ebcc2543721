"""The gateway's own documents: health, version, metrics, status, plans, the OpenAPI schema."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import msgspec

from headrace.config.gateway import GatewaySettings
from headrace.disaggregation import advice_of
from headrace.gateway import errors
from headrace.gateway.admin_schemas import RouterPolicy, SpeculationUpdate, StoreAction, WarmRequest
from headrace.gateway.backend import Backend, ModelBackend
from headrace.gateway.ingress.limits import validated
from headrace.gateway.models.model_names import ModelNames
from headrace.gateway.models.model_table import ModelTable
from headrace.gateway.models.served_model import ModelSource
from headrace.gateway.openapi import (
    CONSOLE_STATE,
    HISTORY,
    METRICS,
    PLANS,
    REQUESTS,
    openapi_document,
    own_operations,
)
from headrace.gateway.route_table import RouteTable
from headrace.observability.health import assess
from headrace.recent import Recent
from headrace_kvstore.identity.salts import tenant_salt

logger = logging.getLogger("headrace.gateway")

BACKEND_TIMEOUT_S = 10.0
RECENT_S = 1.0
"""Maximum age of documents for which all replicas or nodes are asked."""

NONE_DRAFTS = (
    "No replica uses speculative decoding. The setting is kept for replicas that start later."
)

_JSON = b"application/json"
_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"

Answer = tuple[int, bytes, bytes]
Document = Callable[[ModelTable], Awaitable[Answer]]


def headrace_version() -> str:
    """Return the installed version, or `0+unknown` in a bare source tree."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0+unknown"


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


class GatewayState(Protocol):
    """The state of one gateway, in JSON types."""

    def state(self) -> Mapping[str, Any]:
        """Return its part of the status."""

    def requests(self) -> Mapping[str, Any]:
        """Return the requests in flight and the last finished ones."""

    def last_minute(self) -> Mapping[str, Any]:
        """Return the key figures of the last minute."""

    def history(self) -> Mapping[str, Any]:
        """Return the key figures since its start."""


class Admin:
    """The gateway's own documents.

    Args:
        backend: the cluster.
        models: the models.
        names: the names that requests may use for them.
        settings: the limits that the schema states.
        keys_on: whether the schema asks for an API key.
        gateway: this gateway's own state.
    """

    def __init__(
        self,
        backend: Backend,
        models: Sequence[ModelSource],
        names: ModelNames,
        settings: GatewaySettings,
        *,
        keys_on: bool,
        gateway: GatewayState,
    ) -> None:
        self._has_adapters = any(model.adapters is not None for model in models)
        self._backend = backend
        self._models = tuple(models)
        self._model_id = names.default or models[0].model_id
        self._version = headrace_version()
        self._settings, self._keys_on, self._gateway = settings, keys_on, gateway
        self._schema: tuple[RouteTable, bytes] | None = None
        self._documents: dict[str, Document] = {
            "/": self._index,
            "/health": self._health,
            "/version": self._get_version,
            METRICS: Recent(self._metrics, RECENT_S),
            "/openapi.json": self._openapi,
            "/headrace/v1/status": self._status,
            CONSOLE_STATE: Recent(self._status, RECENT_S),
            REQUESTS: Recent(self._requests, RECENT_S),
            HISTORY: Recent(self._history, RECENT_S),
        }

    def find(self, path: str) -> Document | None:
        """Return the document at a path, or None."""
        if path.startswith(PLANS) and len(path) > len(PLANS):
            request_id = path[len(PLANS) :]
            return lambda models: self._plan(request_id)
        return self._documents.get(path)

    async def answer(self, document: Document, models: ModelTable) -> Answer:
        """Return the status, body and content type of a document.

        Raises:
            ApiError: 504 when the cluster does not answer in time.
        """
        try:
            async with asyncio.timeout(BACKEND_TIMEOUT_S):
                return await document(models)
        except TimeoutError:
            raise errors.request_timeout(BACKEND_TIMEOUT_S) from None

    async def set_policy(self, wanted: Mapping[str, Any]) -> bytes:
        """Set every decode replica's plan policy; return how many replicas answered.

        Raises:
            ApiError: 400 when the document is not a `RouterPolicy`, 404 for an unknown model.
        """
        change = validated(RouterPolicy, wanted)
        models = self._named(change.model)
        reached = [await model.backend.set_policy(change.policy) for model in models]
        return _json({"policy": change.policy, "replicas": sum(reached)})

    def _named(self, model_id: str | None) -> list[ModelSource]:
        """Return the model of a name; None: all models.

        Raises:
            ApiError: 404, there is no such model.
        """
        found = [one for one in self._models if model_id in (None, one.model_id)]
        if not found:
            raise errors.model_not_found(str(model_id))
        return found

    async def set_speculation(self, wanted: Mapping[str, Any]) -> bytes:
        """Change how decode replicas draft; return the state of each, and a note if none drafts.

        Raises:
            ApiError: 400 when the document is not a `SpeculationUpdate`, 404 for an unknown model.
        """
        command = validated(SpeculationUpdate, wanted).model_dump(exclude_unset=True)
        models = self._named(command.pop("model", None))
        replicas = [
            replica for model in models for replica in await model.backend.set_speculation(command)
        ]
        return _json({"replicas": replicas, **({} if replicas else {"note": NONE_DRAFTS})})

    async def store(self, wanted: Mapping[str, Any] | None) -> bytes:
        """Have every machine's store list its pins or carry out an action; return the answers.

        Args:
            wanted: a `StoreAction`; None for the pins.

        Raises:
            ApiError: 400 when the document is not a `StoreAction`.
        """
        action: dict[str, Any] = {"action": "pins"}
        if wanted is not None:
            action = validated(StoreAction, wanted).model_dump()
        return _json({"machines": await self._backend.store(**action)})

    async def warm(
        self,
        wanted: Mapping[str, Any],
        backend: ModelBackend,
        *,
        tenant: str | None,
        admitted: Callable[[int], AbstractAsyncContextManager[object]],
    ) -> bytes:
        """Have every decode replica make prompts' KV; return the outcome by prompt and replica.

        The prompts are computed one after another. Warming therefore has at most one request at
        each replica, and soon none after the client hung up.

        Args:
            backend: the replicas of the model whose KV it is.
            tenant: tenant of the request's key; None if no keys are configured.
            admitted: passes a request with this number of bytes through the admission queue.

        Raises:
            ApiError: 400 when the document is not a `WarmRequest`.
        """
        request = validated(WarmRequest, wanted)
        if tenant is None and request.tenant is not None:
            raise errors.no_tenants()
        tenant = request.tenant or tenant
        salt = request.cache_salt if tenant is None else tenant_salt(tenant, request.cache_salt)
        prompts: list[list[dict[str, Any]]] = []
        for body in request.bodies:
            async with admitted(len(_json(body))):
                prompts.append(await backend.warm(body, salt, request.pin))
        return _json({"prompts": prompts})

    async def _index(self, models: ModelTable) -> Answer:
        operations = own_operations(self._settings, has_adapters=self._has_adapters)
        paths = {operation.path for operation in operations}
        paths |= {route.path for route in models.routes.routes}
        index = {
            "name": "headrace",
            "version": self._version,
            "model": self._model_id,
            **({"models": [model.model_id for model in models]} if len(models) > 1 else {}),
            "endpoints": sorted(paths),
        }
        return 200, _json(index), _JSON

    async def _health(self, models: ModelTable) -> Answer:
        """Return whether a model is ready; of several, also which."""
        ready = await models.ready()
        is_ready = bool(ready or models.fallbacks_ready)
        health: dict[str, Any] = {
            "status": "ok" if is_ready else "unavailable",
            "model": self._model_id,
            "replicas_ready": ready,
            "standing_in": models.fallbacks_ready,
        }
        if len(models) > 1:
            health["models"] = {
                model.model_id: {
                    "replicas_ready": model.pool.ready_now,
                    "standing_in": model.pool.fallbacks_ready,
                }
                for model in models
            }
        # With no replica left, the request that would start one must still come through.
        takes_requests = is_ready or any(model.backend.starts_on_demand for model in models)
        return (200 if takes_requests else 503), _json(health), _JSON

    async def _get_version(self, models: ModelTable) -> Answer:
        return 200, _json({"version": self._version}), _JSON

    async def _metrics(self, models: ModelTable) -> Answer:
        return 200, await self._backend.metrics(), _PROMETHEUS

    async def _openapi(self, models: ModelTable) -> Answer:
        """Return the OpenAPI schema, which is made again when the replicas' routes change."""
        table = models.routes
        if self._schema is None or self._schema[0] is not table:
            replica = await self._replicas_openapi()
            document = openapi_document(
                self._version,
                self._settings,
                keys_on=self._keys_on,
                has_adapters=self._has_adapters,
                routes=table.routes,
                replica=replica,
            )
            if not replica:
                return 200, _json(document), _JSON
            self._schema = table, _json(document)
        return 200, self._schema[1], _JSON

    async def _replicas_openapi(self) -> dict[str, Any]:
        """Return the OpenAPI documents of a replica of each model as one; empty without any."""
        paths: dict[str, Any] = {}
        schemas: dict[str, Any] = {}
        for model in self._models:
            document = await model.backend.openapi()
            paths = {**document.get("paths", {}), **paths}
            schemas = {**document.get("components", {}).get("schemas", {}), **schemas}
        return {"paths": paths, "components": {"schemas": schemas}} if paths else {}

    async def _status(self, models: ModelTable) -> Answer:
        """Return the status; a part that fails is left out, and named in `incomplete`."""
        status: dict[str, Any] = {}
        incomplete: list[str] = []

        @contextmanager
        def part(name: str) -> Iterator[None]:
            try:
                yield
            except Exception as error:
                logger.exception("the status lacks %s", name)
                incomplete.append(f"{name}: {type(error).__name__}: {error}")

        with part("replicas"):
            status |= await self._backend.status()
        with part("advice"):
            status |= self._advice(status.get("replicas", ()))
        with part("gateway"):
            status["gateway"] = self._gateway.state()
        with part("health"):
            told = {**status, "incomplete": list(incomplete)}
            status["health"] = asdict(assess(told, self._gateway.last_minute()))
        if incomplete:
            status["incomplete"] = incomplete
        return 200, _json(status), _JSON

    def _advice(self, replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the advice on disaggregation; of several models, by model."""
        if len(self._models) == 1:
            return {"advice": advice_of(replicas)}
        by_model = {
            model.model_id: advice_of(
                [one for one in replicas if one.get("model") == model.model_id]
            )
            for model in self._models
        }
        return {"advice": None, "advice_by_model": by_model}

    async def _requests(self, models: ModelTable) -> Answer:
        return 200, _json(self._gateway.requests()), _JSON

    async def _history(self, models: ModelTable) -> Answer:
        return 200, _json(self._gateway.history()), _JSON

    async def _plan(self, request_id: str) -> Answer:
        for model in self._models:
            if (plan := await model.backend.plan(request_id)) is not None:
                return 200, _json(plan), _JSON
        raise errors.plan_not_found(request_id)

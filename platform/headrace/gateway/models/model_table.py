"""The models of a gateway by name, and the choice of the one that answers a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.gateway import errors
from headrace.gateway.ingress.api_keys import Caller
from headrace.gateway.models.added_names import AddedNames
from headrace.gateway.models.model_names import (
    ModelNames,
    NoModelNamedError,
    UnknownModelError,
    conversation_key,
)
from headrace.gateway.models.served_model import ServedModel
from headrace.gateway.route_table import RouteTable
from headrace_decode.http.public_routes import Route

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class AskedModel(NamedTuple):
    """The part of a request by which its model is chosen.

    Attributes:
        name: the name that it gives; None if it gives none.
        conversation: key of its conversation if the name divides conversations, else empty.
    """

    name: str | None
    conversation: bytes


class ModelTable:
    """The models of a gateway, for one event loop.

    Args:
        models: the models, at least one.
        names: the names that requests may use for them.
    """

    def __init__(self, models: Sequence[ServedModel], names: ModelNames) -> None:
        self.names = names
        self._models = {model.model_id: model for model in models}
        backends = {name: self._models[name].backend for name in names.adapters.models}
        self.added = AddedNames(names.adapters, backends)
        """Reads the names of the added adapters."""
        self._tables: tuple[RouteTable, ...] = ()
        self._routes = RouteTable()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def get(self, model_id: str) -> ServedModel | None:
        """Return the model with this name of its own."""
        return self._models.get(model_id)

    @property
    def only(self) -> str:
        """The name of the only model; empty if there are several."""
        return next(iter(self._models)) if len(self._models) == 1 else ""

    @property
    def routes(self) -> RouteTable:
        """The routes of all models' replicas."""
        tables = tuple(model.pool.routes for model in self)
        if len(tables) == 1:
            return tables[0]
        if tables != self._tables:
            self._tables = tables
            self._routes = RouteTable(route for table in tables for route in table.routes)
        return self._routes

    @property
    def all_routes_known(self) -> bool:
        """Whether replicas of every model have reported their routes."""
        return all(model.pool.routes for model in self)

    async def wait_for_route(self, path: str, method: str, waited_s: float) -> Route:
        """Return an operation, as soon as replicas of one model report it.

        Args:
            waited_s: the longest wait.

        Raises:
            ApiError: 404 there is no such path, 405 it takes other methods, 503 the replicas of
                some models did not report their routes in time.
        """
        until_s = asyncio.get_running_loop().time() + waited_s
        while (route := self.routes.at(path).get(method)) is None:
            unknown = [model for model in self if not model.pool.routes]
            if not unknown:
                raise self.routes.refusal(path, method)
            left_s = until_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise errors.no_replica(waited_s)
            with contextlib.ExitStack() as places:
                for model in unknown:
                    places.enter_context(model.take_place())  # wakes its replicas
                await _first_routes(unknown, left_s)
        return route

    async def ready(self) -> int:
        """Return the number of available decode replicas, after the first poll of each model."""
        return sum([await model.pool.ready() for model in self])

    @property
    def fallbacks_ready(self) -> int:
        """Number of available prefill replicas that answer if no decode replica can."""
        return sum(model.pool.fallbacks_ready for model in self)

    def asked(self, request: Mapping[str, Any], caller: Caller) -> AskedModel:
        """Return the part of a request by which its model is chosen.

        Args:
            request: the decoded body, not yet checked.
            caller: the key of the request.

        Raises:
            ApiError: 400, `model` is no text.
        """
        name = request.get("model")
        if name is not None and not isinstance(name, str):
            if self.names or caller.models is not None:
                raise errors.bad_field("model", "must be text")
            name = None  # vLLM refuses it
        divided = self._divided(name)
        conversation = conversation_key(request, caller.tenant) if len(divided) > 1 else b""
        return AskedModel(name, conversation)

    async def choose(
        self, asked: AskedModel, caller: Caller, resumed_model: str = ""
    ) -> ServedModel:
        """Return the model that a request means.

        An unknown name may be that of an adapter which was added through another gateway, so the
        added adapters are read again first.

        Args:
            asked: the request's part that names it.
            caller: the key of the request.
            resumed_model: the model of the stream that it resumes; empty if it resumes none. A
                stream stays with it, even if the weights of the alias have changed.

        Raises:
            ApiError: 404 there is no such model, or the key may not use it; 400 no model is named.
        """
        try:
            model = self._named(*asked, caller)
        except errors.ApiError:
            if asked.name is None or not self.names.adapters.models:
                raise
            await self.added.read()
            model = self._named(*asked, caller)
        is_divided = resumed_model in self._divided(asked.name)
        return self._models[resumed_model] if is_divided else model

    def find(self, asked: AskedModel, caller: Caller) -> str | None:
        """Return the own name of the model that a request means; None if it is not known now."""
        try:
            return self._named(*asked, caller).model_id
        except errors.ApiError:
            return None

    def _divided(self, name: str | None) -> Mapping[str, float]:
        """Return the models among which a name divides conversations; empty unless an alias."""
        return self.names.aliases.get((self.names.default if name is None else name) or "", {})

    def choose_for(self, route: Route, caller: Caller) -> ServedModel:
        """Return the model that answers a request which cannot name one: the default, else the
        first with this operation.

        Raises:
            ApiError: 404, the key may use none.
        """
        try:
            return self._named(None, b"", caller)
        except errors.ApiError:
            listed = set(self.names.listed(caller.models))
            found = [model for model in self if model.model_id in listed]
            has_it = (model for model in found if route in model.pool.routes.routes)
            if not found:
                raise
            return next(has_it, found[0])

    def _named(self, name: str | None, conversation: bytes, caller: Caller) -> ServedModel:
        try:
            return self._models[self.names.resolve(name, conversation, caller.models)]
        except NoModelNamedError:
            raise errors.no_model_named() from None
        except UnknownModelError as error:
            raise errors.model_not_found(error.name) from None

    def rename(self, asked: AskedModel, model: ServedModel) -> Callable[[bytes], bytes] | None:
        """Return a function that puts the model's own name into a body in place of an alias; None
        if the body names none. All other fields keep their bytes."""
        if asked.name not in self.names.aliases:
            return None
        return lambda body: msgspec.json.encode({**_decode_fields(body), "model": model.model_id})


async def _first_routes(models: Sequence[ServedModel], waited_s: float) -> None:
    """Wait until replicas of one of the models report their routes, or the time is up."""
    waits = [asyncio.ensure_future(model.pool.known_routes(waited_s)) for model in models]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

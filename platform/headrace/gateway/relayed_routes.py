"""The replicas' routes at the gateway: a request is checked, waits in the queue, and is relayed."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any

from headrace.config.gateway import GatewaySettings
from headrace.gateway import errors
from headrace.gateway.admission.admission_queue import AdmissionQueue
from headrace.gateway.admission.slo_classes import (
    DEFAULT,
    SLO_HEADER,
    SloClass,
    SloClassError,
    SloClasses,
)
from headrace.gateway.asgi import JSON_TYPE, Send
from headrace.gateway.body_reader import BodyReader
from headrace.gateway.conversations.background import BackgroundResponses
from headrace.gateway.conversations.routes import RESPONSES
from headrace.gateway.conversations.state import ConversationState
from headrace.gateway.conversations.turn import prepare
from headrace.gateway.ingress.api_keys import Caller
from headrace.gateway.models.model_table import ModelTable
from headrace.gateway.models.served_model import ServedModel
from headrace.gateway.placement.placer import PLACED
from headrace.gateway.relay import client_resume
from headrace.gateway.relay.call import Call, in_flight
from headrace.gateway.replica_selection import affinity_key
from headrace.gateway.request_context import RequestContext
from headrace.observability.gateway_metrics import GatewayMetrics
from headrace_decode.http.public_routes import Route
from headrace_decode.resume.emitted import RESUME
from headrace_decode.techniques import TechniqueError, requested_techniques


class RelayedRoutes:
    """The handler of requests for the replicas' routes.

    Args:
        settings: the gateway's settings.
        body_reader: reads bodies.
        metrics: receives the gateway's metrics.
        models: the models, which send requests to their replicas.
        conversations: the conversation state; None if none is kept.
        on_end: called with the call of each background response that has ended.

    Attributes:
        background: the background responses; None if no state is kept.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        body_reader: BodyReader,
        metrics: GatewayMetrics,
        models: ModelTable,
        *,
        conversations: ConversationState | None,
        on_end: Callable[[Call], None],
    ) -> None:
        self._settings, self._body_reader, self._metrics = settings, body_reader, metrics
        self._models = models
        self._slo_classes = SloClasses.from_settings(settings.admission)
        self._calls: dict[int, Call] = {}  # in order of their start, at most `max_concurrent`
        self.relaying = 0
        """Number of requests that replicas work on, or that wait for one."""
        self._conversations = conversations
        self.background: BackgroundResponses | None = None
        if conversations is not None:
            self.background = BackgroundResponses(
                *(conversations, self._run_in_background),
                max_responses=settings.conversations.max_background,
                timeout_s=settings.request_timeout_s,
                on_end=on_end,
            )

    def in_flight(self, unix_s: float) -> list[dict[str, Any]]:
        """Describe the oldest calls that replicas work on.

        Args:
            unix_s: Unix time now.
        """
        return in_flight(self._calls.values(), unix_s)

    @contextlib.contextmanager
    def take_place(self) -> Iterator[None]:
        """Take one of the places for requests that replicas work on: `max_concurrent` a model.

        Raises:
            ApiError: 429, all are taken.
        """
        limit = self._settings.max_concurrent * len(self._models)
        if self.relaying >= limit:
            raise errors.too_many_requests(limit)
        self.relaying += 1
        try:
            yield
        finally:
            self.relaying -= 1

    @contextlib.asynccontextmanager
    async def admit(
        self, model: ServedModel, caller: Caller, body_bytes: int
    ) -> AsyncIterator[None]:
        """Pass a request of the gateway's own through a model's queue.

        Raises:
            ApiError: 429, the request would be late, it waited too long, or the queue is full.
        """
        slo = self._slo_classes.choose(None, {}, caller.slo, caller.slo_classes)
        async with model.admit(caller.tenant, slo, body_bytes):
            yield

    async def handle(self, context: RequestContext) -> None:
        """Check a request, then relay it."""
        call, models, route = context.call, self._models, context.call.route
        own_s = context.caller.max_retention_s
        call.max_retention_s = self._settings.max_retention_s if own_s is None else own_s
        if route is None and models.all_routes_known:
            raise models.routes.refusal(context.path, call.method)
        call.model_id = models.only
        with self.take_place():
            if call.method == "POST" and (route is None or route.takes_json):
                await self._body_reader.read_into_call(context)
            self._body_reader.limit_answer_time(context, spent_s=perf_counter() - call.started)
            route = route or await self._wait_for_route(context)
            await client_resume.prepare(call, context.headers.get(RESUME))
            if route.takes_json:
                model, slo = await self._read_body(context)
            else:
                model, slo = models.choose_for(route, context.caller), DEFAULT
            self._check_route(model, context)
            call.model_id = model.model_id
            if call.recorder is not None and call.recorder.is_background:
                await self._start_background(context)
                return
            with model.take_place(is_line=context.slo is not None):
                if model.queue is None or route.path not in PLACED:
                    await self._run(call, context.send, model)
                else:
                    await self._run_in_turn(call, context.send, model, slo, model.queue)

    def _check_route(self, model: ServedModel, context: RequestContext) -> None:
        """Refuse a route that other models' replicas have.

        Raises:
            ApiError: 404 or 405, the model's replicas report no such operation.
        """
        table, method = model.pool.routes, context.call.method
        if table and method not in table.at(context.path):
            raise table.refusal(context.path, method)

    async def _start_background(self, context: RequestContext) -> None:
        """Answer with a background response, which is run after the answer."""
        assert self.background is not None
        call = context.call
        document = await self.background.start(call, context.caller.rate_limit)
        call.route = None  # the call that runs is counted, not this one
        await context.answer(200, document, JSON_TYPE)

    async def _run_in_background(
        self, call: Call, send: Send, slo: SloClass, on_place: Callable[[], Awaitable[None]]
    ) -> None:
        """Relay the call of a background response; see `background.Run`."""
        model = self._models.get(call.model_id)
        assert model is not None
        with self.take_place(), model.take_place():
            await on_place()
            if model.queue is None:
                await self._run(call, send, model)
            else:
                await self._run_in_turn(call, send, model, slo, model.queue)

    async def _run_in_turn(
        self, call: Call, send: Send, model: ServedModel, slo: SloClass, queue: AdmissionQueue
    ) -> None:
        """Relay a call when the admission queue sends it."""
        began = perf_counter()
        ticket = await queue.enter(
            *(call.tenant, slo, len(call.body)), partial(model.fetcher.prefill_s, call)
        )
        sent = perf_counter()
        call.waited_s += sent - began
        call.targets = partial(queue.targets, ticket)
        call.on_plan = partial(queue.on_plan, ticket)
        call.on_first = partial(queue.on_first_token, ticket)
        try:
            await self._run(call, send, model)
        finally:
            first_s = total_s = None
            if call.status == 200:
                total_s = perf_counter() - sent
                if call.streamed and call.ttft_s is not None:
                    first_s = call.started + call.ttft_s - sent
            queue.on_end(ticket, first_s, total_s)

    async def _run(self, call: Call, send: Send, model: ServedModel) -> None:
        self._calls[id(call)] = call
        try:
            await model.relay.run(call, send)
        finally:
            del self._calls[id(call)]
            if call.gateway_s is not None:
                self._metrics.own_seconds(call.gateway_s)

    async def _read_body(self, context: RequestContext) -> tuple[ServedModel, SloClass]:
        """Return the request's model and class, and set the call's fields that placing needs.

        The parsed body, several times as large as its bytes, is freed before the choice of a model,
        which may wait.

        Raises:
            ApiError: the body is wrong, or names a model or a class that the request cannot have.
        """
        call, caller = context.call, context.caller
        call.body = call.body.removeprefix(codecs.BOM_UTF8)
        request = await self._body_reader.parsed(call.body)
        if self._conversations is not None and context.path == RESPONSES:
            request = await self._with_history(call, request, self._conversations)
        asked = self._models.asked(request, caller)
        call.affinity = affinity_key(request)
        try:
            techniques = requested_techniques(request)
        except TechniqueError as error:
            raise errors.wrong_technique(str(error), error.param) from None
        is_placed = call.route is not None and call.route.path in PLACED
        call.techniques = techniques if is_placed else None
        slo = context.slo or self._choose_class(context, request)
        del request  # an unknown name waits
        model = await self._models.choose(asked, caller, call.resumed_model)
        if (rename := self._models.rename(asked, model)) is not None:
            await self._body_reader.replace(call, rename)
        return model, slo

    def _choose_class(self, context: RequestContext, request: Mapping[str, Any]) -> SloClass:
        """Return the class that a request and its key name.

        Raises:
            ApiError: 400, it cannot have this class.
        """
        header, caller = context.headers.get(SLO_HEADER), context.caller
        try:
            return self._slo_classes.choose(header, request, caller.slo, caller.slo_classes)
        except SloClassError as error:
            raise errors.unknown_class(str(error), error.param) from None

    async def _with_history(
        self, call: Call, request: Mapping[str, Any], state: ConversationState
    ) -> Mapping[str, Any]:
        """Put the earlier items of a response into the call's body.

        Returns:
            The request for placing it: its input is the part that all turns have in common.

        Raises:
            ApiError: as `turn.prepare`; 429, there is no room for the body.
        """
        max_bytes = self._settings.max_body_bytes
        turn = await prepare(state, call.tenant, call.body, request, max_bytes, call.received)
        if turn is None:
            return request
        call.replace_body(turn.body)
        call.own_id_bytes, call.recorder = turn.own_id_bytes, turn.recorder
        return {**request, "input": turn.first}

    async def _wait_for_route(self, context: RequestContext) -> Route:
        """Return the route, as soon as replicas have reported it.

        Raises:
            ApiError: 404 there is no such path, 405 it takes other methods, 503 no replica has
                reported its routes in time.
        """
        call, began = context.call, perf_counter()
        call.route = await self._models.wait_for_route(
            context.path, call.method, self._settings.queue_timeout_s
        )
        call.waited_s += perf_counter() - began
        return call.route

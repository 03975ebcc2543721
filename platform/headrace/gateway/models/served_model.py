"""One model of a gateway: its replicas, and the parts that place, queue and relay its requests.

A gateway has one `ServedModel` for each model. No model's replicas, blocks, queue or places are
another's, so a model whose replicas died takes nothing from the others. What the models share
belongs to the gateway: clients' connections, keys and limits, bodies, and the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from headrace.config.gateway import GatewaySettings
from headrace.gateway import errors
from headrace.gateway.admission.admission_queue import AdmissionQueue
from headrace.gateway.admission.slo_classes import SloClass
from headrace.gateway.backend import ModelBackend
from headrace.gateway.body_reader import BodyReader
from headrace.gateway.placement.placer import Placer
from headrace.gateway.relay.relay import Relay
from headrace.gateway.relay.retry import RetryingFetcher
from headrace.gateway.replica_pool import ReplicaPool
from headrace.gateway.upstream import Upstream
from headrace.observability.gateway_metrics import GatewayMetrics
from headrace_engine.adapters.settings import AdapterSettings

WANTED_S = 10.0
"""Time after a request during which it still wakes a decode deployment that is scaled to zero: a
prefill replica may have answered it."""


class MakePlacer(Protocol):
    """Maker of a model's `Placer`."""

    def __call__(self, pool: ReplicaPool, upstream: Upstream, min_replicas: int, /) -> Placer: ...


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Parts of a `ServedModel`.

    Attributes:
        model_id: the name by which the model's replicas know it.
        backend: its replicas.
        make_placer: makes the `Placer` that plans its requests; None to let the pool choose
            replicas.
        adapters: its configured LoRA adapters; None for a model without adapters.
    """

    model_id: str
    backend: ModelBackend
    make_placer: MakePlacer | None = None
    adapters: AdapterSettings | None = None


class ServedModel:
    """One model of a gateway, for one event loop.

    Args:
        source: the model.
        settings: the gateway's settings; its limits hold for each model.
        metrics: receives the gateway's metrics.
        upstream: the connections to replicas.
        body_reader: holds the budget for bodies.
        one_tenant: whether no keys are configured.
        on_poll: called after each poll of the model's replicas.
    """

    def __init__(
        self,
        source: ModelSource,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        *,
        upstream: Upstream,
        body_reader: BodyReader,
        one_tenant: bool,
        on_poll: Callable[[ServedModel], None],
    ) -> None:
        self.model_id, self.backend = source.model_id, source.backend
        self._max_concurrent = settings.max_concurrent
        self._wanted_s = -WANTED_S
        self.pool = ReplicaPool(source.backend, partial(on_poll, self))
        self.placer: Placer | None = None
        self.queue: AdmissionQueue | None = None
        if source.make_placer is not None:
            min_replicas = 2 if settings.admission is None else 1
            self.placer = source.make_placer(self.pool, upstream, min_replicas)
        if settings.admission is not None:
            self.queue = AdmissionQueue(
                *(settings.admission, self.pool),
                None if self.placer is None else self.placer.cluster,
                one_tenant=one_tenant,
                peer_usage=source.backend.admitted,
                on_waited=partial(metrics.queued, self.model_id),
            )
        on_lost = partial(metrics.replica_lost, self.model_id)
        self.fetcher = RetryingFetcher(
            *(self.pool, upstream, settings.queue_timeout_s, self.placer),
            on_lost=on_lost,
            reserve=body_reader.reserve,
        )
        self.relay = Relay(self.pool, self.fetcher, on_lost, metrics.techniques)
        self.relaying = 0
        """Number of its requests that replicas work on, or that wait for one."""
        self.lines = 0
        """Number of them that are lines of batches."""
        self.on_request: Callable[[], None] = lambda: None
        """Called when a request that is no line takes a place."""

    def start(self) -> None:
        """Start to poll for replicas; call it in the event loop."""
        self.pool.start()
        if self.placer is not None:
            self.placer.start()
        if self.queue is not None:
            self.queue.start()

    async def aclose(self) -> None:
        """Stop polling, and stop monitoring replicas."""
        if self.queue is not None:
            await self.queue.aclose()
        await self.relay.aclose()
        if self.placer is not None:
            await self.placer.aclose()
        await self.pool.aclose()

    @property
    def is_wanted(self) -> bool:
        """Whether there is work for a replica, or was within `WANTED_S`."""
        return self.relaying > 0 or perf_counter() - self._wanted_s < WANTED_S

    @property
    def charged_s(self) -> dict[str, float]:
        """Seconds of engine time that each tenant has had from this gateway."""
        return {} if self.queue is None else dict(self.queue.controller.charged_s)

    @property
    def oldest_report_s(self) -> float:
        """Age of the oldest report that plans are made from; 0 if no plans are made."""
        return 0.0 if self.placer is None else self.placer.oldest_report_s

    def state(self) -> dict[str, Any]:
        """Return its state at this gateway, in JSON types."""
        return {
            **({} if self.placer is None else {"router": self.placer.stats()}),
            **({} if self.queue is None else {"queue": self.queue.stats()}),
            "relaying": self.relaying,
            "ready": self.pool.ready_now,
            "standing_in": self.pool.fallbacks_ready,
        }

    @contextlib.contextmanager
    def take_place(self, *, is_line: bool = False) -> Iterator[None]:
        """Take one of the model's `max_concurrent` places.

        Args:
            is_line: whether the request is a line of a batch.

        Raises:
            ApiError: 429, all are taken.
        """
        if self.relaying >= self._max_concurrent:
            raise errors.too_many_requests(self._max_concurrent)
        self.relaying += 1
        self.lines += is_line
        self._wanted_s = perf_counter()
        if not is_line:
            self.on_request()
        try:
            yield
        finally:
            self.relaying -= 1
            self.lines -= is_line

    @contextlib.asynccontextmanager
    async def admit(
        self, tenant: str | None, slo: SloClass, body_bytes: int
    ) -> AsyncIterator[None]:
        """Pass a request of the gateway's own through the queue, and count it until it ends.

        Raises:
            ApiError: 429, the request would be late, it waited too long, or the queue is full.
        """
        if self.queue is None:
            yield
            return
        ticket = await self.queue.enter(tenant, slo, body_bytes)
        try:
            yield
        finally:
            self.queue.on_end(ticket, None, None)

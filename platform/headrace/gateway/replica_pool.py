"""The gateway's view of the replicas: their health, their requests in flight, and their routes.

All replicas of one app run the same vLLM, so their routes are the same.

`headrace.replica_health` judges their health. A replica that is down or draining gets no request.
A suspect one gets requests only while no replica is healthy: the app must not stop because all
replicas are suspect.

The list is polled in the background, and a request waits for it only if it is empty. When Serve
reports that a replica stopped or drains, the replica leaves the list at once (`set_members`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from types import TracebackType

from headrace.gateway import errors
from headrace.gateway.backend import ModelBackend, ReplicaInfo
from headrace.gateway.replica_selection import choose_replica
from headrace.gateway.route_table import RouteTable
from headrace.gateway.upstream_reply import ReplicaLost
from headrace.replica_health import Probe, ReplicaHealth
from headrace_engine.supervise import supervise

logger = logging.getLogger("headrace.gateway")

POLL_INTERVAL_S = 1.0
# The shortest time between two polls, which applies while requests wait for a replica.
MIN_POLL_INTERVAL_S = 0.1
# How often a request that waits for a replica checks the list again.
WAIT_INTERVAL_S = 0.25


class Lease:
    """A place on a replica, which counts as a request in flight until it is released."""

    __slots__ = ("_pool", "replica")

    def __init__(self, pool: ReplicaPool, replica: ReplicaInfo) -> None:
        self._pool: ReplicaPool | None = pool
        self.replica = replica
        in_flight = pool.in_flight
        in_flight[replica.replica_id] = in_flight.get(replica.replica_id, 0) + 1

    def release(self) -> None:
        """Give the place back; a second call does nothing."""
        if self._pool is None:
            return
        in_flight, key = self._pool.in_flight, self.replica.replica_id
        self._pool = None
        if in_flight[key] > 1:
            in_flight[key] -= 1
        else:
            del in_flight[key]

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class ReplicaPool:
    """The replicas with their readiness and load.

    Args:
        backend: source of the list.
        on_poll: called after each poll of the list.

    Attributes:
        on_doubt: called when a replica failed, so that it is probed.
    """

    def __init__(self, backend: ModelBackend, on_poll: Callable[[], None] = lambda: None) -> None:
        self._backend, self._on_poll = backend, on_poll
        self._replicas: list[ReplicaInfo] = []
        self._others: dict[str, int] = {}
        self._members: frozenset[str] | None = None
        self.replica_health = ReplicaHealth()
        self.on_suspect: Callable[[], None] = lambda: None
        self._poller: asyncio.Task[None] | None = None
        self._polled = False
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self.in_flight: dict[str, int] = {}
        self.routes = RouteTable()
        """Routes of the replicas; while there is no replica, those of the last ones."""

    def start(self) -> None:
        """Start to poll; call it in the event loop, as often as you like."""
        if self._poller is None or self._poller.done():
            self._poller = supervise(self._poll, "ask for the list of replicas")

    async def aclose(self) -> None:
        """Stop polling."""
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller
            self._poller = None

    async def ready(self) -> int:
        """Return the number of available decode replicas, after the first poll."""
        self.start()
        if not self._polled:
            await self._changed.wait()
        return self.ready_now

    @property
    def ready_now(self) -> int:
        """Number of available decode replicas, by the present list."""
        return self._ready(is_fallback=False)

    @property
    def fallbacks_ready(self) -> int:
        """Number of available prefill replicas that answer if no decode replica can."""
        return self._ready(is_fallback=True)

    def _ready(self, *, is_fallback: bool) -> int:
        down = self.down
        return sum(
            each.is_fallback == is_fallback and each.replica_id not in down
            for each in self._replicas
        )

    def __len__(self) -> int:
        """Return the number of listed decode replicas."""
        return sum(not each.is_fallback for each in self._replicas)

    def free_places(self, max_requests: int) -> tuple[int, int, int]:
        """Return the number of available replicas, the number of requests that they can take
        together until each has `max_requests`, and the number that they have."""
        down, ready, free, busy = self.down, 0, 0, 0
        fallbacks_count = not self.ready_now
        for replica in self._replicas:
            if replica.is_fallback and not fallbacks_count:
                continue
            if (name := replica.replica_id) not in down:
                load = self.in_flight.get(name, 0) + self._others.get(name, 0)
                ready, free, busy = ready + 1, free + max(0, max_requests - load), busy + load
        return ready, free, busy

    @property
    def requests_elsewhere(self) -> int:
        """Number of requests that replicas had from other gateways, by their last reports."""
        return sum(self._others.values())

    def try_lease(self, affinity: bytes) -> Lease | None:
        """Return a place on the best replica, or None when none is ready."""
        replica = self.suggest(affinity)
        return None if replica is None else Lease(self, replica)

    def suggest(self, affinity: bytes) -> ReplicaInfo | None:
        """Return the best replica by load and the prompt's beginning, or None if none is ready."""
        return choose_replica(
            self._replicas, self.in_flight, self.down, affinity, others=self._others
        )

    def lease_replica(self, replica_id: str) -> Lease | None:
        """Return a place on this replica, or None when it is not ready."""
        if replica_id in self.down:
            return None
        named = (each for each in self._replicas if each.replica_id == replica_id)
        replica = next(named, None)
        return None if replica is None else Lease(self, replica)

    async def lease(self, affinity: bytes, until: float, waited_s: float) -> Lease:
        """Wait for a ready replica, and return a place on the best one.

        Args:
            affinity: see `replica_selection.affinity_key`.
            until: loop time at which to give up.
            waited_s: the length of the wait, for the message.

        Raises:
            ApiError: 503 when none was ready in time.
        """
        self.start()
        loop = asyncio.get_running_loop()
        while True:
            lease = self.try_lease(affinity)
            if lease is not None:
                return lease
            left_s = until - loop.time()
            if left_s <= 0:
                raise errors.no_replica(waited_s)
            self._wake.set()
            # Not `wait_for`: in Python 3.11 a change at the same time swallows a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, WAIT_INTERVAL_S)):
                    await self._changed.wait()

    def set_members(self, replica_ids: frozenset[str]) -> None:
        """Set the decode replicas that run, as Serve reports them.

        Other decode replicas get no more requests, and the list is polled again at once.
        """
        self._members = replica_ids
        listed = [each.replica_id for each in self._replicas if not each.is_fallback]
        self.replica_health.on_members(listed, replica_ids, asyncio.get_running_loop().time())
        self._replicas = _keep_members(self._replicas, replica_ids)
        self._wake.set()

    async def known_routes(self, waited_s: float) -> RouteTable:
        """Return the replicas' routes, as soon as one has reported them.

        Args:
            waited_s: the longest wait.

        Raises:
            ApiError: 503 when no replica reported its routes in time.
        """
        self.start()
        loop = asyncio.get_running_loop()
        until = loop.time() + waited_s
        while not self.routes:
            left_s = until - loop.time()
            if left_s <= 0:
                raise errors.no_replica(waited_s)
            self._wake.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
        return self.routes

    def on_failure(self, replica: ReplicaInfo, error: Exception) -> None:
        """Use a failed request as evidence about its replica, and poll the list at once.

        Args:
            error: why it failed. If the replica hangs, the probes have already reported that.
        """
        now_s, name = asyncio.get_running_loop().time(), replica.replica_id
        if isinstance(error, ReplicaLost) and not error.hangs:
            if error.dying:
                self.replica_health.on_probe(name, Probe.DEAD, now_s)
            elif error.sent:
                self.replica_health.on_broken(name, now_s)
            elif isinstance(error.__cause__, TimeoutError):
                self.replica_health.on_probe(name, Probe.MISSED, now_s)
            else:
                self.replica_health.on_probe(name, Probe.REFUSED, now_s)
        self._wake.set()
        self.on_suspect()

    @property
    def down(self) -> Collection[str]:
        """Ids of the replicas that get no requests now."""
        unhealthy = self.replica_health.unhealthy
        if not unhealthy:
            return ()
        some_healthy = any(
            not each.is_fallback and each.replica_id not in unhealthy for each in self._replicas
        )
        if some_healthy:
            return unhealthy
        now_s = asyncio.get_running_loop().time()
        return [name for name in unhealthy if not self.replica_health.may_be_tried(name, now_s)]

    def suspects(self) -> list[ReplicaInfo]:
        """Return the listed replicas that failed and that no later probe has cleared."""
        replica_health = self.replica_health
        return [each for each in self._replicas if replica_health.needs_probe(each.replica_id)]

    def healthy_alternatives(self, replica_id: str) -> dict[str, int]:
        """Return the healthy replicas that could take over the requests of another one.

        Returns:
            The number of requests that each has, by replica id.
        """
        unhealthy = self.replica_health.unhealthy
        healthy = [
            each
            for each in self._replicas
            if each.replica_id != replica_id and each.replica_id not in unhealthy
        ]
        healthy = [each for each in healthy if not each.is_fallback] or healthy
        return {
            each.replica_id: self.in_flight.get(each.replica_id, 0)
            + self._others.get(each.replica_id, 0)
            for each in healthy
        }

    async def _poll(self) -> None:
        while True:
            self._wake.clear()
            try:
                had = dict(self.in_flight)
                replicas = await self._backend.replicas()
                if self._members is not None:
                    replicas = _keep_members(replicas, self._members)
                self._replicas = list(replicas)
                self._others = {
                    each.replica_id: max(0, each.reported - had.get(each.replica_id, 0))
                    for each in replicas
                }
                offered = {route for replica in self._replicas for route in replica.routes}
                if offered and offered != self.routes.routes:
                    self.routes = RouteTable(offered)
            except Exception as error:
                logger.warning("cannot list the replicas, keeping the last list: %r", error)
            self.replica_health.check(asyncio.get_running_loop().time())
            self._polled = True
            self._changed.set()
            self._changed = asyncio.Event()
            try:
                self._on_poll()
            except Exception:  # a failed export must not end the polling
                logger.exception("the gateway's state is not exported any more")
                self._on_poll = lambda: None
            await asyncio.sleep(MIN_POLL_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S - MIN_POLL_INTERVAL_S):
                    await self._wake.wait()


def _keep_members(replicas: list[ReplicaInfo], members: frozenset[str]) -> list[ReplicaInfo]:
    """Return the decode replicas among these members, and all prefill fallbacks."""
    return [each for each in replicas if each.is_fallback or each.replica_id in members]

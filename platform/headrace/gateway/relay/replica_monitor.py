"""The monitor of replicas: it probes silent and suspect ones, and moves requests off those down.

A connection to a stopped process, or to a machine that vanished, stays open for long. A request
that waits in an engine's queue gets no byte either. A replica is therefore silent when none of its
requests gets any byte. Then the gateway probes its health check, and `headrace.replica_health`
judges. A replica that is down keeps its requests until others may take them over: at the pace of
the retry budget, and none while no other replica is healthy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.replica_pool import ReplicaPool
from headrace.gateway.upstream import ReplicaLost
from headrace.replica_health import PROBE_INTERVAL_S, SILENT_S, Probe, State
from headrace_engine.supervise import supervise

logger = logging.getLogger("headrace.gateway")

POLL_INTERVAL_S = 0.25


class MonitoredRequest:
    """One request at a replica.

    Attributes:
        began_s: loop time of its start.
        last_byte_s: loop time of its last byte.
    """

    __slots__ = ("_loop", "_timeout", "began_s", "last_byte_s", "replica")

    def __init__(self, replica: ReplicaInfo, loop: asyncio.AbstractEventLoop) -> None:
        self.replica, self._loop = replica, loop
        self.began_s, self.last_byte_s = loop.time(), -math.inf
        self._timeout: asyncio.Timeout | None = None

    def on_bytes(self) -> None:
        """Record that the replica sent bytes."""
        self.last_byte_s = self._loop.time()

    @property
    def is_waiting(self) -> bool:
        """Whether the request's task waits for the replica."""
        return self._timeout is not None

    def give_up(self) -> None:
        """Interrupt the request's wait, because its replica hangs."""
        if self._timeout is not None:
            self._timeout.reschedule(self._loop.time())

    @contextlib.asynccontextmanager
    async def interruptible(self) -> AsyncIterator[None]:
        """Let `give_up` interrupt the block, in which the request's task waits for the replica.

        Raises:
            ReplicaLost: `give_up` was called.
        """
        try:
            async with asyncio.timeout(None) as self._timeout:
                yield
        except TimeoutError as error:
            if self._timeout is None or not self._timeout.expired():
                raise
            raise ReplicaLost("it hangs", sent=True, hangs=True) from error
        finally:
            self._timeout = None


class ReplicaMonitor:
    """The monitor of all requests of one event loop.

    Args:
        pool: the replicas.
        probe: asks a replica's health check, with a time limit.
    """

    def __init__(self, pool: ReplicaPool, probe: Callable[[ReplicaInfo], Awaitable[Probe]]) -> None:
        self._pool, self._probe = pool, probe
        self._requests: dict[str, dict[MonitoredRequest, None]] = {}
        """Requests by replica id, oldest first."""
        self._last_byte_s: dict[str, float] = {}
        """Loop time of the last byte of each such replica, to requests that have ended."""
        self._probed_s: dict[str, float] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._poller: asyncio.Task[None] | None = None
        pool.on_suspect = self.start

    @contextlib.contextmanager
    def monitor(self, replica: ReplicaInfo) -> Iterator[MonitoredRequest]:
        """Monitor one request until the end of the block."""
        self.start()
        name, one = replica.replica_id, MonitoredRequest(replica, asyncio.get_running_loop())
        self._requests.setdefault(name, {})[one] = None
        try:
            yield one
        finally:
            self._last_byte_s[name] = max(
                self._last_byte_s.get(name, one.last_byte_s), one.last_byte_s
            )
            del self._requests[name][one]
            if not self._requests[name]:
                del self._requests[name], self._last_byte_s[name]

    def start(self) -> None:
        """Start to probe replicas, until no request runs and no replica is suspect."""
        if self._poller is None or self._poller.done():
            self._poller = supervise(self._poll, "probe silent and suspect replicas")

    async def aclose(self) -> None:
        """Stop probing."""
        self._pool.on_suspect = lambda: None
        tasks = [*self._probes.values(), *([self._poller] if self._poller else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self) -> None:
        while self._requests or self._probes or self._pool.suspects():
            await asyncio.sleep(POLL_INTERVAL_S)
            now_s = asyncio.get_running_loop().time()
            silent = self._silent(now_s)
            for name, replica in silent.items():
                if self._pool.replica_health.state(name) is State.DOWN:
                    self._give_up(replica, now_s)
            suspects = {each.replica_id: each for each in self._pool.suspects()}
            for name, replica in (suspects | silent).items():
                due_s = self._probed_s.get(name, -PROBE_INTERVAL_S) + PROBE_INTERVAL_S
                if name not in self._probes and now_s >= due_s:
                    self._probed_s[name] = now_s
                    self._probes[name] = supervise(
                        partial(self._probe_one, replica), f"probe {name}", restarts=False
                    )
            self._probed_s = {
                name: at_s
                for name, at_s in self._probed_s.items()
                if now_s - at_s < 2 * PROBE_INTERVAL_S
            }

    def _silent(self, now_s: float) -> dict[str, ReplicaInfo]:
        """Return the replicas none of whose requests got a byte within `SILENT_S`.

        The start of a request is no sign of life.
        """
        silent = {}
        for name, monitored in self._requests.items():
            last_byte_s = max(one.last_byte_s for one in monitored)
            last_byte_s = max(last_byte_s, self._last_byte_s.get(name, -math.inf))
            self._pool.replica_health.on_bytes(name, last_byte_s)
            oldest = next(iter(monitored))
            if now_s - max(last_byte_s, oldest.began_s) >= SILENT_S:
                silent[name] = oldest.replica
        return silent

    def _give_up(self, replica: ReplicaInfo, now_s: float) -> None:
        """Have other replicas take over as many requests as the retry budget allows."""
        name = replica.replica_id
        waiting = [one for one in self._requests[name] if one.is_waiting]
        others = self._pool.healthy_alternatives(name)
        moved = self._pool.replica_health.take_retries(others, len(waiting), now_s)
        for one in waiting[:moved]:
            one.give_up()

    async def _probe_one(self, replica: ReplicaInfo) -> None:
        name, replica_health = replica.replica_id, self._pool.replica_health
        try:
            probe = await self._probe(replica)
        finally:
            del self._probes[name]
        before = replica_health.state(name)
        replica_health.on_probe(name, probe, asyncio.get_running_loop().time())
        after = replica_health.state(name)
        if after is not before:
            logger.warning(
                "replica %s is %s, and was %s: probe %s",
                name,
                after.value,
                before.value,
                probe.value,
            )

"""The watch over replicas: it probes silent or doubtful ones, and moves requests from those down.

A connection to a stopped process, or to a machine that vanished, stays open for long. A request
that waits in an engine's queue gets no byte either. A replica is therefore silent when none of its
requests gets any byte. Then the gateway probes its health check, and `headrace.liveness` judges. A
replica that is down keeps its requests until others may take them over: at the pace of the retry
budget, and none while no other replica is healthy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.replicas import ReplicaPool
from headrace.gateway.upstream import ReplicaLost
from headrace.liveness import PROBE_INTERVAL_S, SILENT_S, Probe, State
from headrace_engine.supervise import supervise

logger = logging.getLogger("headrace.gateway")

TICK_S = 0.25


class Watched:
    """One request at a replica.

    Attributes:
        began_s: loop time of its start.
        heard_s: loop time of its last byte.
    """

    __slots__ = ("_loop", "_patience", "began_s", "heard_s", "replica")

    def __init__(self, replica: ReplicaInfo, loop: asyncio.AbstractEventLoop) -> None:
        self.replica, self._loop = replica, loop
        self.began_s, self.heard_s = loop.time(), -math.inf
        self._patience: asyncio.Timeout | None = None

    def heard(self) -> None:
        """Record that the replica sent bytes."""
        self.heard_s = self._loop.time()

    @property
    def is_waiting(self) -> bool:
        """Whether the request's task waits for the replica."""
        return self._patience is not None

    def give_up(self) -> None:
        """Interrupt the request's wait, because its replica hangs."""
        if self._patience is not None:
            self._patience.reschedule(self._loop.time())

    @contextlib.asynccontextmanager
    async def waits(self) -> AsyncIterator[None]:
        """Let `give_up` interrupt the block, in which the request's task waits for the replica.

        Raises:
            ReplicaLost: `give_up` was called.
        """
        try:
            async with asyncio.timeout(None) as self._patience:
                yield
        except TimeoutError as error:
            if self._patience is None or not self._patience.expired():
                raise
            raise ReplicaLost("it hangs", sent=True, hangs=True) from error
        finally:
            self._patience = None


class Watch:
    """The watch over all requests of one event loop.

    Args:
        pool: the replicas.
        probe: asks a replica's health check, with a time limit.
    """

    def __init__(self, pool: ReplicaPool, probe: Callable[[ReplicaInfo], Awaitable[Probe]]) -> None:
        self._pool, self._probe = pool, probe
        self._watched: dict[str, dict[Watched, None]] = {}
        """Requests by replica id, oldest first."""
        self._heard_s: dict[str, float] = {}
        """Loop time of the last byte of each such replica, to requests that have ended."""
        self._probed_s: dict[str, float] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._looker: asyncio.Task[None] | None = None
        pool.on_doubt = self.start

    @contextlib.contextmanager
    def over(self, replica: ReplicaInfo) -> Iterator[Watched]:
        """Watch one request until the end of the block."""
        self.start()
        name, one = replica.replica_id, Watched(replica, asyncio.get_running_loop())
        self._watched.setdefault(name, {})[one] = None
        try:
            yield one
        finally:
            self._heard_s[name] = max(self._heard_s.get(name, one.heard_s), one.heard_s)
            del self._watched[name][one]
            if not self._watched[name]:
                del self._watched[name], self._heard_s[name]

    def start(self) -> None:
        """Start to watch the replicas, until no request runs and no replica is in doubt."""
        if self._looker is None or self._looker.done():
            self._looker = supervise(self._look, "probe replicas that are silent or in doubt")

    async def aclose(self) -> None:
        """Stop watching."""
        self._pool.on_doubt = lambda: None
        tasks = [*self._probes.values(), *([self._looker] if self._looker else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        while self._watched or self._probes or self._pool.doubtful():
            await asyncio.sleep(TICK_S)
            now_s = asyncio.get_running_loop().time()
            silent = self._silent(now_s)
            for name, replica in silent.items():
                if self._pool.liveness.state(name) is State.DOWN:
                    self._give_up(replica, now_s)
            doubtful = {each.replica_id: each for each in self._pool.doubtful()}
            for name, replica in (doubtful | silent).items():
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
        for name, watched in self._watched.items():
            heard_s = max(one.heard_s for one in watched)
            heard_s = max(heard_s, self._heard_s.get(name, -math.inf))
            self._pool.liveness.on_bytes(name, heard_s)
            oldest = next(iter(watched))
            if now_s - max(heard_s, oldest.began_s) >= SILENT_S:
                silent[name] = oldest.replica
        return silent

    def _give_up(self, replica: ReplicaInfo, now_s: float) -> None:
        """Have other replicas take over as many requests as the retry budget allows."""
        name = replica.replica_id
        waiting = [one for one in self._watched[name] if one.is_waiting]
        others = self._pool.healthy_beside(name)
        moved = self._pool.liveness.take_retries(others, len(waiting), now_s)
        for one in waiting[:moved]:
            one.give_up()

    async def _probe_one(self, replica: ReplicaInfo) -> None:
        name, liveness = replica.replica_id, self._pool.liveness
        try:
            probe = await self._probe(replica)
        finally:
            del self._probes[name]
        before = liveness.state(name)
        liveness.on_probe(name, probe, asyncio.get_running_loop().time())
        after = liveness.state(name)
        if after is not before:
            logger.warning(
                "replica %s is %s, and was %s: probe %s",
                name,
                after.value,
                before.value,
                probe.value,
            )

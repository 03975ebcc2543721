"""Finds replicas that hang: one that was silent for a while is asked whether it is well.

A connection to a stopped process, or to a machine that is gone, stays open for long, and a request
that waits for its turn is silent, too. So silence alone ends nothing; a health check that fails
does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.upstream import ReplicaLost

SILENT_S = 2.0
"""From the last byte of a request's answer until its replica is asked, and between two asks."""
LOOK_S = 0.5


class Watched:
    """One request at a replica.

    Attributes:
        heard_s: loop time of its last byte, or of its begin. The owner sets it.
    """

    __slots__ = ("_loop", "_patience", "heard_s", "replica")

    def __init__(self, replica: ReplicaInfo, loop: asyncio.AbstractEventLoop) -> None:
        self.replica, self._loop = replica, loop
        self.heard_s = loop.time()
        self._patience: asyncio.Timeout | None = None

    def heard(self) -> None:
        """Its replica gave a sign of life."""
        self.heard_s = self._loop.time()

    def give_up(self) -> None:
        """Its replica hangs."""
        if self._patience is not None:
            self._patience.reschedule(self._loop.time())

    @contextlib.asynccontextmanager
    async def waits(self) -> AsyncIterator[None]:
        """While its owner waits for the replica.

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
    """All requests of one event loop.

    Args:
        healthy: whether a replica's health check passes; bounded in time.
    """

    def __init__(self, healthy: Callable[[ReplicaInfo], Awaitable[bool]]) -> None:
        self._healthy = healthy
        self._watched: set[Watched] = set()
        self._asked_s: dict[str, float] = {}
        self._looker: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def over(self, replica: ReplicaInfo) -> Iterator[Watched]:
        """Watch one request until the end of the block."""
        loop = asyncio.get_running_loop()
        if self._looker is None or self._looker.done():
            self._looker = loop.create_task(self._look())
        one = Watched(replica, loop)
        self._watched.add(one)
        try:
            yield one
        finally:
            self._watched.discard(one)

    async def aclose(self) -> None:
        """Stop to look."""
        if self._looker is not None:
            self._looker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looker

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while self._watched:
            await asyncio.sleep(LOOK_S)
            now = loop.time()
            self._asked_s = {k: at for k, at in self._asked_s.items() if now - at < SILENT_S}
            silent = {
                one.replica.replica_id: one.replica
                for one in self._watched
                if now - one.heard_s >= SILENT_S and one.replica.replica_id not in self._asked_s
            }
            self._asked_s.update(dict.fromkeys(silent, now))
            well = await asyncio.gather(*map(self._healthy, silent.values()))
            hang = {name for name, fine in zip(silent, well, strict=True) if not fine}
            for one in list(self._watched):
                if one.replica.replica_id in hang and one.heard_s <= now - SILENT_S:
                    one.give_up()

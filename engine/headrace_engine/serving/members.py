"""The replicas of each deployment that this process may ask, as Serve's controller last told it.

Serve tells every process that holds a handle as soon as a replica starts, stops or drains. The
request router of the handle (`request_router`) passes it on here. So no code has to poll, and a
replica that drains is left out at once. Thread-safe: handles run on a thread of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

Ids = frozenset[str]


class Members:
    """Replica ids by the name of their deployment (`request_router.deployment_name`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: dict[str, Ids] = {}
        self._watchers: dict[str, list[Callable[[Ids], None]]] = {}

    def update(self, deployment: str, replica_ids: Iterable[str]) -> None:
        """Set the replicas of a deployment. Watchers are called only if they change."""
        ids = frozenset(replica_ids)
        with self._lock:
            if self._ids.get(deployment) == ids:
                return
            self._ids[deployment] = ids
            for tell in self._watchers.get(deployment, ()):
                tell(ids)

    def watch(self, deployment: str, tell: Callable[[Ids], None]) -> None:
        """Call `tell` with a deployment's replicas, now if they are known and after each change.

        It is called on any thread and must not block.
        """
        with self._lock:
            self._watchers.setdefault(deployment, []).append(tell)
            if deployment in self._ids:
                tell(self._ids[deployment])


MEMBERS = Members()
"""Replicas that this process may ask. It holds handles of one app only."""

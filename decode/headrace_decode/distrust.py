"""Decides which prefill replicas' KV is checked byte for byte after they delivered wrong bytes.

A replica that answers probes may still flip bits now and then, and checks of samples would miss
most of them. After one wrong block, all KV of that replica is therefore checked, until a long run
of transfers was correct. Pure.
"""

from __future__ import annotations

CLEAN = 500
"""Number of correct transfers in a row after which only samples are checked again. A replica that
corrupts one block in 100, with four blocks a transfer, passes such a run with a probability of
2e-9."""


class Distrust:
    """Distrusted replicas, each with the number of correct transfers that it still needs."""

    def __init__(self) -> None:
        self._owed: dict[str, int] = {}

    def wrong(self, replica: str) -> None:
        """Record that a replica delivered wrong bytes."""
        self._owed[replica] = CLEAN

    def right(self, replica: str) -> None:
        """Record that a replica's KV was used. While it is distrusted, all its KV was checked."""
        owed = self._owed.get(replica)
        if owed is None:
            return
        if owed <= 1:
            del self._owed[replica]
        else:
            self._owed[replica] = owed - 1

    def members(self, replicas: frozenset[str]) -> None:
        """Remove all replicas but these, which run."""
        for replica in self._owed.keys() - replicas:
            del self._owed[replica]

    def __contains__(self, replica: str) -> bool:
        return replica in self._owed

"""Which prefill replicas are checked byte for byte: those that have delivered wrong bytes.

A replica that answers probes may still flip bits now and then, and a sample would let most of them
pass. So after one wrong block all KV of that replica is checked, until a long run of it was right.
Pure.
"""

from __future__ import annotations

CLEAN = 500
"""Right transfers in a row until only samples are checked again. A replica that spoils one block in
100, with four blocks a transfer, passes such a run with a probability of 2e-9."""


class Distrust:
    """By replica: how many right transfers it owes."""

    def __init__(self) -> None:
        self._owed: dict[str, int] = {}

    def wrong(self, replica: str) -> None:
        """It delivered wrong bytes."""
        self._owed[replica] = CLEAN

    def right(self, replica: str) -> None:
        """KV of it was used. While it is distrusted, all of it has been checked."""
        owed = self._owed.get(replica)
        if owed is None:
            return
        if owed <= 1:
            del self._owed[replica]
        else:
            self._owed[replica] = owed - 1

    def members(self, replicas: frozenset[str]) -> None:
        """Only these run: the others are forgotten."""
        for replica in self._owed.keys() - replicas:
            del self._owed[replica]

    def __contains__(self, replica: str) -> bool:
        return replica in self._owed

"""Decides which prefill replicas' KV is checked byte for byte after they delivered wrong bytes.

A replica that answers probes may still flip bits now and then, and checks of samples would miss
most of them. After one wrong block, all KV of that replica is therefore checked, until a long run
of transfers was correct. Pure.
"""

from __future__ import annotations

REQUIRED_CORRECT = 500
"""Number of correct transfers in a row after which only samples are checked again. A replica that
corrupts one block in 100, with four blocks a transfer, passes such a run with a probability of
2e-9."""


class VerificationPolicy:
    """Replicas whose KV is checked, each with the number of correct transfers it still needs."""

    def __init__(self) -> None:
        self._required: dict[str, int] = {}

    def record_wrong(self, replica: str) -> None:
        """Record that a replica delivered wrong bytes."""
        self._required[replica] = REQUIRED_CORRECT

    def record_correct(self, replica: str) -> None:
        """Record that a replica's KV was used. While its KV is checked, the KV was correct."""
        required = self._required.get(replica)
        if required is None:
            return
        if required <= 1:
            del self._required[replica]
        else:
            self._required[replica] = required - 1

    def retain(self, replicas: frozenset[str]) -> None:
        """Remove all replicas but these, which run."""
        for replica in self._required.keys() - replicas:
            del self._required[replica]

    def __contains__(self, replica: str) -> bool:
        return replica in self._required

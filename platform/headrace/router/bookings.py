"""Plans that engines' reports do not include yet, as a part of each engine's work in the view.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from headrace.router.placement.cluster_view import ClusterView
from headrace_engine.kv_groups import BlockUse

BOOKING_TIMEOUT_S = 5.0


class Booking(NamedTuple):
    """A plan's share of an engine's work, until the engine's reports include it."""

    at_s: float
    tokens: int = 0
    """Prompt tokens that the engine will compute, and (`pairs`) their attention pairs."""
    pairs: int = 0
    context: int = 0
    """Tokens of KV at the start of the answer, on the engine that decodes."""
    decodes: bool = False
    adapter: str = ""
    """Digest of the LoRA adapter that it makes the engine load, or uses."""


class Bookings:
    """The booked plans of each replica, by the plan's name."""

    def __init__(self) -> None:
        self._booked: dict[str, dict[str, Booking]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._booked.values()))

    def add_replica(self, replica: str) -> None:
        self._booked[replica] = {}

    def remove_replica(self, replica: str) -> None:
        del self._booked[replica]

    def of(self, replica: str) -> Collection[Booking]:
        """Return what is booked on a replica."""
        return self._booked[replica].values()

    def adapters(self, replica: str) -> set[str]:
        """Return the digests of the adapters that booked plans make a replica load, or use."""
        return {each.adapter for each in self.of(replica) if each.adapter}

    def remove_received(self, replica: str, plans: Iterable[str]) -> None:
        """Remove the plans that a report names; the view follows with the report."""
        booked = self._booked[replica]
        for plan in plans:
            booked.pop(plan, None)

    def expired(self, now_s: float) -> list[tuple[str, str]]:
        """Return (replica, plan) of the bookings that no report named in `BOOKING_TIMEOUT_S`."""
        return [
            (replica, plan)
            for replica, booked in self._booked.items()
            for plan, each in booked.items()
            if now_s - each.at_s > BOOKING_TIMEOUT_S
        ]

    def add(
        self, view: ClusterView, replica: str, plan: str, booking: Booking, use: BlockUse
    ) -> None:
        """Book a plan on a replica.

        Args:
            use: blocks that a request takes in the replica's KV cache.
        """
        self._booked[replica][plan] = booking
        row = view.row(replica)
        view.reserve(row, booking.tokens, booking.pairs, booking.at_s)
        view.engines[row]["prompts"] += booking.tokens > 0
        count_decode(view, row, booking, use, 1)

    def release(
        self, view: ClusterView, replica: str, plan: str, use: BlockUse, now_s: float
    ) -> None:
        """Remove a booking, if there is one."""
        booking = self._booked[replica].pop(plan, None)
        if booking is not None:
            row = view.row(replica)
            view.reserve(row, -booking.tokens, -booking.pairs, now_s)
            view.engines[row]["prompts"] -= booking.tokens > 0
            count_decode(view, row, booking, use, -1)


def count_decode(view: ClusterView, row: int, booking: Booking, use: BlockUse, sign: int) -> None:
    """Add a request to the ones that an engine decodes (sign 1), or remove it (-1)."""
    if not booking.decodes:
        return
    engine = view.engines[row]
    blocks = use.blocks(-(-booking.context // view.block_tokens))
    engine["running"] += sign
    engine["context"] += sign * booking.context
    if engine["free_blocks"] >= 0:  # they are known
        engine["free_blocks"] = max(0, engine["free_blocks"] - sign * blocks)

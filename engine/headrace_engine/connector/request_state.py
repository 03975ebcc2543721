"""The state of one request in the scheduler's side of the connector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(slots=True)
class RequestState:
    """A request from its admission to its end.

    Attributes:
        blocks: ids of its blocks in the engine's cache, a list for each cache group, in order.
        scheduled: tokens scheduled since it was (re)admitted.
        saved: number of leading blocks that `_save` has handled.
        ahead: whether it had a load ahead since it was last in a step.
        hold_end: number of leading blocks that `_hold` has handled.
    """

    request: Any
    blocks: list[list[int]] = field(default_factory=list)
    scheduled: int = 0
    saved: int = 0
    ahead: bool = False
    hold_end: int = 0

    @property
    def length(self) -> int:
        """Number of its blocks in each group."""
        return min(map(len, self.blocks), default=0)

    def admit(self, blocks: Sequence[Sequence[int]]) -> None:
        """Begin again with these blocks."""
        self.blocks = [list(group) for group in blocks]
        self.scheduled = self.saved = self.hold_end = 0
        self.ahead = False

    def extend(self, blocks: Sequence[Sequence[int]]) -> None:
        """Add blocks at the end."""
        for group, more in zip(self.blocks, blocks, strict=True):
            group.extend(more)


class BlockOffer(NamedTuple):
    """Blocks that a request may load: the first one's number, whether they are loaded ahead of its
    step, and their names; and the number of the blocks after them, which it must compute."""

    start: int = 0
    ahead: bool = False
    names: tuple[bytes, ...] = ()
    missing: int = 0


class TierQuestion(NamedTuple):
    """A question to slower tiers: for which blocks, how many stand before them, and when it was
    asked."""

    hashes: list[bytes]
    first: int
    asked_s: float


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """The blocks that slower tiers supply to a request; `limit_s` is that of
    `load_price.LoadChoice`.

    Attributes:
        until_s: when their lease ends.
        asked: the blocks that DRAM lacked when the node was asked.
    """

    places: dict[bytes, Any] = field(default_factory=dict)
    limit_s: float = math.inf
    until_s: float = math.inf
    asked: frozenset[bytes] = frozenset()

    def source(self, name: bytes) -> str:
        """Return where a block that is loaded comes from: `dram`, `nvme`, or `remote` if the node
        has just fetched it to DRAM from a peer or an object store."""
        if name in self.places:
            return "nvme"
        return "remote" if name in self.asked else "dram"

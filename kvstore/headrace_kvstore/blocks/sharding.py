"""The parts into which a block's layers are cut, and those that each tensor-parallel rank has.

A stored block holds the KV of all ranks of an engine, layer after layer. Each layer is cut into
equal parts, with a checksum a part:

    if the engine's cache keeps       a part is       an engine reads blocks written with
    each head's bytes together        a KV head       any tensor-parallel size
    heads between tokens              a rank's share  as many shares

vLLM gives H heads to R ranks in order: rank r has the heads from r H / R on. If R exceeds H, rank r
has head r // (R / H), and R / H ranks have the same one. If several ranks have a part, the lowest
writes it. MLA is the case H = 1. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """A cache's parts of each layer: `count` of the layer's `parts`, from `first` on."""

    parts: int = 1
    first: int = 0
    count: int = 1


WHOLE_LAYER = Shard()
"""A whole layer that is one part."""


@dataclass(frozen=True)
class HeadSharding:
    """Number of parts of a layer, and number of ranks that share them.

    Raises:
        ValueError: parts and ranks do not divide each other.
    """

    parts: int
    ranks: int

    def __post_init__(self) -> None:
        parts, ranks = self.parts, self.ranks
        if min(parts, ranks) < 1 or (parts % ranks and ranks % parts):
            raise ValueError(f"{parts} parts of a layer cannot be shared by {ranks} ranks")

    @classmethod
    def of(cls, heads: int, ranks: int, heads_contiguous: bool) -> HeadSharding:
        """Return the parts of an engine with `heads` KV heads in all.

        Args:
            heads_contiguous: whether each head's bytes of a block and layer lie together.
        """
        return cls(heads if heads_contiguous else min(heads, ranks), ranks)

    @property
    def copies(self) -> int:
        """Number of ranks that have the same part."""
        return max(1, self.ranks // self.parts)

    @property
    def writers(self) -> int:
        """Number of ranks that write; each writes the parts that no lower rank has."""
        return self.ranks // self.copies

    def shard(self, rank: int) -> Shard:
        """Return a rank's parts."""
        count = max(1, self.parts // self.ranks)
        return Shard(self.parts, rank // self.copies * count, count)

    def writer(self, rank: int) -> int | None:
        """Return a rank's number among the writers; None if it writes nothing."""
        number, copy = divmod(rank, self.copies)
        return None if copy else number


def heads_are_contiguous(cache_layout: str | None) -> bool:
    """Whether vLLM's cache layout of that name (`KVCacheLayout`: axes from the outermost to the
    innermost, H heads, N tokens) keeps a head's tokens together. False if there is no name."""
    name = cache_layout or ""
    return "H" in name and name.index("H") < name.find("N")

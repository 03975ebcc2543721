"""Into which parts the layers of a block are cut, and which of them each tensor-parallel rank has.

A stored block holds the KV of all ranks of an engine, layer after layer. Each layer is cut into
equal parts, with a checksum a part:

    where the engine's cache keeps    a part is       an engine reads what was written with
    each head's bytes together        a KV head       any tensor-parallel size
    heads between tokens              a rank's share  as many shares

vLLM gives H heads to R ranks in order: rank r has the heads from r H / R on, and where R exceeds H,
head r // (R / H), so that R / H ranks have the same one. Of several ranks that have a part, the
lowest writes it. MLA is the case H = 1. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """What a cache has of each layer: `count` of its `parts`, from `first` on."""

    parts: int = 1
    first: int = 0
    count: int = 1


WHOLE = Held()
"""All of a layer that is one part."""


@dataclass(frozen=True)
class Parts:
    """How many parts a layer has, and how many ranks share them.

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
    def of(cls, heads: int, ranks: int, apart: bool) -> Parts:
        """Of an engine with so many KV heads in all.

        Args:
            apart: each head's bytes of a block and layer lie together.
        """
        return cls(heads if apart else min(heads, ranks), ranks)

    @property
    def copies(self) -> int:
        """Ranks that have the same part."""
        return max(1, self.ranks // self.parts)

    @property
    def writers(self) -> int:
        """Ranks that write: each the parts that no lower rank has."""
        return self.ranks // self.copies

    def held(self, rank: int) -> Held:
        """What a rank has."""
        count = max(1, self.parts // self.ranks)
        return Held(self.parts, rank // self.copies * count, count)

    def writer(self, rank: int) -> int | None:
        """Which of the writers a rank is; None for one that writes nothing."""
        number, copy = divmod(rank, self.copies)
        return None if copy else number


def heads_apart(cache_layout: str | None) -> bool:
    """Whether vLLM's cache layout of that name (`KVCacheLayout`: axes from the outermost to the
    innermost, H heads, N tokens) keeps a head's tokens together. False where none is named."""
    name = cache_layout or ""
    return "H" in name and name.index("H") < name.find("N")

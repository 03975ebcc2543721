"""Runs of a prompt that the KV store can supply: from which tier, and after which wait. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

DRAM, NVME, REMOTE, OBJECT = MEDIA = ("dram", "nvme", "remote", "object")
"""Fastest first. What is remote or in objects comes into DRAM before engines load it."""


class Supply(NamedTuple):
    """A run of a prompt that the store can supply."""

    medium: str
    """One of MEDIA."""
    length: int
    """In blocks as a node says, in tokens as plans take it."""
    wait_s: float = 0.0
    """Predicted seconds until an engine can load them; 0 where it can at once."""


def common(workers: Sequence[Sequence[Supply]]) -> list[Supply]:
    """The leading run that every worker of an engine is supplied with: of each block the slowest
    medium, of each medium the longest wait."""
    waits: dict[str, float] = {}
    for supply in (supply for supplies in workers for supply in supplies):
        waits[supply.medium] = max(supply.wait_s, waits.get(supply.medium, 0.0))
    media = [[s.medium for s in supplies for _ in range(s.length)] for supplies in workers]
    slowest = [max(block, key=MEDIA.index) for block in zip(*media, strict=False)]
    return [Supply(m, len(list(run)), waits[m]) for m, run in groupby(slowest)]

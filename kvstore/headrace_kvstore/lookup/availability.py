"""Runs of a prompt that the KV store can supply, with their tier and their wait. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

DRAM, NVME, REMOTE, OBJECT = MEDIA = ("dram", "nvme", "remote", "object")
"""Media, fastest first. Remote blocks and blocks in objects go into DRAM before engines load
them."""


class AvailableRun(NamedTuple):
    """A run of a prompt that the store can supply."""

    medium: str
    """One of MEDIA."""
    length: int
    """Length of the run: in blocks in a node's answer, in tokens in plans."""
    wait_s: float = 0.0
    """Predicted seconds until an engine can load the run; 0 if it can at once."""


def intersect(workers: Sequence[Sequence[AvailableRun]]) -> list[AvailableRun]:
    """Return the leading run that every worker of an engine is supplied with. Each block has its
    slowest medium, each medium its longest wait."""
    waits: dict[str, float] = {}
    for run in (run for runs in workers for run in runs):
        waits[run.medium] = max(run.wait_s, waits.get(run.medium, 0.0))
    media = [[run.medium for run in runs for _ in range(run.length)] for runs in workers]
    slowest = [max(block, key=MEDIA.index) for block in zip(*media, strict=False)]
    return [AvailableRun(m, len(list(blocks)), waits[m]) for m, blocks in groupby(slowest)]

"""A load of blocks into the engine's cache, while it runs and after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace_engine.connector.loading.arena_source import ArenaSource
from headrace_engine.connector.loading.file_loader import FileLayerSource
from headrace_engine.connector.store_work import BlockLoad


@dataclass
class ActiveLoad:
    """One step's load: which of its blocks comes from which source. The other blocks are missing.

    Attributes:
        blocks: int64 [n, cache groups], ids in the engine's cache, as in `BlockLoad`.
        slots: slots of the blocks in the arena, leased by the scheduler's side.
        parts: sources, with the positions of their blocks.
        files: the one of them that reads files.
    """

    hashes: list[bytes]
    blocks: np.ndarray
    slots: np.ndarray
    parts: list[tuple[np.ndarray, ArenaSource | FileLayerSource]]
    files: FileLayerSource | None = None

    @staticmethod
    def of_nothing(load: BlockLoad) -> ActiveLoad:
        """Return a load none of whose blocks has a source."""
        return ActiveLoad(load.hashes, load.block_ids, np.zeros(0, np.int64), [])


class EndedLoad(NamedTuple):
    """A load that is over.

    Attributes:
        seconds: duration; 0 if the load did not reach its end.
        failed: whether none of its blocks can be used.
    """

    source: ActiveLoad
    seconds: float
    failed: bool

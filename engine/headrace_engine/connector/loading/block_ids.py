"""The block ids of a load, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Rows = slice | np.ndarray
"""Some positions of a load."""
ALL = slice(None)


class BlockIds:
    """Block ids of a load in an engine's cache.

    Args:
        ids: int64 [n, groups], or [n] if there is one; negative where a group has no block, so
            that its layers are not loaded.
        groups: number of each layer's cache group; empty if there is one.
    """

    def __init__(self, ids: np.ndarray, groups: Sequence[int] = ()) -> None:
        self._groups = groups
        self._ids: list[tuple[Rows, np.ndarray]] = []
        for group in ids.T if ids.ndim > 1 else ids[None]:
            is_there = group >= 0
            rows = ALL if is_there.all() else np.flatnonzero(is_there)
            self._ids.append((rows, group[rows]))

    def of_layer(self, layer: int) -> tuple[Rows, np.ndarray]:
        """Return the positions that a layer is loaded for, and their ids."""
        return self._ids[self._groups[layer] if self._groups else 0]

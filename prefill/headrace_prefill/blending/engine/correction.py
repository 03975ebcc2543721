"""Correction of a request's runs in the cache by the drift that their computed rows show.

A layer's fresh K and V are compared with the placed ones before they overwrite them. The estimated
drift (`headrace_prefill.blending.kv_correction`) is added to the run's tokens that this layer never
computes, before the layer's rows attend. If rows come in parts, each part improves the estimate,
and the tokens get the difference. KV at positions whose rows are still to be computed stays as
placed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_engine.rope import Rope
from headrace_prefill.blending.engine.kv_scatter import StoredRun
from headrace_prefill.blending.engine.paged import BlockTable, PagedKV
from headrace_prefill.blending.kv_correction import KvCorrection


class RequestCorrection:
    """The runs of one request, and the estimates of their drift.

    Args:
        kv: the cache. rope: of the model. table: the request's blocks.
        runs: the placed runs.
        depths: int64 [n], number of leading layers that compute each position.
    """

    def __init__(
        self,
        kv: PagedKV,
        rope: Rope,
        table: BlockTable,
        runs: Sequence[StoredRun],
        depths: NDArray[np.int64],
    ) -> None:
        self._runs = [_Run(kv, rope, table, run, depths) for run in runs if run.moved]

    def update(
        self, layer: int, keys: Tensor, values: Tensor, positions: NDArray[np.int64]
    ) -> None:
        """Correct the runs by rows that a layer has computed and not yet written.

        Args:
            keys, values: [rows, kv_heads * head_dim], keys rotated.
            positions: int64 [rows], ascending.
        """
        if not layer:
            return  # K and V of the first layer depend on the token alone
        for run in self._runs:
            part = slice(*np.searchsorted(positions, [run.first, run.end]))
            if part.start < part.stop:
                run.update(layer, keys[part], values[part], positions[part])


class _Run:
    """One run, at positions `first` to `end` - 1."""

    def __init__(
        self, kv: PagedKV, rope: Rope, table: BlockTable, run: StoredRun, depths: NDArray[np.int64]
    ) -> None:
        self.first, self.end = run.new, run.new + run.length
        self._kv, self._table = kv, table
        mine = torch.from_numpy(depths[self.first : self.end]).to(kv.device)
        self._correction = KvCorrection(
            rope, len(kv.caches), kv.kv_heads, kv.head_dim, self.first, mine
        )

    def update(
        self, layer: int, keys: Tensor, values: Tensor, positions: NDArray[np.int64]
    ) -> None:
        at = torch.from_numpy(positions - self.first).to(self._kv.device)
        slots = torch.from_numpy(self._table.slots(positions)).to(self._kv.device)
        placed = self._kv.gather(layer, slots)
        fresh = (one.view_as(placed[0]).float() for one in (keys, values))
        off = (new - old.float() for new, old in zip(fresh, placed, strict=True))
        self._kv.add(layer, self._table, self.first, *self._correction.update(layer, at, *off))

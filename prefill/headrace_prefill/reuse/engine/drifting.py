"""Corrects a request's runs in the cache for the drift that their computed rows show.

A layer's fresh K and V are seen before they are written over what was placed. Tokens of the run
that this layer never computes get what they say (`headrace_prefill.reuse.drift`), before the
layer's rows attend. Where rows come in parts, each part adds to what is known, and tokens get the
difference. What stands where rows are yet to be computed stays as it was placed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_engine.rope import Rope
from headrace_prefill.reuse.drift import Drift
from headrace_prefill.reuse.engine.paged import BlockTable, PagedKV
from headrace_prefill.reuse.engine.placing import StoredRun


class Drifting:
    """The runs of one request.

    Args:
        kv: the cache. rope: of the model. table: the request's blocks.
        runs: that were placed.
        depths: int64 [n], in how many leading layers each position is computed.
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

    def see(self, layer: int, keys: Tensor, values: Tensor, positions: NDArray[np.int64]) -> None:
        """A layer has computed rows and not yet written them.

        Args:
            keys, values: [rows, kv_heads * head_dim], keys rotated.
            positions: int64 [rows], ascending.
        """
        if not layer:
            return  # K and V of the first layer are the token's own
        for run in self._runs:
            part = slice(*np.searchsorted(positions, [run.first, run.end]))
            if part.start < part.stop:
                run.see(layer, keys[part], values[part], positions[part])


class _Run:
    """One run, which reaches from `first` to before `end`."""

    def __init__(
        self, kv: PagedKV, rope: Rope, table: BlockTable, run: StoredRun, depths: NDArray[np.int64]
    ) -> None:
        self.first, self.end = run.new, run.new + run.length
        self._kv, self._table = kv, table
        mine = torch.from_numpy(depths[self.first : self.end]).to(kv.device)
        self._drift = Drift(rope, len(kv.caches), kv.kv_heads, kv.head_dim, self.first, mine)

    def see(self, layer: int, keys: Tensor, values: Tensor, positions: NDArray[np.int64]) -> None:
        at = torch.from_numpy(positions - self.first).to(self._kv.device)
        slots = torch.from_numpy(self._table.slots(positions)).to(self._kv.device)
        placed = self._kv.gather(layer, slots)
        fresh = (one.view_as(placed[0]).float() for one in (keys, values))
        off = (new - old.float() for new, old in zip(fresh, placed, strict=True))
        self._kv.add(layer, self._table, self.first, *self._drift.saw(layer, at, *off))

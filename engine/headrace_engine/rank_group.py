"""Agreement of an engine's tensor-parallel ranks, in host memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup, ReduceOp, all_reduce


@dataclass(frozen=True)
class RankGroup:
    """The ranks of an engine. Each method waits for all of them, so all call it in the same order.

    Attributes:
        group: their process group; None for one rank.
    """

    group: ProcessGroup | None = None

    def union(self, names: Collection[str], among: Sequence[str]) -> set[str]:
        """Return the names that any rank has.

        Args:
            names: this rank's. among: names that count, the same on all ranks.
        """
        flags = torch.tensor([name in names for name in among], dtype=torch.uint8)
        if self.group is not None:
            all_reduce(flags, ReduceOp.MAX, self.group)
        return {name for name, flag in zip(among, flags.tolist(), strict=True) if flag}

    def mean(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the mean over the ranks of values of one shape. All ranks get the same bits."""
        if self.group is None:
            return values
        total = torch.from_numpy(values.copy())
        all_reduce(total, ReduceOp.SUM, self.group)
        mean: NDArray[np.float32] = total.numpy() / np.float32(self.group.size())
        return mean

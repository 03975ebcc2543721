"""Finds the keys of a context again that a head keeps and has moved, all by one vector."""

from __future__ import annotations

import torch
from torch import Tensor


def positions_of(moved: Tensor, keys: Tensor, within: float = 1e-2) -> Tensor:
    """Positions of the context that a head's cells have: int64 [k].

    Args:
        moved: of the cells, fp32 [k, head_dim]. keys: of the context [n, head_dim].
        within: of a key from where it should be.
    """
    at = torch.cdist(moved, keys).argmin(1)
    for _ in range(3):  # most are right at first, and tell how far all have moved
        shift = (moved - keys[at]).median(0).values
        # By products, as is the default, a distance loses half of its digits.
        exact = "donot_use_mm_for_euclid_dist"
        distance, at = torch.cdist(moved - shift, keys, compute_mode=exact).min(1)
    assert distance.max() < within
    return at

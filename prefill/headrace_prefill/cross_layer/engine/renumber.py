"""Renumbering of the blocks that a batch attends to, from 0; blocks that requests share count once.

Only those blocks are then mixed, and the kernel finds the mixed blocks by the new numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def renumbered(table: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the blocks that are read, int64 [n], and a table of their new numbers.

    On a GPU the host waits for n, once a step.

    Args:
        table: blocks of each request, int32 [requests, maximum blocks]; entries after a request's
            last block are arbitrary.
        seq_lens: tokens of each request.
    """
    used = (seq_lens + block_size - 1) // block_size
    read = torch.arange(table.shape[1], device=table.device) < used[:, None]
    blocks, numbers = torch.unique(table[read], return_inverse=True)
    own = torch.zeros_like(table)
    own[read] = numbers.to(own.dtype)
    return blocks.long(), own

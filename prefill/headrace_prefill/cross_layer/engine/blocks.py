"""The mixture of two layers' KV blocks, written to a scratch cache: one pass, one rounding.

    output[i] = first[blocks[i]] * first_weight + last[blocks[i]] * last_weight

Each channel has one weight, so K and V of a block are mixed in the same way, whatever the attention
kernel's order inside a block. Sums are float32.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_kvstore.codec.bitcast import load, narrow, store, widen
from headrace_kvstore.numba_jit import jit

logger = logging.getLogger("headrace.cross_layer")

_BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}


@jit(nogil=True)
def _mix(
    first: Any, last: Any, begins: Any, first_weight: Any, last_weight: Any, output: Any, at: int
) -> None:
    like, size = first_weight[0], len(first_weight)
    for begin in begins:
        for i in range(size):
            a = widen(load(first, begin + i)) * widen(load(first_weight, i))
            b = widen(load(last, begin + i)) * widen(load(last_weight, i))
            store(output, at + i, narrow(np.float32(a + b), like))
        at += size


class Mixer:
    """Mixer of blocks, with as many threads as torch has, into memory the size of a layer's
    cache."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads) if self._threads > 1 else None
        self._memory = torch.empty(0)

    def reserve(self, cache: Tensor, least: int = 0) -> None:
        """Allocate memory for all blocks of a layer's cache, and for at least `least` elements."""
        wanted = max(cache.numel(), least)
        if wanted and (self._memory.dtype != cache.dtype or self._memory.numel() < wanted):
            self._memory = torch.empty(wanted, dtype=cache.dtype)
            logger.info("mixed KV takes %.0f MB beside the KV cache", self._memory.nbytes / 1e6)

    def mix(
        self,
        first: Tensor,
        last: Tensor,
        blocks: NDArray[np.int64],
        first_weight: Tensor,
        last_weight: Tensor,
    ) -> Tensor:
        """Return the mixed blocks [n, *block shape], valid until the next call.

        Args:
            first, last: contiguous caches of two layers, [any, *block shape], in float32, bfloat16
                or float16.
            blocks: [n], numbers of the blocks.
            first_weight, last_weight: [*block shape], in the same dtype.
        """
        size = first_weight.numel()
        self.reserve(first, len(blocks) * size)
        arrays = [_elements(t) for t in (first, last, first_weight, last_weight, self._memory)]
        begins, parts, at = blocks * size, [], 0
        for part in np.array_split(begins, self._threads):
            parts.append((*arrays[:2], part, *arrays[2:], at))
            at += len(part) * size
        if self._pool is None:
            _mix(*parts[0])
        else:
            list(self._pool.map(lambda part: _mix(*part), parts))
        return self._memory[: len(blocks) * size].view(len(blocks), *first.shape[1:])


def _elements(x: Tensor) -> NDArray[Any]:
    """Return the bits of a contiguous tensor's elements, as `codec.bitcast` takes them."""
    return x.view(_BITS[x.dtype]).view(-1).numpy()

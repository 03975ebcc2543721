"""Memory for the blocks that a layer mixes: one layer's KV cache, one for all layers of an engine.

vLLM sizes its KV cache by what is left after a run that computes nothing. In that run as much is
taken for a moment as the mixed blocks will need, so that it is left. Once the cache is there, the
memory is taken for good, still before the first request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger("headrace.fusion")


class Scratch:
    """
    Args:
        layers: that keep KV.
        usable: bytes that weights and KV caches may take of the device, less what is taken now;
            None where vLLM is told the size of its cache.
    """

    def __init__(self, layers: int, usable: Callable[[torch.device], int] | None = None) -> None:
        self._layers, self._usable = layers, usable
        self._memory: Tensor | None = None

    def prepare(self, cache: Tensor, device: torch.device) -> None:
        """Take the memory, or have it counted while there is no cache.

        Args:
            cache: of a storage layer; empty before vLLM has made it.
        """
        if cache.numel():
            self.of(cache)
        elif self._usable is not None:
            torch.empty(self.expected_bytes(device), dtype=torch.uint8, device=device)

    def expected_bytes(self, device: torch.device) -> int:
        """Return one layer's part of what is usable, if each storage layer and this get as much."""
        usable = 0 if self._usable is None else self._usable(device)
        return max(0, usable) // (self._layers + 1)

    def of(self, cache: Tensor) -> Tensor:
        """Return as many elements as a layer's cache has, until the next call."""
        memory = self._memory
        if memory is None or memory.dtype != cache.dtype or memory.numel() < cache.numel():
            memory = self._memory = torch.empty(
                cache.numel(), dtype=cache.dtype, device=cache.device
            )
            logger.info("mixed KV takes %.0f MB beside the KV cache", memory.nbytes / 1e6)
        return memory


def usable_bytes(share: float) -> Callable[[torch.device], int]:
    """Return a function that tells the bytes of a CUDA device that vLLM may still take.

    Args:
        share: `gpu_memory_utilization`.
    """

    def usable(device: torch.device) -> int:
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(share * total) - (total - free - idle)

    return usable

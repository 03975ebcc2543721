"""Memory for mixed blocks, of the size of one layer's KV cache, shared by all layers of an engine.

vLLM sizes its KV cache by the memory that is left after a dummy run. In that run, as much memory as
the mixed blocks will need is allocated for a moment, so that vLLM leaves it free. Once the cache
exists, the memory is allocated permanently, still before the first request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger("headrace.cross_layer")


class Scratch:
    """Memory for mixed blocks on a GPU.

    Args:
        layers: number of layers that keep KV.
        usable: returns the bytes of the device that vLLM may still use; None if vLLM's settings
            give the size of its cache.
    """

    def __init__(self, layers: int, usable: Callable[[torch.device], int] | None = None) -> None:
        self._layers, self._usable = layers, usable
        self._memory: Tensor | None = None

    def prepare(self, cache: Tensor, device: torch.device) -> None:
        """Allocate the memory, or let vLLM count it while there is no cache.

        Args:
            cache: a storage layer's cache; empty before vLLM has made it.
        """
        if cache.numel():
            self.of(cache)
        elif self._usable is not None:
            torch.empty(self.expected_bytes(device), dtype=torch.uint8, device=device)

    def expected_bytes(self, device: torch.device) -> int:
        """Return one part of the usable bytes, if each storage layer and this get equal parts."""
        usable = 0 if self._usable is None else self._usable(device)
        return max(0, usable) // (self._layers + 1)

    def of(self, cache: Tensor) -> Tensor:
        """Return memory with as many elements as a layer's cache, valid until the next call."""
        memory = self._memory
        if memory is None or memory.dtype != cache.dtype or memory.numel() < cache.numel():
            memory = self._memory = torch.empty(
                cache.numel(), dtype=cache.dtype, device=cache.device
            )
            logger.info("mixed KV takes %.0f MB beside the KV cache", memory.nbytes / 1e6)
        return memory


def usable_bytes(share: float) -> Callable[[torch.device], int]:
    """Return a function that returns the bytes of a CUDA device that vLLM may still use.

    Args:
        share: `gpu_memory_utilization`.
    """

    def usable(device: torch.device) -> int:
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(share * total) - (total - free - idle)

    return usable

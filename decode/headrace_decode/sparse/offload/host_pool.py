"""Blocks of host memory for KV that left the engine's cache.

All layers have the same pages. A page lies in host memory byte for byte as in the cache.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.attention.cpu_cache import Ids, pages_of
from headrace_decode.attention.settings import SparseSettings


class HostPool:
    """Blocks of host memory, and which of them are free.

    Args:
        blocks: maximum number of the scheduler's blocks that it holds.
        block_pages: number of pages in a block.
    """

    def __init__(self, blocks: int, block_pages: int) -> None:
        self.block_pages = block_pages
        self.pages = blocks * block_pages
        """Number of all its pages."""
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no request holds."""
        return len(self._free)

    def allocate(self, blocks: int) -> Ids:
        """Allocate so many free blocks; return their pages, int64 [blocks * block_pages].

        Raises:
            MemoryError: fewer blocks are free.
        """
        if blocks > len(self._free):
            raise MemoryError(f"{blocks} blocks of host memory, and {len(self._free)} are free")
        return pages_of([self._free.pop() for _ in range(blocks)], self.block_pages)

    def free(self, pages: Ids) -> None:
        """Free pages that `allocate` returned."""
        self._free += (pages[:: self.block_pages] // self.block_pages).tolist()


def host_blocks(
    specs: dict[str, Any], settings: SparseSettings, config: Any
) -> tuple[int, str | None]:
    """Return the number of blocks that host memory holds; or 0, and why it holds too few.

    Args:
        specs: vLLM's specs of the KV cache, by layer.
        config: the engine's configuration.
    """
    block_bytes = sum(spec.page_size_bytes for spec in specs.values())
    blocks = settings.host_blocks(block_bytes, config.parallel_config.tensor_parallel_size)
    longest = config.model_config.max_model_len
    if blocks * config.cache_config.block_size < longest:
        return 0, f"{settings.offload_gib} GiB do not hold a request of {longest} tokens"
    return blocks, None

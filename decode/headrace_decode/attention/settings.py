"""Settings of sparse attention for an engine, in vLLM's `additional_config`.

    {"headrace_sparse": {"mode": "request", "keep_ratio": 0.1, "page_tokens": 32}}

Both roles of an app get the same settings. `page_tokens` is the block of the attention kernel, and
so determines the layout of the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace_engine.connector.identity.engine_identity import SPARSE_SETTINGS_KEY

GIB = 2**30
PAGE_TOKENS = (16, 32)
"""Kernel blocks that vLLM's CPU attention has an instruction set for."""


@dataclass(frozen=True)
class SparseSettings:
    """Settings of sparse attention for an app.

    Attributes:
        mode: one of `techniques.MODES`.
        keep_ratio: part of the pages that a request attends to if it names none.
        page_tokens: tokens of a page, and of the kernel's block.
        calibration: file of the model's bases. It is not part of the identity of KV, since neither
            summaries nor KV computed with sparse attention leave the engine.
        offload_gib: host memory in GiB for KV that left the cache; 0: no KV leaves it.
    """

    mode: str = "request"
    keep_ratio: float = 0.1
    page_tokens: int = 32
    calibration: str | None = None
    offload_gib: float = 0.0

    def __post_init__(self) -> None:
        if self.page_tokens not in PAGE_TOKENS:
            raise ValueError(f"page_tokens is {self.page_tokens}, must be one of {PAGE_TOKENS}")
        if not 0 <= self.offload_gib < math.inf:
            raise ValueError(f"offload_gib is {self.offload_gib}, must be 0 or more")

    def host_blocks(self, block_bytes: int, ranks: int = 1) -> int:
        """Return the number of blocks that host memory holds.

        Args:
            block_bytes: bytes of a rank's part of a block of the scheduler, in all layers.
            ranks: tensor-parallel ranks of the engine, which have a part of each block.
        """
        return int(self.offload_gib * GIB) // (block_bytes * ranks)

    def additional_config(self) -> dict[str, Any]:
        """Return the entry for the engine's `additional_config`."""
        return {SPARSE_SETTINGS_KEY: asdict(self)}


def settings_of(additional_config: Any) -> SparseSettings | None:
    """Return an engine's settings; None if sparse attention is off.

    Raises:
        TypeError, ValueError: a field is unknown, or its value is invalid.
    """
    settings = (
        additional_config.get(SPARSE_SETTINGS_KEY)
        if isinstance(additional_config, Mapping)
        else None
    )
    return SparseSettings(**settings) if settings else None

"""Resources that sparse attention and compression need on a CUDA GPU: a calibration, memory,
compiled kernels.

Their memory is a part of the memory that vLLM found for the KV cache:

    summaries   for all pages of the cache, used or not, and of host memory
    scratch     for the rows that are computed together, with the longest KV
    offloading  which pages are in slots, and buffers for the pages of a layer
    copies      for one context of the longest length that is scored, fitted and dropped
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace_decode.attention.calibration_file import CalibrationError, ModelShape
from headrace_decode.attention.device_copy import padded
from headrace_decode.attention.page_counts import RECENT, SINKS, page_count
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.refit import FITTED_ROWS, MAX_LOGITS
from headrace_decode.compression.scores import PART_TOKENS
from headrace_decode.compression.scores import ROWS_AT_ONCE as SCORED_ROWS
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.engine.calibration import COMMAND, read_bases
from headrace_decode.sparse.engine.cuda_step import ROWS_AT_ONCE, CudaLayer
from headrace_decode.sparse.engine.sparse_rows import SparseRows
from headrace_decode.sparse.kernels.attention import DecodeRows, attend
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.page_selection import MAX_PAGES
from headrace_decode.sparse.kernels.summaries import DeviceSummaries
from headrace_decode.sparse.offload.device_memory import (
    BUFFERS,
    RESIDENCY_BYTES,
    DeviceTieredMemory,
)
from headrace_decode.sparse.offload.device_rows import warm
from headrace_decode.sparse.offload.host_pool import HostPool
from headrace_decode.sparse.summaries import RANK_BESIDE
from headrace_decode.sparse.summary_layout import SummaryLayout
from headrace_engine.vllm.attention.cuda import register_cuda_backend, unsupported_cuda_engine
from headrace_engine.vllm.attention.layers import kv_heads_of_worker, model_fields
from headrace_engine.vllm.attention.paged_kernels import (
    SEGMENTS,
    triton_attention,
    triton_causal_attention,
)

BACKEND = "headrace_decode.attention_backend.cuda.SparseBackend"
SCORE_BYTES = 40
"""Bytes of a score with its ranks and flags, while tokens are chosen."""
STEP_PAGES = 4096
"""Number of pages that a step summarises in all layers, beside those that its own tokens fill."""


def unsupported_engine(config: Any, page_tokens: int) -> str | None:
    """Return why the backend does not work in an engine; None if it works."""
    return unsupported_cuda_engine(config, page_tokens, MAX_PAGES)


def register_backend(config: Any) -> None:
    """Install the backend in an engine whose model is not loaded yet."""
    register_cuda_backend(config, BACKEND)


def compression_bytes(config: Any, specs: Mapping[str, Any], keep_ratio: float) -> int:
    """Return the bytes that one context of the engine's longest length takes while it is scored,
    fitted and dropped.

    Args:
        specs: vLLM's specs of the KV cache, by layer. keep_ratio: part of it that is kept.
    """
    model, layers, spec = config.model_config, len(specs), next(iter(specs.values()))
    tokens, kv_heads, dim = model.max_model_len, spec.num_kv_heads, spec.head_size
    heads = model.get_num_attention_heads(config.parallel_config)
    element = spec.page_size_bytes // (2 * spec.block_size * kv_heads * dim)
    kept = int(keep_ratio * tokens) * layers * kv_heads * 2 * dim * element
    queries = 3 * PART_TOKENS * layers * heads * dim * element
    scores = SCORE_BYTES * tokens * layers * kv_heads
    of_layer = tokens * kv_heads * dim * (2 * element + 3 * 4)
    scored = tokens * SCORED_ROWS * kv_heads
    fitted = max(MAX_LOGITS, tokens * FITTED_ROWS * heads // kv_heads)
    return kept + queries + scores + of_layer + 3 * 4 * (scored + fitted)


def compile_compression(head_pages: HeadPages, heads: int) -> None:
    """Run the kernels of compressed rows once. Page 0 is vLLM's null block.

    Args:
        heads: number of the worker's query heads.
    """
    keys, values = head_pages.kernel
    ints = {"dtype": torch.int32, "device": head_pages.device}
    shape = 2, heads // head_pages.kv_heads, keys.shape[-1]
    query = torch.zeros(shape, dtype=keys.dtype, device=head_pages.device)
    table, output = torch.zeros((2, 16), **ints), torch.empty_like(query)
    for starts in ([0, 1, 2], [0, 2]):
        lengths, most = torch.full((len(starts) - 1,), 2, **ints), 4 - len(starts)
        begins = torch.tensor(starts, **ints)
        triton_causal_attention(
            *(query, keys, values, output, begins, lengths, table[: len(lengths)]),
            *(most, head_pages.page_tokens, 1.0),
        )


@dataclass(frozen=True)
class CudaSparseRuntime:
    """Sparse attention of one engine on a CUDA GPU.

    Attributes:
        bases: basis of each layer, of the worker's KV heads.
        page_tokens: tokens of a page.
        heads: number of the worker's query heads.
        max_pages: maximum pages of a request.
    """

    bases: list[Basis]
    page_tokens: int
    heads: int
    max_pages: int

    @classmethod
    def of(
        cls, config: Any, settings: SparseSettings
    ) -> tuple[CudaSparseRuntime | None, str | None]:
        """Return the sparse attention of an engine that has the backend, or why no row is
        sparse."""
        if settings.mode == "off":
            return None, "techniques.sparse is off"
        if settings.calibration is None:
            return None, (
                "kernels for GPUs need a basis: set techniques.sparse.calibration, the file that "
                f"`{COMMAND}` makes"
            )
        try:
            shape = ModelShape.of(model_fields(config))
            bases = read_bases(Path(settings.calibration), shape, settings.page_tokens)
        except CalibrationError as error:
            return None, f"techniques.sparse.calibration: {settings.calibration}: {error}"
        own = kv_heads_of_worker(config, shape.kv_heads)
        heads = shape.heads // config.parallel_config.tensor_parallel_size
        most = page_count(config.model_config.max_model_len, settings.page_tokens)
        return cls([one.of_heads(own) for one in bases], settings.page_tokens, heads, most), None

    def rows(self) -> SparseRows:
        """Return the object that decides which rows are sparse; its work is counted in pages."""
        return SparseRows(1, self.page_tokens, STEP_PAGES)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scores, and of parts of attention that are combined at the end, in fp32."""
        dim = self.bases[0].into.shape[1]
        return 4 * ROWS_AT_ONCE * self.heads * (padded(self.max_pages) + SEGMENTS * (dim + 2))

    @property
    def _summary_bytes(self) -> int:
        """Bytes of a page's summaries in one layer, with their sums."""
        kv_heads, dim, rank = self.bases[0].into.shape
        return kv_heads * (SummaryLayout(self.page_tokens, dim, RANK_BESIDE, rank).nbytes + 8)

    def offload_bytes(self, spec: Any, host_pages: int) -> int:
        """Return the bytes that pages of host memory take on the GPU; 0 if there are none.

        Args:
            spec: vLLM's spec of a layer's cache. host_pages: number of these pages.
        """
        if not host_pages:
            return 0
        kv_heads = self.bases[0].into.shape[0]
        page = self._summary_bytes + kv_heads * RESIDENCY_BYTES["host_page"]
        rows = 4 * ROWS_AT_ONCE * padded(self.max_pages) * (4 * kv_heads + 4)
        buffers = BUFFERS * self.max_pages * spec.page_size_bytes
        return len(self.bases) * host_pages * page + rows + buffers

    def cache_bytes(self, available: int, spec: Any, host_pages: int = 0) -> int:
        """Return the bytes that are left to the KV cache.

        Args:
            available: bytes that vLLM found for it.
            spec, host_pages: as for `offload_bytes`.

        Raises:
            RuntimeError: offloading leaves none.
        """
        ours = self._summary_bytes * spec.block_size // self.page_tokens
        if host_pages:
            ours += self.bases[0].into.shape[0] * RESIDENCY_BYTES["block"]
        page, offload = spec.page_size_bytes, self.offload_bytes(spec, host_pages)
        left = max(available - self.scratch_bytes, 0)
        if offload and offload >= left:
            raise RuntimeError(
                f"techniques.sparse.offload_gib: {host_pages} pages in host memory take "
                f"{offload / 1e9:.1f} GB of the GPU, which has {left / 1e9:.1f} GB for them and "
                "the KV cache. Lower offload_gib or max_model_len"
            )
        return (left - offload) * page // (page + ours)

    def bind(
        self, modules: list[Any], pinned: torch.Tensor | None = None, host_pages: int = 0
    ) -> tuple[int, DeviceTieredMemory | None]:
        """Give each layer's attention its summaries, and compile the kernels. Return the bytes of
        the summaries, and the memory of offloaded requests.

        Args:
            modules: vLLM's attention module of each layer, with its KV cache.
            pinned, host_pages: host memory for KV that leaves the cache, and pages in it; None if
                no KV does.

        Raises:
            ValueError: the kernels cannot read a KV cache of this form.
        """
        made = []
        for module, basis in zip(modules, self.bases, strict=True):
            kv = module.kv_cache
            cache = HeadCache.of(kv)
            if cache.page_tokens != self.page_tokens:
                raise ValueError(f"its blocks have {cache.page_tokens} tokens")
            capacity = len(kv) + host_pages
            made.append(DeviceSummaries(capacity, self.page_tokens, basis, str(kv.device)))
            module.impl.sparse = CudaLayer(made[-1], cache, len(made) - 1)
        caches = [module.kv_cache for module in modules]
        self._compile(modules[0].impl.sparse, caches[0])
        memory = None
        if pinned is not None:
            memory = DeviceTieredMemory(
                caches, made, HostPool(host_pages, 1), pinned, self.max_pages
            )
            warm(memory, padded(self.max_pages))
        return sum(each.nbytes for each in made), memory

    def _compile(self, layer: CudaLayer, kv: torch.Tensor) -> None:
        """Run each kernel once, and the choice with each size that a request may have.

        Block 0 is vLLM's null block, which belongs to no request.
        """
        ints = {"dtype": torch.int32, "device": kv.device}
        layer.summaries.refresh(layer.cache, torch.zeros(1, dtype=torch.int64, device=kv.device))
        query = torch.zeros((1, self.heads, layer.cache.head_dim), dtype=kv.dtype, device=kv.device)
        width = 16
        while True:
            width = min(width, padded(self.max_pages))
            rows = DecodeRows(
                pages=torch.zeros((1, width), **ints),
                counts=torch.full((1,), SINKS + RECENT, **ints),
                chosen=torch.full((1,), SINKS + RECENT, **ints),
                newest=torch.zeros(1, **ints),
                fill=torch.ones(1, **ints),
                most=16,
            )
            attend(layer.summaries, layer.cache, query, rows, 1.0, triton_attention)
            if width == padded(self.max_pages):
                return
            width *= 2

"""vLLM's CPU attention backends over a paged cache, dense and sparse, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from headrace_decode.attention.batch import BatchRow
from headrace_decode.attention.cpu_cache import LayerCache
from headrace_decode.attention_backend.cpu import SparseBackend, SparseImpl
from headrace_decode.attention_backend.runtime import RUNTIME, AttentionRuntime
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.engine.attention import SparseLayer
from headrace_decode.sparse.engine.page_summary_table import PageSummaryTable
from headrace_decode.sparse.engine.sparse_rows import SparseRows
from headrace_decode.sparse.offload.offloaded_requests import OffloadedRequests
from headrace_engine.vllm.attention.layers import CommonAttentionMetadata

SCHEDULER_TOKENS = 128
"""Tokens of the scheduler's block, which is allocated as a whole."""
LAYER: Any = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0, isa="")


@dataclass(frozen=True)
class Shape:
    """Shape of a model's attention."""

    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        """Scale of the logits."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class Request:
    """One request's KV and this step's queries.

    Attributes:
        keys, values: [tokens, kv_heads, head_dim], those of the queries included.
        queries: [n, heads, head_dim], of its last n tokens.
        share: of pages; None for an exact request.
        prompt_tokens: of its prompt.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    share: float | None = None
    prompt_tokens: int = 0


class Rig:
    """A backend of one kind over one cache of one layer.

    Args:
        shape: of the attention.
        block_tokens: of the kernel's block.
        sparse: the sparse backend; vLLM's own otherwise.
        blocks: of the cache.
        seed: of the order in which blocks are handed out.
        basis: of the layer, for a sparse backend.

    Attributes:
        offloading: of requests that are offloaded; request `n` of a batch is named "n".
    """

    offloading: OffloadedRequests[Any] | None = None

    def __init__(
        self,
        shape: Shape,
        block_tokens: int,
        sparse: bool,
        blocks: int,
        seed: int = 0,
        basis: Basis | None = None,
    ) -> None:
        self.shape, self.block_tokens, self._sparse = shape, block_tokens, sparse
        backend = SparseBackend if sparse else CPUAttentionBackend
        spec: Any = SimpleNamespace(
            num_kv_heads=shape.kv_heads, head_size=shape.head_dim, block_size=block_tokens
        )
        model = SimpleNamespace(
            dtype=shape.dtype, get_num_attention_heads=lambda parallel: shape.heads
        )
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            model_config=model,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        self.builder = backend.get_builder_cls()(spec, [], config, torch.device("cpu"))
        impl_cls = backend.get_impl_cls()
        with set_current_vllm_config(config):
            self.impl: CPUAttentionBackendImpl = impl_cls(
                *(shape.heads, shape.head_dim, shape.scale, shape.kv_heads),
                *(None, None, "auto"),
            )
        cache = blocks, shape.kv_heads, block_tokens, 2 * shape.head_dim
        order = torch.Generator().manual_seed(seed)
        self.cache = (3 * torch.randn(cache, generator=order)).to(shape.dtype)  # as others left it
        parts = SCHEDULER_TOKENS // block_tokens
        whole = 1 + torch.randperm(blocks // parts - 1, generator=order)
        self._free = (whole[:, None] * parts + torch.arange(parts)).flatten()
        self._taken = 0
        if sparse:
            self._bind(basis)

    def _bind(self, basis: Basis | None) -> None:
        """Bind the layer to its summaries, as the worker does."""
        assert isinstance(self.impl, SparseImpl)
        keys = LayerCache(self.cache)
        self.summary_table = PageSummaryTable([keys], None if basis is None else [basis])
        self.impl.sparse = SparseLayer(keys, self.summary_table.summaries[0])
        self.rows = SparseRows(1, self.block_tokens)

    def write(self, keys: Tensor, values: Tensor) -> Tensor:
        """Put a request's KV into fresh blocks; its table, int32 [blocks]."""
        tokens = len(keys)
        count, parts = -(-tokens // self.block_tokens), SCHEDULER_TOKENS // self.block_tokens
        blocks = self._free[self._taken : self._taken + count]
        assert len(blocks) == count, "too few blocks"
        self._taken += -(-count // parts) * parts
        self.overwrite(blocks, keys, values)
        return blocks.to(torch.int32)

    def overwrite(self, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put KV into these blocks."""
        at = torch.arange(len(keys))
        slots = blocks[at // self.block_tokens].long() * self.block_tokens + at % self.block_tokens
        kv = self.cache.view(len(self.cache), self.shape.kv_heads, 2 * self.block_tokens, -1)
        to_keys, to_values = kv.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, to_keys, to_values, slots, self.builder.isa)

    def common(self, batch: Sequence[Request], tables: Sequence[Tensor]) -> Any:
        """vLLM's description of a step."""
        starts = np.concatenate([[0], np.cumsum([len(each.queries) for each in batch])])
        lengths = torch.tensor([len(each.keys) for each in batch], dtype=torch.int32)
        table = torch.zeros(len(batch), max(map(len, tables)), dtype=torch.int32)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = blocks
        begins = torch.from_numpy(starts.astype(np.int32))
        return CommonAttentionMetadata(
            query_start_loc=begins,
            query_start_loc_cpu=begins,
            seq_lens=lengths,
            num_reqs=len(batch),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(len(each.queries) for each in batch),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        )

    def metadata(self, batch: Sequence[Request], common: Any) -> CPUAttentionMetadata:
        """Return the builder's metadata of a step, as in an engine's step."""
        if not self._sparse:
            return self.builder.build(0, common)
        RUNTIME.bind(
            self.rows,
            lambda: [BatchRow(str(n), s.share, s.prompt_tokens) for n, s in enumerate(batch)],
            self.summary_table,
        )
        RUNTIME.page_tokens, RUNTIME.offloading = self.block_tokens, self.offloading
        RUNTIME.in_step = True
        try:
            return self.builder.build(0, common)
        finally:
            RUNTIME.in_step = False
            RUNTIME.__dict__.update(AttentionRuntime().__dict__)

    def forward(self, query: Tensor, metadata: CPUAttentionMetadata) -> Tensor:
        """One layer's attention."""
        output = torch.empty_like(query)
        LAYER.isa = self.builder.isa
        self.impl.forward(LAYER, query, query, query, self.cache, metadata, output)
        return output

    def step(self, batch: Sequence[Request], tables: Sequence[Tensor] = ()) -> Tensor:
        """Write a batch's KV, unless it has tables, and compute its attention."""
        tables = tables or [self.write(each.keys, each.values) for each in batch]
        metadata = self.metadata(batch, self.common(batch, tables))
        return self.forward(torch.cat([each.queries for each in batch]), metadata)


def random_sequence(
    shape: Shape, tokens: int, queries: int = 1, share: float | None = None, seed: int = 0
) -> Request:
    """KV of random walks, so that tokens next to each other have keys alike."""
    rng = torch.Generator().manual_seed(seed)
    steps = torch.randn(tokens, shape.kv_heads, shape.head_dim, generator=rng)
    slow = torch.nn.functional.avg_pool1d(steps.permute(1, 2, 0), 33, stride=1, padding=16).permute(
        2, 0, 1
    )
    keys = (6 * slow + 0.5 * steps).to(shape.dtype).contiguous()
    values = torch.randn(tokens, shape.kv_heads, shape.head_dim, generator=rng).to(shape.dtype)
    query = torch.randn(queries, shape.heads, shape.head_dim, generator=rng).to(shape.dtype)
    return Request(keys, values, query, share, 0)

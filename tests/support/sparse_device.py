"""The sparse backend for GPUs beside vLLM's own Triton backend, without an engine, on any device;
and what must hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from benchmarks.sparse.backend import Request, Shape, random_sequence
from headrace_decode.attention import page_counts
from headrace_decode.attention.batch import BatchRow
from headrace_decode.attention.page_counts import RECENT, SINKS, selected_page_count
from headrace_decode.attention_backend.cuda import SparseBackend
from headrace_decode.attention_backend.runtime import RUNTIME, AttentionRuntime
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.engine.cuda_step import CudaLayer
from headrace_decode.sparse.engine.sparse_rows import SparseRows
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.summaries import DeviceSummaries
from headrace_decode.sparse.offload.offloaded_requests import OffloadedRequests
from headrace_decode.sparse.page_scores import score_pages
from headrace_decode.sparse.page_selection import select_pages
from headrace_decode.sparse.summaries import Summaries
from headrace_engine.vllm.attention import paged_kernels
from headrace_lab.sparse.moments import Moments

SHAPE = Shape(4, 2, 32, torch.float32)
PAGE, LEAST, LONG = 16, 100, 170
"""Tokens: of a page, of KV from which rows are sparse here, of a long row. The interpreter is
slow."""
HND, NHD = (0, 1, 2, 3), (0, 2, 1, 3)
LAYER: Any = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1), _q_scale=torch.ones(1))


def use_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short rows be sparse, and attention have few parts."""
    monkeypatch.setattr(page_counts, "MIN_TOKENS", LEAST)
    monkeypatch.setattr(paged_kernels, "SEGMENTS", 2)
    monkeypatch.setattr(triton_attn, "NUM_PAR_SOFTMAX_SEGMENTS", 2)


def a_basis(shape: Shape = SHAPE, rank: int = 12) -> Basis:
    moments = Moments(shape.kv_heads, shape.head_dim)
    rng = torch.Generator().manual_seed(9)
    moments.add_queries(torch.randn(shape.kv_heads, 300, shape.head_dim, generator=rng).numpy())
    keys = random_sequence(shape, 640, seed=9).keys.float()
    moments.add_pages(keys.unflatten(0, (-1, PAGE)).transpose(1, 2).contiguous().numpy())
    return moments.basis(rank)


class Rig:
    """A backend over one cache of one layer, whose blocks lie in no order.

    Args:
        sparse: ours; vLLM's own otherwise.
        order: of the cache's axes in memory.
        step_pages: that a step may summarise.

    Attributes:
        offloading: of requests that are offloaded; request `n` of a batch is named "n".
    """

    offloading: OffloadedRequests[Any] | None = None

    def __init__(
        self,
        sparse: bool,
        device: str = "cpu",
        shape: Shape = SHAPE,
        blocks: int = 80,
        order: tuple[int, ...] = NHD,
        step_pages: int = 10_000,
    ) -> None:
        self.shape, self.sparse, self.device = shape, sparse, device
        RUNTIME.page_tokens = PAGE
        backend: Any = SparseBackend if sparse else TritonAttentionBackend
        spec: Any = SimpleNamespace(block_size=PAGE)
        model = SimpleNamespace(
            get_num_attention_heads=lambda parallel: shape.heads,
            get_num_kv_heads=lambda parallel: shape.kv_heads,
            get_head_size=lambda: shape.head_dim,
            rswa_window=None,
        )
        config: Any = SimpleNamespace(
            model_config=model,
            parallel_config=None,
            compilation_config=SimpleNamespace(cudagraph_mode=None, static_forward_context={}),
        )
        self.builder = backend.get_builder_cls()(spec, [], config, torch.device(device))
        given = (shape.heads, shape.head_dim, shape.scale, shape.kv_heads)
        self.impl = backend.get_impl_cls()(*given, None, None, "auto")
        rng = torch.Generator().manual_seed(5)
        size = (blocks, shape.kv_heads, PAGE, 2 * shape.head_dim)
        left = (3 * torch.randn(size, generator=rng)).permute(order).contiguous()
        back = [order.index(axis) for axis in range(4)]
        self.cache = left.to(device, shape.dtype).permute(back)  # as others left it
        self._free = (1 + torch.randperm(blocks - 1, generator=rng)).tolist()
        self.basis = a_basis(shape)
        self.rows = SparseRows(1, PAGE, step_pages)
        if sparse:
            summaries = DeviceSummaries(blocks, PAGE, self.basis, device)
            self.impl.sparse = CudaLayer(summaries, HeadCache.of(self.cache), 0)

    def write(self, one: Request) -> list[int]:
        """Put a request's KV into fresh blocks; its table."""
        table = [self._free.pop() for _ in range(-(-len(one.keys) // PAGE))]
        self.overwrite(table, one)
        return table

    def overwrite(self, table: Sequence[int], one: Request) -> None:
        for page, block in enumerate(table):
            mine = slice(page * PAGE, (page + 1) * PAGE)
            both = torch.cat([one.keys[mine], one.values[mine]], -1).transpose(0, 1)
            self.cache[block, :, : both.shape[1]] = both.to(self.device)

    def metadata(self, batch: Sequence[Request], tables: Sequence[Sequence[int]]) -> Any:
        """What the builder makes of a step, as within one of the engine."""
        starts = np.concatenate([[0], np.cumsum([len(one.queries) for one in batch])])
        begins = torch.from_numpy(starts.astype(np.int32))
        lengths = torch.tensor([len(one.keys) for one in batch], dtype=torch.int32)
        table = torch.zeros(len(batch), max(map(len, tables)) + 3, dtype=torch.int32)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = torch.tensor(blocks)
        common = CommonAttentionMetadata(
            query_start_loc=begins.to(self.device),
            query_start_loc_cpu=begins,
            seq_lens=lengths.to(self.device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(batch),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(len(one.queries) for one in batch),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        )
        given = common.block_table_tensor.clone(), common.seq_lens.clone()
        RUNTIME.bind(
            self.rows,
            lambda: [BatchRow(str(n), s.share, s.prompt_tokens) for n, s in enumerate(batch)],
        )
        RUNTIME.page_tokens, RUNTIME.in_step = PAGE, True
        RUNTIME.offloading = self.offloading
        try:
            made = self.builder.build(0, common)
        finally:
            RUNTIME.__dict__.update(AttentionRuntime().__dict__)
        assert torch.equal(given[0], common.block_table_tensor), "vLLM's tables are not ours"
        assert torch.equal(given[1], common.seq_lens), "nor are its lengths"
        return made

    def forward(self, batch: Sequence[Request], metadata: Any) -> Tensor:
        """One layer's attention."""
        query = torch.cat([one.queries for one in batch]).to(self.device)
        output = torch.full_like(query, torch.nan)
        layer = SimpleNamespace(**{k: v.to(self.device) for k, v in vars(LAYER).items()})
        self.impl.forward(layer, query, query, query, self.cache, metadata, output)
        return output.cpu()

    def step(self, batch: Sequence[Request], tables: Sequence[Sequence[int]] = ()) -> Tensor:
        """Write a batch's KV, unless it has tables, and compute its attention."""
        tables = tables or [self.write(one) for one in batch]
        return self.forward(batch, self.metadata(batch, tables))


def sequence(
    tokens: int = LONG, share: float | None = None, queries: int = 1, seed: int = 0
) -> Any:
    return random_sequence(SHAPE, tokens, queries, share, seed)


def reference(one: Request, basis: Basis, shape: Shape = SHAPE) -> Tensor:
    """Exact attention of the last token to the pages that the CPU's code chooses, in float64."""
    n, group = len(one.keys), shape.heads // shape.kv_heads
    full = (n - 1) // PAGE
    assert one.share is not None
    chosen = selected_page_count(n, PAGE, one.share)
    assert chosen is not None
    summaries = Summaries(full, shape.kv_heads, PAGE, shape.head_dim, basis=basis)
    by_page = one.keys[: full * PAGE].unflatten(0, (full, PAGE)).transpose(1, 2)
    summaries.put(np.arange(full), by_page.contiguous())
    query = one.queries[-1].view(shape.kv_heads, group, shape.head_dim)
    scores = score_pages(summaries, np.arange(full), query.float().numpy(), shape.scale)
    taken = torch.from_numpy(select_pages(scores, chosen - 1, SINKS, RECENT - 1))
    found = torch.empty(shape.heads, shape.head_dim, dtype=torch.float64)
    for head in range(shape.heads):
        kv = head // group
        at = (
            torch.cat([taken[kv], torch.tensor([full])])[:, None] * PAGE + torch.arange(PAGE)
        ).flatten()
        at = at[at < n]
        keys, values = one.keys[at, kv].double(), one.values[at, kv].double()
        logits = keys @ one.queries[-1, head].double() * shape.scale
        found[head] = logits.softmax(0) @ values
    return found


def mixed() -> list[Request]:
    """Rows of which some are sparse."""
    return [
        sequence(LONG, 0.3, seed=1),
        sequence(120, None, seed=2),
        sequence(130, 0.2, queries=19, seed=3),  # of a prompt, or with a draft
        sequence(LEAST - 1, 0.2, seed=4),
        sequence(144, 0.5, seed=5),  # a whole number of pages
    ]


SPARSE = (0, 4)


def check_mixed(device: str, order: tuple[int, ...], within: float, prompts: bool) -> None:
    """Exact rows are vLLM's to the bit; sparse ones attend exactly to the pages that the CPU's code
    chooses. Blocks are not edited.

    Args:
        prompts: whether the batch has a row of several tokens, for which vLLM takes another kernel.
    """
    batch = [one for one in mixed() if prompts or len(one.queries) == 1]
    sparse = [number - (number > 2 and not prompts) for number in SPARSE]
    ours, theirs = Rig(True, device, order=order), Rig(False, device, order=order)
    tables = [ours.write(one) for one in batch]
    assert tables == [theirs.write(one) for one in batch]
    before = ours.cache.clone()
    metadata = ours.metadata(batch, tables)
    assert metadata.vllms and metadata.sparse.count == len(sparse)
    assert metadata.seq_lens[sparse].tolist() == [1] * len(sparse)
    found, plain = ours.forward(batch, metadata), theirs.step(batch, tables)
    assert torch.equal(before, ours.cache)
    first = 0
    for number, one in enumerate(batch):
        mine = slice(first, first := first + len(one.queries))
        if number in sparse:
            wanted = reference(one, ours.basis)
            torch.testing.assert_close(found[mine][0].double(), wanted, rtol=0, atol=within)
            assert not torch.allclose(found[mine], plain[mine], rtol=0, atol=within)
        else:
            assert torch.equal(found[mine], plain[mine]), number


def check_shared_blocks(device: str, within: float) -> None:
    """Two requests over the same blocks attend as each alone, sparse and exact side by side."""
    one = sequence(LONG, 0.4, seed=1)
    rng = torch.Generator().manual_seed(3)
    other = Request(one.keys, one.values, torch.randn(1, 4, 32, generator=rng), 0.5)
    exact = Request(one.keys, one.values, other.queries)
    rig, plain = Rig(True, device), Rig(False, device)
    table, same = rig.write(one), plain.write(one)
    before = rig.cache.clone()
    found = rig.step([one, exact, other], [table] * 3)
    assert torch.equal(before, rig.cache)
    assert torch.equal(found[1], plain.step([one, exact, other], [same] * 3)[1])
    for row, each in ((0, one), (2, other)):
        wanted = reference(each, rig.basis)
        torch.testing.assert_close(found[row].double(), wanted, rtol=0, atol=within)


def check_overwritten_blocks(device: str, within: float) -> None:
    """A block in which another request's KV stands has a summary of that KV."""
    first, second = sequence(LONG, 0.4, seed=1), sequence(LONG, 0.4, seed=2)
    rig = Rig(True, device)
    table = rig.write(first)
    rig.step([first], [table])
    rig.rows.begin_step({"0"})
    rig.overwrite(table, second)
    dense = rig.step([second], [table])
    rig.rows.begin_step(set())
    found = rig.step([second], [table])
    wanted = reference(second, rig.basis)
    torch.testing.assert_close(found[0].double(), wanted, rtol=0, atol=within)
    assert not torch.allclose(dense, found, rtol=0, atol=within), "KV was on its way in that step"

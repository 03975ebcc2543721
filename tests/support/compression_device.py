"""Compression over a KV cache as GPUs have it, on any device, and what must hold of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_decode.attention.batch import BatchRow
from headrace_decode.compression.engine.compressed_attention import (
    CompressedRow,
    CompressedStep,
    RetainedPages,
)
from headrace_decode.compression.engine.compression_worker import CompressionWorker
from headrace_decode.compression.engine.context_scorer import RereadRows
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.engine.metadata import CompressionMetadata, FitWork, Retention
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_decode.compression.selection import select_token_pages
from headrace_engine.kv_views import KvOrder
from headrace_engine.rope import Rope

LAYERS, HEADS, KV_HEADS, DIM, PAGE = 2, 4, 2, 32, 16
SCALE = DIM**-0.5
ROPE = Rope.of({"rope_theta": 10000.0, "num_attention_heads": 1, "head_dim": DIM})
LAYOUTS = "LBHNC", "LBNHC", "BLHNC"
"""Order of layers, blocks, heads and tokens in memory, as vLLM names it."""


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def head_pages_of(
    layout: str, blocks: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> HeadPages:
    """A cache in this layout, whose blocks are pages."""
    sizes = {"L": LAYERS, "B": blocks, "H": KV_HEADS, "N": PAGE, "C": 2 * DIM}
    memory = torch.randn([sizes[axis] for axis in layout], generator=rng(0))
    caches = memory.to(device, dtype).permute([layout.index(axis) for axis in "LBHNC"])
    return HeadPages(list(caches), 1, KvOrder.JOINED)


def random_kv(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """K and V, each [layers, kv_heads, tokens, dim]."""
    keys, values = torch.randn(2, LAYERS, KV_HEADS, tokens, DIM, generator=rng(seed))
    return keys, values


def write(head_pages: HeadPages, blocks: Sequence[int], keys: Tensor, values: Tensor) -> None:
    """Put a request's KV into blocks."""
    room = len(blocks) * PAGE - keys.shape[2]
    dtype = head_pages.kernel[0].dtype
    filled = [
        torch.nn.functional.pad(one, (0, 0, 0, room)).to(head_pages.device, dtype)
        for one in (keys, values)
    ]
    at = head_pages.number(head_pages.pages(blocks))
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            head_pages.write(at[layer, head], *(one[layer, head] for one in filled))


@dataclass(frozen=True)
class Asking:
    """A row of a step.

    Attributes:
        context: pages of its context. kept: of these, how many per head on average.
        behind: tokens after the context, `queries` among them.
    """

    context: int
    kept: int
    behind: int
    queries: int


def check_attention(
    rows: Sequence[Asking],
    layout: str,
    kernel: Callable[..., None],
    within: float,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Rows attend exactly to what each head keeps and to all after it; no other row is written."""
    sizes = [row.context + -(-row.behind // PAGE) for row in rows]
    total = 1 + sum(sizes) + sum(row.kept for row in rows)
    head_pages = head_pages_of(layout, total, device, dtype)
    free = (1 + torch.randperm(total - 1, generator=rng(1))).tolist()
    tables = torch.zeros(2 * len(rows), max(sizes) + 3, dtype=torch.int32, device=device)
    made, expected, at = [], [], 0
    count = sum(row.queries for row in rows) + len(rows)
    asked = torch.randn(count, HEADS, DIM, generator=rng(2)).to(dtype)
    for number, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        blocks = [free.pop() for _ in range(size)]
        room = [free.pop() for _ in range(row.kept)]
        tokens = row.context * PAGE
        keys, values = (
            one.to(dtype).float() for one in random_kv(tokens + row.behind, seed=9 + number)
        )
        write(head_pages, blocks, keys, values)
        scores = torch.rand(LAYERS, KV_HEADS, tokens, generator=rng(number))
        scores[0, 0] *= 3  # heads keep different numbers of pages
        kept = select_token_pages(scores, row.kept * head_pages.in_block, PAGE)
        kept_kv = (
            [
                tuple(one[layer, head, :tokens][kept[layer, head]].to(device, dtype) for one in kv)
                for head in range(KV_HEADS)
            ]
            for layer, kv in ((layer, (keys, values)) for layer in range(LAYERS))
        )
        to: Any = head_pages.of_blocks(room)
        held = RetainedPages.of(tokens, kept.to(device), kept_kv, to, head_pages)  # type: ignore[arg-type]
        for block in blocks[: row.context]:  # others write there
            write(head_pages, [block], *torch.full((2, LAYERS, KV_HEADS, PAGE, DIM), 1e3))
        mine = slice(at, at + row.queries)
        place = 2 * number  # a row of others stands between
        tables[place, :size] = torch.tensor(blocks)
        made.append(CompressedRow(place, mine, tokens + row.behind, held, slice(row.context, size)))
        stays = torch.cat([kept, torch.ones(LAYERS, KV_HEADS, row.behind, dtype=torch.bool)], -1)
        expected.append((mine, keys, values, stays))
        at = mine.stop + 1
    step = CompressedStep(made, tables, head_pages, kernel)
    for layer in range(LAYERS):
        output = torch.full_like(asked, torch.nan).to(device)
        step.attend(layer, asked.to(device), output, SCALE)
        found = output.cpu()
        for mine, keys, values, stays in expected:
            wanted = naive(asked[mine], keys[layer], values[layer], stays[layer])
            torch.testing.assert_close(found[mine].double(), wanted, rtol=0, atol=within)
            assert found[mine.stop].isnan().all()


def naive(queries: Tensor, keys: Tensor, values: Tensor, stays: Tensor) -> Tensor:
    """Attention of a request's last tokens [n, heads, dim] to the tokens that stay, in float64.

    Args:
        keys, values: [kv_heads, tokens, dim]. stays: bool [kv_heads, tokens].
    """
    count, tokens = len(queries), keys.shape[1]
    of_head = queries.double().unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
    logits = of_head @ keys.double().transpose(1, 2)[:, None] * SCALE
    positions = torch.arange(tokens - count, tokens)[:, None]
    seen = stays[:, None, None] & (torch.arange(tokens) <= positions)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ values.double()[:, None]).permute(2, 0, 1, 3).flatten(1, 2)


def random_predictor() -> ImportancePredictor:
    heads, size, width = (LAYERS, KV_HEADS), 2 * DIM, 4
    shapes = (*heads, size, width), (*heads, width), (*heads, width), (*heads, size), heads
    draw = rng(3)
    return ImportancePredictor(*(0.1 * torch.randn(each, generator=draw) for each in shapes))


class Reader:
    """A worker over one context that is read again, with the same KV and queries on any device.

    Args:
        predictor: whether its contexts have one.
    """

    def __init__(self, layout: str, predictor: bool, device: str = "cpu") -> None:
        self.head_pages = head_pages_of(layout, 60, device)
        self.blocks = (1 + torch.randperm(40, generator=rng(4))).tolist()
        self.keys, self.values = random_kv(len(self.blocks) * PAGE, seed=5)
        write(self.head_pages, self.blocks, self.keys, self.values)
        gate = random_predictor() if predictor else None
        self.worker = CompressionWorker(
            self.head_pages, SCALE, ROPE, {"x": self.blocks}.__getitem__, gate
        )

    def read_again(self, kept: int, room: Sequence[int]) -> tuple[Tensor, RetainedPages]:
        """The scores of the context, and what is kept in so many blocks."""
        tokens, worker = len(self.blocks) * PAGE, self.worker
        rereads = RereadRows("x", tokens, tokens - 100, tokens + 5)
        worker.begin_step((), (), CompressionMetadata(rereads={"r": rereads}))
        batch, starts, lengths = [BatchRow("r", None, 1)], np.array([0, 160]), np.array([1])
        _, read = worker.select_rows(batch, starts, lengths + tokens + 59)
        for layer in range(LAYERS):
            queries = torch.randn(160, HEADS, DIM, generator=rng(7 + layer))
            worker.record_queries(read, layer, queries.to(self.head_pages.device))
        worker.begin_step({"r"}, (), CompressionMetadata(layers=LAYERS))
        scores = worker.scorers["x"].scores().cpu()
        worker.begin_step((), (), CompressionMetadata(fits={"x": FitWork(kept, LAYERS)}))
        lost = worker.begin_step(
            (), (), CompressionMetadata(retentions={"x": Retention(tokens, list(room))})
        )
        assert not lost
        return scores, worker._dropped["x"]

    def streamed(self, ends: Sequence[int], kept: int, room: Sequence[int]) -> RetainedPages:
        """What is kept of the context after choices when so many blocks of it are computed."""
        worker, before = self.worker, 0
        worker.begin_step((), (), CompressionMetadata(incremental={"x"}))
        for end in ends:
            batch, starts = [BatchRow("x", None, ends[-1] * PAGE)], [0, (end - before) * PAGE]
            _, read = worker.select_rows(batch, np.array(starts), np.array([end * PAGE]))
            for layer in range(LAYERS):
                queries = torch.randn(starts[1], HEADS, DIM, generator=rng(7 + layer + end))
                worker.record_queries(read, layer, queries.to(self.head_pages.device))
            retention = Retention(end * PAGE, list(room[:kept]))
            assert not worker.begin_step((), (), CompressionMetadata(retentions={"x": retention}))
            before = end
        return worker._dropped["x"]

    def kept_kv(self, held: RetainedPages) -> list[tuple[Tensor, Tensor]]:
        """K and V of each head, in the order of layers and heads."""
        found = []
        for layer, heads in enumerate(held.counts.tolist()):
            keys, values = self.head_pages.read_head_pages(held.head_pages[layer])
            for head, count in enumerate(heads):
                places = slice(0, count * PAGE)
                found.append((keys[head, places].cpu(), values[head, places].cpu()))
        return found


def check_equal_to_cpu(device: str, layout: str, predictor: bool, within: float) -> None:
    """Scores, kept tokens and fitted KV equal the CPU's, over the CPU's own layout of heads."""
    mine, its = (
        Reader(one, predictor, where) for one, where in ((layout, device), ("LBHNC", "cpu"))
    )
    room = list(range(45, 57))
    (scores, held), (wanted, other) = (each.read_again(12, room) for each in (mine, its))
    torch.testing.assert_close(scores, wanted, rtol=1e-3, atol=1e-5)
    assert_same(mine, held, its, other, within)
    if predictor:
        mine, its = (
            Reader(one, True, where) for one, where in ((layout, device), ("LBHNC", "cpu"))
        )
        held, other = (each.streamed((20, 31, 40), 10, room) for each in (mine, its))
        assert_same(mine, held, its, other, within)


def assert_same(
    mine: Reader, held: RetainedPages, its: Reader, other: RetainedPages, within: float
) -> None:
    assert held.tokens == other.tokens
    assert held.counts.tolist() == other.counts.tolist()
    for ours, theirs in zip(mine.kept_kv(held), its.kept_kv(other), strict=True):
        for one, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, wanted, rtol=0, atol=within)


def one_layer_worker(
    cache: Tensor, table: Sequence[int], context: int, room: Sequence[int], scale: float
) -> CompressionWorker:
    """A worker over a cache of one layer with four query heads, whose request "0" has dropped KV.

    Args:
        table: the request's blocks. context: tokens of its context. room: blocks for what is kept.
    """
    head_pages = HeadPages([cache], 1, KvOrder.JOINED)
    worker = CompressionWorker(head_pages, scale, ROPE, {"0": table}.__getitem__)
    rereads = RereadRows("0", context, 100, context)
    worker.begin_step((), (), CompressionMetadata(rereads={"r": rereads}))
    rows = [BatchRow("r", None, 1)], np.array([0, 90]), np.array([190])
    _, read = worker.select_rows(*rows)
    worker.record_queries(read, 0, torch.randn(90, 4, 32, generator=rng(1)))
    worker.begin_step({"r"}, (), CompressionMetadata(layers=1))
    retention = Retention(context, list(room))
    assert not worker.begin_step((), (), CompressionMetadata(retentions={"0": retention}))
    return worker

"""Sparse rows' attention: choose pages, rewrite block tables, and call vLLM's own kernel.

Nothing is copied. Each (row, KV head) is a request of its own to the kernel, with one KV head, the
query heads of its group and a table of the chosen pages. The newest page is always chosen and comes
last, so only it is partly filled and the kernel's length is

    (chosen - 1) * page_tokens + fill

Keys are already rotated by their true positions, so the order of pages in a table does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.cpu_cache import Kernel, LayerCache
from headrace_decode.attention.page_counts import RECENT, SINKS
from headrace_decode.sparse.engine.sparse_rows import RowPlan
from headrace_decode.sparse.page_scores import score_pages
from headrace_decode.sparse.page_selection import select_pages
from headrace_decode.sparse.summaries import Summaries
from headrace_kvstore.blocks.checksum import prepare


class SelectingRow(Protocol):
    """Sparse row; attributes and method as for `SparseRow`."""

    @property
    def row(self) -> int: ...
    @property
    def newest(self) -> int: ...
    @property
    def fill(self) -> int: ...
    @property
    def chosen(self) -> int: ...
    def select(
        self, layer: Any, queries: NDArray[np.float32], scale: float
    ) -> NDArray[np.integer[Any]]: ...


@dataclass(frozen=True)
class SparseRow:
    """A row whose KV is all in the cache.

    Attributes:
        row: index in the batch.
        pages: int64 [n], blocks of its full pages before the newest.
        newest: block of the newest page.
        fill, chosen: as for `RowPlan`.
    """

    row: int
    pages: NDArray[np.int64]
    newest: int
    fill: int
    chosen: int

    @classmethod
    def of(cls, plan: RowPlan, table: NDArray[np.integer]) -> SparseRow:
        """Return the row of a plan.

        Args:
            table: int [n], the row's blocks.
        """
        pages = table[: plan.full].astype(np.int64)
        return cls(plan.row, pages, int(table[plan.full]), plan.fill, plan.chosen)

    def select(self, layer: Any, queries: NDArray[np.float32], scale: float) -> NDArray[np.int64]:
        """Choose pages, and return their places in the cache: int64 [kv_heads, chosen - 1], each
        `block * kv_heads + head`.

        Args:
            layer: `SparseLayer`.
            queries: float32 [kv_heads, group, head_dim]. scale: scale of the logits.
        """
        scores = score_pages(layer.summaries, self.pages, queries, scale)
        kv_heads = len(scores)
        chosen = select_pages(scores, self.chosen - 1, SINKS, RECENT - 1)
        return self.pages[chosen] * kv_heads + np.arange(kv_heads)[:, None]


class SparseLayer:
    """Keys and summaries that one layer attends over.

    Args:
        keys: keys of its cache. summaries: summaries of its pages. number: index of the layer.
    """

    def __init__(self, keys: LayerCache, summaries: Summaries, number: int = 0) -> None:
        self.keys, self.summaries, self.number = keys, summaries, number
        self.by_head = keys.by_head()

    def warm(self, heads: int) -> None:
        """Compile code, or load it from disk, so that the first step need not wait for it.

        Args:
            heads: number of query heads.
        """
        kv_heads, first = self.keys.kv_heads, np.zeros(1, np.int64)
        self.summaries.put(first, torch.zeros_like(self.keys.read(first)))
        query = np.zeros((kv_heads, heads // kv_heads, self.keys.head_dim), np.float32)
        score_pages(self.summaries, first, query, 1.0)
        prepare()


class SparseStep:
    """The sparse rows of one step, for all layers.

    Args:
        rows: at least one.
        tokens: int [rows], index of each row's token among the step's tokens.
        kv_heads, page_tokens: number of the cache's KV heads, and tokens of its pages.
        schedule: (starts, lengths) -> the kernel's schedule of these requests.
        kernel: a `Kernel`.
    """

    def __init__(
        self,
        rows: Sequence[SelectingRow],
        tokens: NDArray[np.integer],
        kv_heads: int,
        page_tokens: int,
        schedule: Callable[[Tensor, Tensor], Any],
        kernel: Kernel,
    ) -> None:
        self.rows = rows
        self._kv_heads, self._kernel = kv_heads, kernel
        first, count = int(tokens[0]), len(rows)
        alike = tokens[-1] - first == count - 1
        self._tokens = slice(first, first + count) if alike else torch.from_numpy(np.array(tokens))
        lengths = [(row.chosen - 1) * page_tokens + row.fill for row in rows]
        self._lengths = torch.tensor(lengths, dtype=torch.int32).repeat_interleave(kv_heads)
        self._starts = torch.arange(count * kv_heads + 1, dtype=torch.int32)
        self._schedule = schedule(self._starts, self._lengths)
        most = max(row.chosen for row in rows)
        table = np.zeros((count, kv_heads, most), np.int32)
        heads = np.arange(kv_heads, dtype=np.int32)
        for number, row in enumerate(rows):
            table[number, :, row.chosen - 1] = row.newest * kv_heads + heads
        self._table = table

    def attend(self, layer: SparseLayer, query: Tensor, output: Tensor, scale: float) -> None:
        """Write the rows' attention in one layer.

        Args:
            query, output: [tokens, heads, head_dim], of all rows of the step.
            scale: scale of the logits.
        """
        mine = query[self._tokens]
        count, heads, dim = mine.shape
        group = heads // self._kv_heads
        queries = mine.float().view(count, self._kv_heads, group, dim).numpy()
        for number, row in enumerate(self.rows):
            self._table[number, :, : row.chosen - 1] = row.select(layer, queries[number], scale)
        split = mine.reshape(count * self._kv_heads, group, dim)
        found = torch.empty_like(split)
        table = torch.from_numpy(self._table).flatten(0, 1)
        keys, values = layer.by_head
        self._kernel(
            *(split, keys, values, found),
            *(self._starts, self._lengths, table, self._schedule, scale),
        )
        output[self._tokens] = found.view(count, heads, dim)

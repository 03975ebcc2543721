"""Attention of requests that keep a part of their context's KV.

Each (row, KV head) is a request of its own to vLLM's kernel. Its table has the head pages that the
head keeps of the context, all of them full, then the request's own pages after the context, of
which the newest may be partly filled. Keys are rotated by their true positions, so their order does
not matter. Lengths differ from layer to layer and from head to head:

    length = page_tokens * (head pages kept) + tokens after the context
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.cpu_cache import Ids, Kernel
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.refit import HeadKV


@dataclass(frozen=True)
class RetainedPages:
    """Head pages that hold the retained KV of a context.

    Attributes:
        tokens: number of tokens of the context, whole blocks.
        head_pages: int32 [layers, kv_heads, most]; the first `counts` of each head are valid.
        counts: int64 [layers, kv_heads], number of head pages of each head.
    """

    tokens: int
    head_pages: NDArray[np.int32]
    counts: Ids

    @classmethod
    def of(
        cls,
        tokens: int,
        kept: Tensor,
        layers: Iterable[list[HeadKV]],
        room: Ids,
        head_pages: HeadPages,
    ) -> RetainedPages:
        """Copy the retained KV of a context to head pages.

        The target head pages may be the context's own, since all retained KV is read before any is
        written. Until it is written, a copy takes its bytes once more.

        Args:
            tokens: number of tokens of the context, whole blocks.
            kept: bool [layers, kv_heads, places], whole pages of each head.
            layers: K and V that heads keep, by layer.
            room: target head pages, as many as kept pages, or more.
        """
        counts = kept.sum(-1).numpy() // head_pages.page_tokens
        table, at = np.zeros((*counts.shape, int(counts.max())), np.int32), 0
        copies: list[tuple[Ids, Tensor, Tensor]] = []
        for layer, heads in enumerate(layers):
            for head, both in enumerate(heads):
                count = int(counts[layer, head])
                mine = room[at : at + count]
                copies.append((mine, *both))
                table[layer, head, :count] = mine
                at += count
        for copy in copies:
            head_pages.write(*copy)
        return cls(tokens, table, counts)


@dataclass(frozen=True)
class CompressedRow:
    """A row of a step whose context has dropped KV.

    Attributes:
        row: index in the batch.
        tokens: slice of the step's tokens.
        kv_tokens: number of tokens of the whole request, this step's included.
        held: retained KV of its context.
        pages: int64 [n], its own pages after the context.
    """

    row: int
    tokens: slice
    kv_tokens: int
    held: RetainedPages
    pages: Ids


class CompressedStep:
    """A step's rows whose contexts have dropped KV, for all layers.

    Args:
        rows: at least one.
        schedule: (starts, lengths) -> the kernel's schedule of these requests.
        kernel: a `Kernel`.
    """

    def __init__(
        self,
        rows: Sequence[CompressedRow],
        head_pages: HeadPages,
        schedule: Callable[[Tensor, Tensor], Any],
        kernel: Kernel,
    ) -> None:
        self.rows, self._head_pages = rows, head_pages
        self._schedule, self._kernel = schedule, kernel
        counts = [row.tokens.stop - row.tokens.start for row in rows]
        starts = np.concatenate([[0], np.cumsum(np.repeat(counts, head_pages.kv_heads))])
        self._starts = torch.from_numpy(starts.astype(np.int32))
        self._table, self._lengths = self._tables()

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float) -> None:
        """Write the rows' attention in one layer.

        Args:
            query, output: [tokens, heads, head_dim], of all rows of the step.
        """
        heads = self._head_pages.kv_heads
        split = [
            query[row.tokens].unflatten(1, (heads, -1)).transpose(0, 1).flatten(0, 1)
            for row in self.rows
        ]
        asked = torch.cat(split)
        found = torch.empty_like(asked)
        table, lengths = self._table[layer], self._lengths[layer]
        scheduled = self._schedule(self._starts, lengths)
        keys, values = self._head_pages.kernel
        self._kernel(asked, keys, values, found, self._starts, lengths, table, scheduled, scale)
        for row, part in zip(self.rows, found.split([len(one) for one in split]), strict=True):
            back = part.unflatten(0, (heads, -1)).transpose(0, 1).flatten(1, 2)
            output[row.tokens] = back

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Return the tables, int32 [layers, rows * kv_heads, most head pages], and the lengths in
        tokens, without the last axis."""
        head_pages, rows = self._head_pages, self.rows
        layers = np.arange(len(head_pages.layers))[:, None, None]
        heads = np.arange(head_pages.kv_heads)[:, None]
        most = max(int(row.held.counts.max()) + len(row.pages) for row in rows)
        shape = len(layers), len(rows), head_pages.kv_heads
        table, lengths = np.zeros((*shape, most), np.int32), np.zeros(shape, np.int32)
        for number, row in enumerate(rows):
            held, mine = row.held, table[:, number]
            mine[..., : held.head_pages.shape[-1]] = held.head_pages
            behind = held.counts[..., None] + np.arange(len(row.pages))
            mine[layers, heads, behind] = head_pages.number(layers, row.pages)
            lengths[:, number] = head_pages.page_tokens * held.counts + row.kv_tokens - held.tokens
        return torch.from_numpy(table).flatten(1, 2), torch.from_numpy(lengths).flatten(1)

"""Attention of requests that keep a part of their context's KV, on any device.

Each (row, KV head) is a request of its own to the device's paged kernel. Its table has the head
pages that the head keeps of the context, all of them full, then the request's own pages after the
context, of which the newest may be partly filled. Keys are rotated by their true positions, so
their order does not matter. Lengths differ from layer to layer and from head to head:

    length = page_tokens * (head pages kept) + tokens after the context

Tables are made once a step, for all layers, on the device. The host knows only how many pages there
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_decode.attention.device_copy import copy_to_device, padded
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.refit import HeadKV

Kernel = Callable[..., None]
"""(query, keys, values, output, starts, lengths, table, most queries, longest, scale): causal paged
attention of requests over [tokens, heads, head_dim], with blocks of one KV head. `most queries` is
the maximum of a request's queries, and `longest` that of its KV, or more."""
MAX_ENTRIES = 1 << 22
"""Maximum entries of the tables that are made together, unless one row has more."""


@dataclass(frozen=True)
class RetainedPages:
    """Head pages that hold the retained KV of a context.

    Attributes:
        tokens: number of tokens of the context, whole blocks.
        head_pages: int32 [layers, kv_heads, most]; the first `counts` of each head are valid. They
            are on the device of the cache.
        counts: int64 [layers, kv_heads], number of head pages of each head, on that device.
    """

    tokens: int
    head_pages: Tensor
    counts: Tensor

    @classmethod
    def of(
        cls,
        tokens: int,
        kept: Tensor,
        layers: Iterable[list[HeadKV]],
        room: Tensor,
        head_pages: HeadPages,
    ) -> RetainedPages:
        """Copy the retained KV of a context to head pages.

        The target head pages may be the context's own, since all retained KV is read before any is
        written. Until it is written, a copy takes its bytes once more.

        Args:
            tokens: number of tokens of the context, whole blocks.
            kept: bool [layers, kv_heads, places], whole pages of each head.
            layers: K and V that heads keep, by layer.
            room: int64 [n], target head pages, as many as kept pages, or more.
        """
        counts = kept.sum(-1) // head_pages.page_tokens
        copies: list[tuple[Tensor, Tensor, Tensor]] = []
        at = 0
        for heads, numbers in zip(layers, counts.tolist(), strict=True):
            for both, count in zip(heads, numbers, strict=True):
                copies.append((room[at : at + count], *both))
                at += count
        for copy in copies:
            head_pages.write(*copy)
        return cls.filled(tokens, counts, room)

    @classmethod
    def filled(cls, tokens: int, counts: Tensor, room: Tensor) -> RetainedPages:
        """Return head pages that are filled in the order of layers and heads.

        Args:
            tokens, counts: as the attributes. room: int64 [n], the head pages, or more.
        """
        table, there = filled_places(counts)
        table.masked_scatter_(there, room.int())
        return cls(tokens, table, counts)

    @property
    def most(self) -> int:
        """Maximum number of head pages of a head."""
        return self.head_pages.shape[-1]


def filled_places(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty table of head pages, int32 [layers, kv_heads, most], and which of its places
    these counts fill."""
    most = int(counts.max())
    there = torch.arange(most, device=counts.device) < counts[..., None]
    return torch.zeros_like(there, dtype=torch.int32), there


@dataclass(frozen=True)
class CompressedRow:
    """A row of a step whose context has dropped KV.

    Attributes:
        row: index in the batch.
        tokens: slice of the step's tokens.
        kv_tokens: number of tokens of the whole request, this step's included.
        held: retained KV of its context.
        own: slice of its pages: those after the context.
    """

    row: int
    tokens: slice
    kv_tokens: int
    held: RetainedPages
    own: slice

    @property
    def queries(self) -> int:
        """Number of its tokens in the step."""
        return int(self.tokens.stop - self.tokens.start)

    @property
    def width(self) -> int:
        """Number of entries that the table of each of its heads needs, or more."""
        return self.held.most + int(self.own.stop - self.own.start)


class CompressedStep:
    """A step's rows whose contexts have dropped KV, for all layers.

    Args:
        rows: at least one.
        tables: int [rows of the batch, most pages], pages of each row, on the device of the cache.
        kernel: a `Kernel`.
    """

    def __init__(
        self,
        rows: Sequence[CompressedRow],
        tables: Tensor,
        head_pages: HeadPages,
        kernel: Kernel,
    ) -> None:
        self._head_pages, self._kernel = head_pages, kernel
        most = MAX_ENTRIES // (head_pages.layers * head_pages.kv_heads)
        self._parts = [_Part(some, tables, head_pages) for some in divided(rows, most)]

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float) -> None:
        """Write the rows' attention in one layer.

        Args:
            query, output: [tokens, heads, head_dim], of all rows of the step.
        """
        keys, values = self._head_pages.kernel
        kv_heads = self._head_pages.kv_heads
        asked, into = (one.unflatten(1, (kv_heads, -1)) for one in (query, output))
        for part in self._parts:
            mine = asked[part.tokens, part.heads]
            found = torch.empty_like(mine)
            self._kernel(
                *(mine, keys, values, found),
                *(part.starts, part.lengths[layer], part.table[layer]),
                *(part.most_queries, part.longest, scale),
            )
            into[part.tokens, part.heads] = found


def divided(rows: Sequence[CompressedRow], most: int) -> Iterator[list[CompressedRow]]:
    """Divide rows into those that are computed together.

    Rows of one token are apart from others, since kernels divide the KV of such rows among more
    programs. Rows of similar length are together, since a table is as wide as its longest.

    Args:
        most: maximum entries of a head's tables in a layer, unless one row has more.
    """
    part: list[CompressedRow] = []
    for row in sorted(rows, key=lambda each: (each.queries > 1, each.width)):
        alike = not part or (part[0].queries > 1) == (row.queries > 1)
        if part and not (alike and (len(part) + 1) * row.width <= most):
            yield part
            part = []
        part.append(row)
    yield part


class _Part:
    """Rows that are computed together. Requests of the kernel are in order of row, then KV head.

    Attributes:
        tokens, heads: int64 [n], token of the step and KV head of each query group.
        starts: int32 [requests + 1], first query group of each request.
        table: int32 [layers, requests, width]. lengths: int32 [layers, requests], in tokens.
        most_queries, longest: as for `Kernel`.
    """

    def __init__(
        self, rows: Sequence[CompressedRow], tables: Tensor, head_pages: HeadPages
    ) -> None:
        heads, device = head_pages.kv_heads, tables.device
        queries = np.repeat([row.queries for row in rows], heads)
        begins = np.repeat([row.tokens.start for row in rows], heads)
        ends = np.cumsum(queries)
        within = np.arange(ends[-1]) - np.repeat(ends - queries, queries)
        tokens = np.repeat(begins, queries) + within
        of_head = np.repeat(np.tile(np.arange(heads), len(rows)), queries)
        self.tokens, self.heads = copy_to_device(np.stack([tokens, of_head]), device)
        self.starts = copy_to_device(np.concatenate([[0], ends]).astype(np.int32), device)
        self.most_queries = int(queries.max())
        behind = [row.kv_tokens - row.held.tokens for row in rows]
        per = head_pages.page_tokens
        self.longest = max(
            per * row.held.most + count for row, count in zip(rows, behind, strict=True)
        )
        facts = np.array([[row.row, row.own.start] for row in rows]).T
        row, first = copy_to_device(facts, device)[..., None]
        most = max(row.own.stop - row.own.start for row in rows)
        at = first + torch.arange(most, device=device)
        pages = tables[row, at.clamp_max(tables.shape[1] - 1)]  # [rows, most]

        counts = torch.stack([row.held.counts for row in rows], 1)  # [layers, rows, kv_heads]
        width = padded(max(row.held.most for row in rows) + most)
        table = torch.zeros((*counts.shape, width), dtype=torch.int32, device=device)
        for number, each in enumerate(rows):
            table[:, number, :, : each.held.most] = each.held.head_pages
        places = counts[..., None] + torch.arange(most, device=device)
        table.scatter_(-1, places, head_pages.number(pages).int())
        lengths = per * counts + copy_to_device(np.array(behind), device)[:, None]
        self.table, self.lengths = table.flatten(1, 2), lengths.int().flatten(1)

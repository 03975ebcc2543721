"""Decode attention of rows to the pages that each KV head chooses, on a device.

As on a CPU, each (row, KV head) is a request of its own to vLLM's paged kernel, with one KV head,
the query heads of its group and a table of the chosen pages. The newest page comes last, so only
the last is partly filled. No size is read back from the device, so a step can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.page_selection import tables
from headrace_decode.sparse.kernels.summaries import DeviceSummaries

Kernel = Callable[..., None]
"""(query, keys, values, output, starts, lengths, table, longest, scale): paged attention of
requests of one token over [tokens, heads, head_dim]."""


@dataclass(frozen=True)
class DecodeRows:
    """Sparse rows of a step, for all layers. All tensors are on the device.

    Attributes:
        pages: int32 [rows, n], blocks of each row's full pages before its newest, in order.
        counts: int32 [rows], number of these pages.
        chosen: int32 [rows], pages that each attends to, the newest included.
        newest: int32 [rows], block of the newest page.
        fill: int32 [rows], tokens in it.
        most: maximum of `chosen`, or more.
    """

    pages: Tensor
    counts: Tensor
    chosen: Tensor
    newest: Tensor
    fill: Tensor
    most: int


def attend(
    summaries: DeviceSummaries,
    cache: HeadCache,
    query: Tensor,
    rows: DecodeRows,
    scale: float,
    kernel: Kernel,
) -> Tensor:
    """Compute the rows' attention in one layer: [rows, heads, head_dim].

    Args:
        summaries: summaries that are up to date for the rows' full pages.
        query: [rows, heads, head_dim], rotated, contiguous.
        scale: scale of the logits.
    """
    table = tables(
        summaries,
        *(query, rows.pages, rows.counts, rows.chosen, rows.newest),
        *(cache.heads_apart, scale, rows.most),
    )
    return attend_to(table, cache, query, rows, scale, kernel)


def attend_to(
    table: Tensor, cache: HeadCache, query: Tensor, rows: DecodeRows, scale: float, kernel: Kernel
) -> Tensor:
    """Compute the rows' attention to chosen pages; other arguments and result as for `attend`.

    Args:
        table: int32 [rows, kv_heads, rows.most], places of these pages, the newest last.
    """
    count, heads, dim = query.shape
    kv_heads, page_tokens = cache.kv_heads, cache.page_tokens
    split = query.view(count * kv_heads, heads // kv_heads, dim)
    found = torch.empty_like(split)
    lengths = ((rows.chosen - 1) * page_tokens + rows.fill).repeat_interleave(
        kv_heads, output_size=count * kv_heads
    )
    starts = torch.arange(count * kv_heads + 1, dtype=torch.int32, device=query.device)
    longest = rows.most * page_tokens
    kernel(
        *(split, cache.keys, cache.values, found),
        *(starts, lengths, table.flatten(0, 1), longest, scale),
    )
    return found.view(count, heads, dim)

"""What must hold of sparse attention's kernels on any device; the CPU's code is the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_decode.attention.page_counts import RECENT, SINKS
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.kernels.attention import DecodeRows, Kernel, attend
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.page_selection import scores, tables
from headrace_decode.sparse.kernels.summaries import DeviceSummaries
from headrace_decode.sparse.page_selection import select_pages
from headrace_decode.sparse.summaries import Summaries
from headrace_lab.sparse.moments import Moments
from tests.support import sparse_summaries as stored

RANK = 12
LENGTHS = 103, 49, 144
"""KV of the rows, their own tokens included."""


@dataclass(frozen=True)
class Case:
    """Rows over a paged cache whose blocks lie in no order.

    Attributes:
        cache: [blocks, kv_heads, page_tokens, 2 dim].
        query: [rows, heads, dim].
        blocks: of each row, in order.
    """

    cache: Tensor
    query: Tensor
    blocks: list[list[int]]
    basis: Basis

    @property
    def page_tokens(self) -> int:
        return self.cache.shape[2]

    @property
    def keys(self) -> Tensor:
        """[blocks, kv_heads, page_tokens, dim]."""
        return self.cache[..., : self.query.shape[-1]]

    def rows(self, chosen: int) -> DecodeRows:
        full = [(length - 1) // self.page_tokens for length in LENGTHS]
        pages = torch.zeros((len(full), max(full)), dtype=torch.int32)
        for row, (blocks, count) in enumerate(zip(self.blocks, full, strict=True)):
            pages[row, :count] = torch.tensor(blocks[:count])
        fill = [length - n * self.page_tokens for length, n in zip(LENGTHS, full, strict=True)]
        newest = [blocks[n] for blocks, n in zip(self.blocks, full, strict=True)]
        device, taken = self.cache.device, [min(chosen, n + 1) for n in full]
        counts, wanted, last, tokens = (
            torch.tensor(each, dtype=torch.int32, device=device)
            for each in (full, taken, newest, fill)
        )
        return DecodeRows(pages.to(device), counts, wanted, last, tokens, chosen)


def case(
    device: str,
    dtype: torch.dtype,
    page_tokens: int = 16,
    dim: int = 32,
    order: tuple[int, ...] = (0, 1, 2, 3),
    kv_heads: int = 2,
    group: int = 3,
) -> Case:
    """
    Args:
        order: of the cache's axes in memory.
    """
    draw = torch.Generator().manual_seed(7)
    counts = [-(-length // page_tokens) for length in LENGTHS]
    total = sum(counts) + 1
    shape = (total, kv_heads, page_tokens, 2 * dim)
    one = torch.randn(shape, generator=draw)
    one[..., :dim] += 2 * torch.randn(total, kv_heads, 1, dim, generator=draw)
    one[4, 1, 5, :dim] *= 9  # beyond the codes
    ordered = one.permute(order).contiguous().to(dtype)
    cache = ordered.permute([order.index(axis) for axis in range(4)]).to(device)
    query = torch.randn(len(LENGTHS), kv_heads * group, dim, generator=draw) * 2
    places = torch.randperm(total, generator=draw).tolist()
    ends = np.cumsum(counts)
    blocks = [places[end - count : end] for count, end in zip(counts, ends, strict=True)]
    moments = Moments(kv_heads, dim)
    moments.add_pages(one[..., :dim].numpy())
    moments.add_queries(torch.randn(kv_heads, 300, dim, generator=draw).numpy())
    return Case(cache, query.to(device, dtype), blocks, moments.basis(RANK))


def summarised(one: Case, device: str) -> DeviceSummaries:
    found = DeviceSummaries(len(one.cache), one.page_tokens, one.basis, device)
    everything = torch.arange(len(one.cache), device=device)
    found.refresh(HeadCache.of(one.cache), everything)
    return found


def check_summaries(one: Case, device: str) -> None:
    """Equal the CPU's but where a number lies between two codes."""
    found = summarised(one, device)
    heads, pages = found.codes.shape[:2]
    wanted = Summaries(pages, heads, one.page_tokens, one.query.shape[-1], basis=one.basis)
    wanted.put(np.arange(pages), one.keys)
    assert found.layout == wanted.layout
    torch.testing.assert_close(found.scales.cpu(), torch.from_numpy(wanted.scales))
    ours, theirs = found.codes.cpu().int(), torch.from_numpy(wanted.codes).int()
    apart = torch.stack([(ours & 15) - (theirs & 15), (ours >> 4) - (theirs >> 4)]).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


def check_unchanged_keys_are_not_summarised_again(one: Case, device: str) -> None:
    found, cache = summarised(one, device), HeadCache.of(one.cache)
    pages = torch.tensor([0, 5, -1, 2], device=device)
    found.codes.fill_(0)
    found.refresh(cache, pages)
    assert not found.codes.any()
    one.cache[5, 1, 3, 9] += 1  # one number of one key of one head
    one.cache[2, 0, 1, one.query.shape[-1] + 1] += 1  # a value is no key
    found.refresh(cache, pages)
    assert found.codes.flatten(2).any(-1).nonzero().tolist() == [[1, 5]]


def check_scores(one: Case, device: str, within: float) -> None:
    """Are what the bytes of summaries say."""
    dim = one.query.shape[-1]
    rows, found = one.rows(6), summarised(one, device)
    logits = scores(found, one.query, rows.pages, rows.counts, dim**-0.5).cpu() * np.log(2)
    for row, count in enumerate(rows.counts.tolist()):
        pages = rows.pages[row, :count].long()
        kept = [part[:, pages].cpu().numpy() for part in (found.codes, found.scales)]
        queries = one.query[row].float().cpu().view(len(kept[0]), -1, dim) * dim**-0.5
        for head, (codes, scales, query) in enumerate(zip(*kept, queries, strict=True)):
            wanted = stored.logits(found.layout, one.basis, codes, scales, head, query).float()
            torch.testing.assert_close(logits[row, head, :, :count], wanted, rtol=0, atol=within)


def check_tables(one: Case, device: str) -> None:
    """Hold what `select_pages` finds by the same scores, as places in the cache."""
    found, cache = summarised(one, device), HeadCache.of(one.cache)
    scale = one.query.shape[-1] ** -0.5
    for chosen in (3, 5, 30):
        rows = one.rows(chosen)
        logits = scores(found, one.query, rows.pages, rows.counts, scale).cpu() * np.log(2)
        given = (rows.pages, rows.counts, rows.chosen, rows.newest)
        table = tables(found, one.query, *given, cache.heads_apart, scale, chosen).cpu()
        for row, (count, wanted) in enumerate(
            zip(rows.counts.tolist(), rows.chosen.tolist(), strict=True)
        ):
            mass = logits[row, :, :, :count].softmax(-1).sum(1)
            here = select_pages(mass.numpy(), wanted - 1, SINKS, RECENT - 1)
            blocks = rows.pages[row].cpu().numpy()[here]
            newest = np.full((len(here), 1), int(rows.newest[row]))
            heads = np.arange(len(here))[:, None]
            places = np.concatenate([blocks, newest], 1) * cache.heads_apart + heads
            assert table[row, :, :wanted].tolist() == places.tolist()


def check_ties(device: str) -> None:
    """Pages alike are chosen in their order."""
    one = case(device, torch.float32)
    one.cache[:] = one.cache[:1]
    rows, cache = one.rows(5), HeadCache.of(one.cache)
    given = (rows.pages, rows.counts, rows.chosen, rows.newest)
    table = tables(summarised(one, device), one.query, *given, cache.heads_apart, 0.2, 5)
    for row, count in enumerate(rows.counts.tolist()):
        wanted = int(rows.chosen[row]) - 1
        first = rows.pages[row, [*range(wanted - 1), count - 1]]
        assert (table[row, 0, :wanted] == first * cache.heads_apart).all()


def check_attention(one: Case, device: str, kernel: Kernel, within: float) -> None:
    """Equals exact attention to the tokens of the chosen pages."""
    dim, chosen = one.query.shape[-1], 5
    rows, cache, found = one.rows(chosen), HeadCache.of(one.cache), summarised(one, device)
    scale = dim**-0.5
    output = attend(found, cache, one.query, rows, scale, kernel).float().cpu()
    given = (rows.pages, rows.counts, rows.chosen, rows.newest)
    table = tables(found, one.query, *given, cache.heads_apart, scale, chosen)
    lengths = (rows.chosen - 1) * one.page_tokens + rows.fill
    for row, length in enumerate(lengths.tolist()):
        group = one.query.shape[1] // cache.kv_heads
        for head in range(cache.kv_heads):
            blocks = (table[row, head, : int(rows.chosen[row])] - head) // cache.heads_apart
            both = one.cache[blocks.long(), head].flatten(0, 1)[:length].float().cpu()
            query = one.query[row, head * group : (head + 1) * group].float().cpu()
            weights = (query @ both[:, :dim].T * scale).softmax(-1)
            wanted = weights @ both[:, dim:]
            here = output[row, head * group : (head + 1) * group]
            torch.testing.assert_close(here, wanted, rtol=0, atol=within)

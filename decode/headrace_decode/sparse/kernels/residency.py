"""Fetches chosen pages from host memory into a request's slots in the cache, without the host.

Host memory is pinned and mapped, so kernels read and write it at its address. For each layer and KV
head, a request's slots hold some of its pages that left the cache. `PageResidency` knows which:

    slot_of[h, p] = b     page p of host memory is in block b of the cache, for head h
    page_in[h, b] = p     the reverse; it may be stale, and then slot_of[h, p] is not b
    used_at[h, b]         number of the step that last chose the page in it; 0: none

`place_pages` runs three kernels. `_look_up` finds the chosen pages that have a slot. `_evict` takes
the slots that were chosen longest ago for the others. `_fetch` copies each of them with a program
of its own, so that many reads cross the bus at once. Chosen pages of this step keep their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 8
"""Bytes that a copy moves at a time."""


@dataclass(frozen=True)
class PageLayout:
    """Order of a page's bytes within its block, in words. Host memory has the same.

    Attributes:
        kv_heads, tokens: numbers of the page's KV heads and tokens.
        row: words of K and V of one token and head; a power of 2.
        head, token: words from a head, and from a token, to the next.
    """

    kv_heads: int
    tokens: int
    row: int
    head: int
    token: int

    @classmethod
    def of(cls, cache: Tensor) -> PageLayout:
        """Return the layout of a cache's pages.

        Args:
            cache: [blocks, kv_heads, page_tokens, 2 head_dim], in HND or NHD order.

        Raises:
            ValueError: the bytes of a page do not lie together.
        """
        _, kv_heads, tokens, width = cache.shape
        _, head, token, _ = cache.stride()
        orders = (tokens * width, width), (width, kv_heads * width)
        if (head, token) not in orders or cache.stride(0) < kv_heads * tokens * width:
            raise ValueError("the bytes of a page do not lie together in the KV cache")
        size = cache.element_size()
        if width * size % WORD or cache.stride(0) * size % WORD or cache.data_ptr() % WORD:
            raise ValueError(f"pages of the KV cache are not whole words of {WORD} bytes")
        return cls(
            kv_heads,
            tokens,
            *(each * size // WORD for each in (width, head, token)),
        )

    @property
    def words(self) -> int:
        """Words of a page."""
        return self.kv_heads * self.tokens * self.row


@dataclass(frozen=True)
class PageMemory:
    """Pages of all layers, in a cache or in host memory.

    Attributes:
        addresses: int64 [layers], on the device: address of each layer's first page.
        page: words from a page to the next.
    """

    addresses: Tensor
    page: int

    @classmethod
    def of(cls, layers: Sequence[Tensor], device: torch.device) -> PageMemory:
        """Return the memory of layers [pages, ...], all with the same strides."""
        addresses = torch.tensor([each.data_ptr() for each in layers], dtype=torch.int64)
        first = layers[0]
        return cls(addresses.to(device), first.stride(0) * first.element_size() // WORD)

    def layer(self, number: int) -> PageMemory:
        """Return the memory of one layer."""
        return PageMemory(self.addresses[number : number + 1], self.page)


def copy_pages(
    source: PageMemory, from_: Tensor, target: PageMemory, to: Tensor, layout: PageLayout
) -> None:
    """Copy whole pages in all layers of these memories.

    Args:
        from_, to: int64 [n], pages.
    """
    if len(from_):
        _copy[len(from_), layout.kv_heads, len(source.addresses)](
            source.addresses,
            target.addresses,
            from_,
            to,
            source.page,
            target.page,
            layout.head,
            layout.token,
            TOKENS=layout.tokens,
            ROW=layout.row,
        )


@dataclass(frozen=True)
class PageResidency:
    """Pages of host memory that have slots in one layer's cache, by KV head; see the module.

    Attributes:
        slot_of: int32 [kv_heads, pages of host memory]; -1: none.
        page_in: int32 [kv_heads, blocks of the cache]; -1: none.
        used_at: int32 [kv_heads, blocks of the cache].
        counts: int64 [2], numbers of pages that steps chose of those that had left the cache, and
            of these that had no slot, each of one head.
    """

    slot_of: Tensor
    page_in: Tensor
    used_at: Tensor
    counts: Tensor


@dataclass(frozen=True)
class OffloadedPages:
    """Pages of offloaded rows, for all layers. All tensors are on the device.

    Attributes:
        blocks: int32 [rows, n], block of each page in the cache; stale where it left the cache.
        host: int32 [rows, n], page of host memory of each page that left the cache.
        gone: int32 [rows], number of first pages that left the cache.
        slots: int32 [rows, m], blocks of each row's slots.
        slot_counts: int32 [rows], number of these; at least the pages that the row chooses.
    """

    blocks: Tensor
    host: Tensor
    gone: Tensor
    slots: Tensor
    slot_counts: Tensor


def place_pages(
    residency: PageResidency,
    pages: OffloadedPages,
    positions: Tensor,
    chosen: Tensor,
    newest: Tensor,
    host: PageMemory,
    cache: PageMemory,
    layout: PageLayout,
    heads_apart: int,
    step: int,
) -> Tensor:
    """Bring chosen pages of one layer into the cache; return the rows' block tables, like
    `page_selection.tables`.

    Args:
        positions: int32 [rows, kv_heads, most], from `page_selection.positions`.
        chosen, newest, heads_apart: as for `page_selection.tables`.
        host, cache: memories of the layer.
        step: number of the step, above that of all steps before.
    """
    rows, kv_heads, most = positions.shape
    found, missing, victims = positions.new_zeros((3, *positions.shape))
    missed = positions.new_empty((rows, kv_heads))
    grid, width = (rows, kv_heads), pages.host.stride(0)
    blocks, host_pages = residency.page_in.shape[1], residency.slot_of.shape[1]
    _look_up[grid](
        positions,
        pages.blocks,
        pages.host,
        pages.gone,
        chosen,
        newest,
        residency.slot_of,
        residency.used_at,
        residency.counts,
        found,
        missing,
        missed,
        pages.blocks.stride(0),
        width,
        blocks,
        host_pages,
        heads_apart,
        most,
        step,
        SIZE=triton.next_power_of_2(max(most, 2)),
    )
    slots = pages.slots.shape[1]
    size = triton.next_power_of_2(max(slots, 2))
    _evict[grid](
        missed,
        pages.slots,
        pages.slot_counts,
        residency.used_at,
        victims,
        pages.slots.stride(0),
        blocks,
        most,
        SIZE=size,
        num_warps=min(32, max(4, size // 1024)),
    )
    _fetch[rows, kv_heads, most](
        positions,
        pages.host,
        missing,
        missed,
        victims,
        residency.slot_of,
        residency.page_in,
        residency.used_at,
        found,
        host.addresses,
        cache.addresses,
        host.page,
        cache.page,
        layout.head,
        layout.token,
        width,
        blocks,
        host_pages,
        heads_apart,
        most,
        step,
        TOKENS=layout.tokens,
        ROW=layout.row,
    )
    return found


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
def _copy(
    sources,
    targets,
    from_,
    to,
    source_page,
    target_page,
    head_words,
    token_words,
    TOKENS: tl.constexpr,
    ROW: tl.constexpr,
):
    """Copy one head of a page in one layer."""
    n, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(sources + layer), tl.load(targets + layer)
    _move(
        source + 8 * tl.load(from_ + n) * source_page,
        target + 8 * tl.load(to + n) * target_page,
        8 * head * head_words,
        token_words,
        TOKENS,
        ROW,
    )


@triton.jit
def _move(
    source,
    target,
    head_bytes,
    token_words,
    TOKENS: tl.constexpr,
    ROW: tl.constexpr,
):
    """Copy one head of the page at an address."""
    word = tl.arange(0, TOKENS)[:, None] * token_words + tl.arange(0, ROW)[None, :]
    source = (source + head_bytes).to(tl.pointer_type(tl.int64))
    target = (target + head_bytes).to(tl.pointer_type(tl.int64))
    tl.store(target + word, tl.load(source + word))


@triton.jit(do_not_specialize=["step"])
def _look_up(
    positions,
    blocks,
    host,
    gone,
    chosen,
    newest,
    slot_of,
    used_at,
    counts,
    found,
    missing,
    missed,
    blocks_row,
    host_row,
    capacity,
    host_pages,
    heads_apart,
    most,
    step,
    SIZE: tl.constexpr,
):
    """Write the places of one row's and head's chosen pages that are in the cache, and list the
    others by their index in the table."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    of_row = (row * tl.num_programs(1) + head) * most
    last = tl.load(chosen + row) - 1
    at = tl.arange(0, SIZE)
    there = at < last
    position = tl.load(positions + of_row + at, there, 0)
    left = there & (position < tl.load(gone + row))
    stays = there & (position >= tl.load(gone + row))
    block = tl.load(blocks + row * blocks_row + position, stays, 0)
    page = tl.load(host + row * host_row + position, left, 0)
    slot = tl.load(slot_of + head * host_pages + page, left, -1)
    misses = left & (slot < 0)
    hits = left & (slot >= 0)
    tl.store(used_at + head * capacity + slot, step, hits)
    place = (tl.where(left, slot, block) * heads_apart + head).to(tl.int32)
    tl.store(found + of_row + at, place, stays | hits)
    tl.store(found + of_row + last, (tl.load(newest + row) * heads_apart + head).to(tl.int32))
    tl.store(missing + of_row + tl.cumsum(misses.to(tl.int32), 0) - 1, at, misses)
    many = tl.sum(misses.to(tl.int32), 0)
    tl.store(missed + row * tl.num_programs(1) + head, many)
    tl.atomic_add(counts, tl.sum(left.to(tl.int32), 0).to(tl.int64))
    tl.atomic_add(counts + 1, many.to(tl.int64))


@triton.jit
def _evict(
    missed,
    slots,
    slot_counts,
    used_at,
    victims,
    slots_row,
    capacity,
    most,
    SIZE: tl.constexpr,
):
    """Write the slots of one row and head that were chosen longest ago, as many as it misses
    pages; of equal ones, the first."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    of_row = row * tl.num_programs(1) + head
    wanted = tl.load(missed + of_row)
    if wanted == 0:
        return
    at = tl.arange(0, SIZE)
    there = at < tl.load(slot_counts + row)
    block = tl.load(slots + row * slots_row + at, there, 0)
    used = tl.load(used_at + head * capacity + block, there, 0x7FFFFFFF)
    # The wanted-th lowest is the highest number that fewer are below.
    highest = 0
    for shift in tl.static_range(31):
        tried = highest | (1 << (30 - shift))
        fewer = tl.sum((used < tried).to(tl.int32), 0) < wanted
        highest = tl.where(fewer, tried, highest)
    below = used < highest
    equal = used == highest
    others = wanted - tl.sum(below.to(tl.int32), 0)
    taken = below | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= others))
    tl.store(victims + of_row * most + tl.cumsum(taken.to(tl.int32), 0) - 1, block, taken)


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["sources", "targets"])
def _fetch(
    positions,
    host,
    missing,
    missed,
    victims,
    slot_of,
    page_in,
    used_at,
    found,
    sources,
    targets,
    source_page,
    target_page,
    head_words,
    token_words,
    host_row,
    capacity,
    host_pages,
    heads_apart,
    most,
    step,
    TOKENS: tl.constexpr,
    ROW: tl.constexpr,
):
    """Copy the n-th page that one row and head misses into a slot, and write its place."""
    row, head, n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    of_row = row * tl.num_programs(1) + head
    if n >= tl.load(missed + of_row):
        return
    into = of_row * most
    index = tl.load(missing + into + n)
    block = tl.load(victims + into + n)
    page = tl.load(host + row * host_row + tl.load(positions + into + index))
    slot = head * capacity + block
    before = tl.load(page_in + slot)
    was = tl.load(slot_of + head * host_pages + before, before >= 0, -1)
    tl.store(slot_of + head * host_pages + before, -1, (before >= 0) & (was == block))
    tl.store(page_in + slot, page)
    tl.store(used_at + slot, step)
    tl.store(slot_of + head * host_pages + page, block)
    tl.store(found + into + index, (block * heads_apart + head).to(tl.int32))
    source, target = tl.load(sources), tl.load(targets)
    _move(
        source + 8 * page.to(tl.int64) * source_page,
        target + 8 * block.to(tl.int64) * target_page,
        8 * head * head_words,
        token_words,
        TOKENS,
        ROW,
    )

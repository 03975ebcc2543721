"""What must hold of the kernels that fetch pages from host memory, on any device; a naive model in
plain Python is the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_decode.sparse.kernels.residency import (
    OffloadedPages,
    PageLayout,
    PageMemory,
    PageResidency,
    copy_pages,
    place_pages,
)
from headrace_decode.sparse.offload.pinned_memory import allocate_pinned

HND, NHD = (0, 1, 2, 3), (0, 2, 1, 3)
HEADS, PAGE, DIM = 2, 16, 32
WIDTH, MOST = 16, 16
"""Pages of a row, and places of its table, at most; multiples of 16."""


def pages_of_chance(
    count: int, order: tuple[int, ...], device: str, dtype: torch.dtype = torch.float16
) -> Tensor:
    """[pages, kv_heads, page_tokens, 2 head_dim], in this order of axes in memory."""
    draw = torch.Generator().manual_seed(count)
    found = torch.randn((count, HEADS, PAGE, 2 * DIM), generator=draw).to(dtype)
    back = [order.index(axis) for axis in range(4)]
    return found.permute(order).contiguous().to(device).permute(back)


def in_host_memory(pages: Tensor, order: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The same pages in memory that a device's kernels can read; and their bytes, [pages, bytes],
    whose memory it is."""
    flat = pages.permute(order).cpu().contiguous().flatten(1).view(torch.uint8)
    memory = allocate_pinned(flat.numel(), pages.device)
    found = memory.view(flat.shape)
    found.copy_(flat)
    shape = (len(pages), *(pages.shape[axis] for axis in order[1:]))
    back = [order.index(axis) for axis in range(4)]
    return found.view(pages.dtype).view(shape).permute(back), found


def check_copies(device: str, order: tuple[int, ...], dtype: torch.dtype) -> None:
    """Pages arrive byte for byte, both ways, in all layers; others are not touched."""
    caches = [pages_of_chance(9 + n, order, device, dtype)[:9] for n in range(3)]
    host = [in_host_memory(torch.zeros_like(cache.cpu()).to(device), order) for cache in caches]
    layout = PageLayout.of(caches[0])
    here = PageMemory.of(caches, torch.device(device))
    there = PageMemory.of([flat for _, flat in host], torch.device(device))
    assert here.page == there.page == layout.words
    from_, to = (torch.tensor(each, device=device) for each in ([7, 2, 5], [0, 8, 3]))
    copy_pages(here, from_, there, to, layout)
    _finish(device)
    for cache, (pages, _) in zip(caches, host, strict=True):
        assert torch.equal(pages[[0, 8, 3]], cache[[7, 2, 5]].cpu())
        assert not pages[[1, 2, 4, 5, 6, 7]].any()
    copy_pages(there.layer(1), to[:1], here.layer(1), from_[1:2], layout)
    assert torch.equal(caches[1][2], caches[1][7]) and not torch.equal(caches[0][2], caches[0][7])


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class NaivePages:
    """One row's pages: each head's slots are a dict, and the slot chosen longest ago is evicted.

    Attributes:
        missed: number of pages that were fetched, each of one head.
    """

    def __init__(self, slots: list[int]) -> None:
        self._slots = slots
        self._inside: list[dict[int, int]] = [{} for _ in range(HEADS)]  # page by slot
        self._used = [dict.fromkeys(slots, 0) for _ in range(HEADS)]
        self.missed = 0

    def place(self, head: int, pages: list[int], step: int) -> list[int]:
        """The slot of each page of host memory, after they are fetched."""
        inside, used = self._inside[head], self._used[head]
        where = {page: slot for slot, page in inside.items()}
        for page in pages:
            if page in where:
                used[where[page]] = step
        absent = [page for page in pages if page not in where]
        oldest = sorted(self._slots, key=lambda slot: used[slot])[: len(absent)]
        for page, slot in zip(absent, sorted(oldest, key=self._slots.index), strict=True):
            inside[slot], used[slot], where[page] = page, step, slot
        self.missed += len(absent)
        return [where[page] for page in pages]


@dataclass
class Row:
    """A row of some steps.

    Attributes:
        blocks: of its pages that are in the cache, in order.
        host: its pages of host memory. gone: number of those that left the cache.
        slots: blocks of its slots.
    """

    blocks: list[int]
    host: list[int]
    gone: int
    slots: list[int]


class PlacingRig:
    """A cache and host memory of one layer, with rows.

    Attributes:
        cache: as the kernels have left it.
    """

    def __init__(self, device: str, order: tuple[int, ...], rows: list[Row]) -> None:
        self.device, self.rows = device, rows
        self.cache = pages_of_chance(64, order, device)
        self.source = pages_of_chance(80, order, device)[:48].cpu()
        self._host, flat = in_host_memory(self.source.to(device), order)
        self._layout = PageLayout.of(self.cache)
        self._here = PageMemory.of([self.cache], torch.device(device))
        self._there = PageMemory.of([flat], torch.device(device))
        ints = {"dtype": torch.int32, "device": device}
        self.residency = PageResidency(
            torch.full((HEADS, 48), -1, **ints),
            torch.full((HEADS, 64), -1, **ints),
            torch.zeros((HEADS, 64), **ints),
            torch.zeros(2, dtype=torch.int64, device=device),
        )
        self.naive = [NaivePages(row.slots) for row in rows]

    def place(self, chosen: list[list[list[int]]], newest: list[int], step: int) -> Tensor:
        """Tables of a step, [rows, kv_heads, MOST].

        Args:
            chosen: by row and head, positions in order.
        """
        ints = {"dtype": torch.int32, "device": self.device}
        positions = torch.zeros((len(self.rows), HEADS, MOST), **ints)
        for number, heads in enumerate(chosen):
            for head, each in enumerate(heads):
                positions[number, head, : len(each)] = torch.tensor(each, **ints)
        counts = torch.tensor([len(heads[0]) + 1 for heads in chosen], **ints)
        pages = OffloadedPages(
            *(
                self._padded([getattr(row, name) for row in self.rows])
                for name in ("blocks", "host")
            ),
            torch.tensor([row.gone for row in self.rows], **ints),
            self._padded([row.slots for row in self.rows]),
            torch.tensor([len(row.slots) for row in self.rows], **ints),
        )
        return place_pages(
            *(self.residency, pages, positions, counts, torch.tensor(newest, **ints)),
            *(self._there, self._here, self._layout, HEADS, step),
        ).cpu()

    def _padded(self, lists: list[list[int]]) -> Tensor:
        found = torch.zeros((len(lists), WIDTH), dtype=torch.int32)
        for number, each in enumerate(lists):
            found[number, : len(each)] = torch.tensor(each)
        return found.to(self.device)

    def check(self, chosen: list[list[list[int]]], newest: list[int], step: int) -> None:
        """A step's tables are the naive model's, and name pages with the bytes of the chosen ones.
        Blocks that are no slots are not touched."""
        before = self.cache.cpu().clone()
        tables = self.place(chosen, newest, step)
        cache = self.cache.cpu()
        for number, (row, heads) in enumerate(zip(self.rows, chosen, strict=True)):
            for head, each in enumerate(heads):
                left = [row.host[n] for n in each if n < row.gone]
                slots = self.naive[number].place(head, left, step)
                stays = [row.blocks[n] for n in each if n >= row.gone]
                wanted = [*slots, *stays, newest[number]]
                table = tables[number, head, : len(wanted)]
                assert table.tolist() == [block * HEADS + head for block in wanted]
                for slot, page in zip(slots, left, strict=True):
                    assert torch.equal(cache[slot, head], self.source[page, head])
        others = sorted(set(range(64)) - {slot for row in self.rows for slot in row.slots})
        assert torch.equal(cache[others], before[others])
        missed = sum(each.missed for each in self.naive)
        assert self.residency.counts[1].item() == missed


def check_steps(
    device: str, order: tuple[int, ...], seed: int, steps: int, gone: tuple[int, int] = (14, 9)
) -> None:
    """Rows of chance, of which pages leave the cache meanwhile, equal the naive model."""
    rng = np.random.default_rng(seed)
    blocks, host = rng.permutation(64).tolist(), rng.permutation(48).tolist()
    rows = [
        Row(blocks[:15], host[:15], gone[0], blocks[30:39]),
        Row(blocks[15:30], host[15:30], gone[1], blocks[39:46]),
    ]
    rig = PlacingRig(device, order, rows)
    for step in range(1, steps + 1):
        chosen = [
            [sorted(rng.permutation(15)[:many].tolist()) for _ in range(HEADS)]
            for many in (int(rng.integers(3, 10)), int(rng.integers(3, 8)))
        ]
        rig.check(chosen, blocks[50:52], step)
        rows[0].gone = min(15, rows[0].gone + int(rng.integers(0, 2)))


def check_pages_of_host_memory_that_others_get(device: str) -> None:
    """A page of host memory that was given back and taken again is fetched again; the slot that
    held its bytes before is not mistaken for one that holds it now."""
    row = Row([1, 2, 3, 4], [5, 6, 7, 8], 4, [20, 21, 22])
    rig = PlacingRig(device, HND, [row])
    rig.check([[[0, 1], [0, 1]]], [9], 1)
    rig.residency.slot_of[:, 5] = -1  # as when host memory is allocated
    rig.naive[0] = _without(rig.naive[0], 5)
    rig.check([[[0, 2], [0, 2]]], [9], 2)
    rig.check([[[0, 1, 3], [0, 1, 3]]], [9], 3)
    slot_of, page_in = rig.residency.slot_of.cpu(), rig.residency.page_in.cpu()
    for head, page in (slot_of >= 0).nonzero().tolist():
        assert page_in[head, slot_of[head, page]] == page


def _without(naive: NaivePages, page: int) -> NaivePages:
    for inside in naive._inside:
        for slot in [slot for slot, each in inside.items() if each == page]:
            inside[slot] = -1
    return naive

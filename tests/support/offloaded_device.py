"""Offloaded rows in the sparse backend for GPUs beside rows whose KV is all in the cache, on any
device; and what must hold of them.

KV that has left the cache is overwritten with NaN, so nothing can be read from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.sparse.backend import Request
from headrace_decode.sparse.engine.cuda_step import CudaLayer
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.summaries import DeviceSummaries
from headrace_decode.sparse.offload.device_memory import DeviceTieredMemory
from headrace_decode.sparse.offload.host_pool import HostPool
from headrace_decode.sparse.offload.offloaded_requests import OffloadedRequests
from headrace_decode.sparse.offload.pinned_memory import allocate_pinned
from tests.support.sparse_device import HND, LONG, NHD, PAGE, Rig, sequence

SLOTS, HOST_PAGES = 6, 40
SHARE = 0.4
"""Five pages of LONG tokens, the newest included."""


class OffloadingRig(Rig):
    """A cache whose requests may be offloaded.

    Args:
        device, order: as for `Rig`.
        slots: blocks of each working set.
    """

    def __init__(
        self, device: str = "cpu", order: tuple[int, ...] = NHD, slots: int = SLOTS
    ) -> None:
        super().__init__(True, device, blocks=100, order=order)
        summaries = DeviceSummaries(100 + HOST_PAGES, PAGE, self.basis, device)
        host, page_bytes = HostPool(HOST_PAGES, 1), self.cache[0].nbytes
        pinned = allocate_pinned(HOST_PAGES * page_bytes, torch.device(device))
        self.memory = DeviceTieredMemory([self.cache], [summaries], host, pinned, HOST_PAGES)
        self.impl.sparse = CudaLayer(summaries, HeadCache.of(self.cache), 0)
        self.offloading = OffloadedRequests(self.memory)
        self._slots = slots

    def begin(self, name: str = "0") -> None:
        """A request is offloaded."""
        slots = [self._free.pop() for _ in range(self._slots)]
        self.offloading.begin_step((), {name: slots})

    def leave(self, table: Sequence[int], tokens: int, name: str = "0") -> None:
        """A step that made so many tokens of a request final is over; cold blocks are others'."""
        self.offloading.save({name: tokens}, lambda _: table)
        self.cache[table[: self.offloading[name].gone]] = torch.nan

    def put(self, one: Request, name: str = "0") -> list[int]:
        """KV that the steps before have computed; its table."""
        table = self.write(one)
        self.begin(name)
        self.leave(table, len(one.keys) - len(one.queries), name)
        return table


def check_sparse_rows(device: str, order: tuple[int, ...], tokens: int = LONG) -> None:
    """A sparse row attends to the pages that it would attend to in the cache, to the bit."""
    one = sequence(tokens, SHARE, seed=tokens)
    wanted = Rig(True, device, order=order).step([one])
    rig = OffloadingRig(device, order)
    table = rig.put(one)
    assert rig.offloading["0"].gone >= (tokens - 1) // PAGE - 1
    for _ in range(2):
        metadata = rig.metadata([one], [table])
        assert metadata.offloaded is not None and not metadata.vllms
        assert torch.equal(rig.forward([one], metadata), wanted)
    chosen, missed = rig.memory.counts.tolist()
    assert chosen == 2 * missed > 0, "the second step finds all pages in the slots"


def check_staged_rows(device: str, order: tuple[int, ...], queries: int, count: int = 1) -> None:
    """Rows that attend to everything are vLLM's to the bit, one after another."""
    batch = [sequence(LONG + 20 * n, None, queries, seed=n) for n in range(count)]
    wanted = [Rig(False, device, order=order).step([one]) for one in batch]
    rig = OffloadingRig(device, order, slots=0)
    tables = [rig.put(one, str(n)) for n, one in enumerate(batch)]
    metadata = rig.metadata(batch, tables)
    assert metadata.staged is not None and not metadata.vllms
    assert torch.equal(rig.forward(batch, metadata), torch.cat(wanted))


def check_rows_beside_others(device: str, within: float) -> None:
    """Offloaded rows change no other row of their batch, and are not changed."""
    offloaded = [sequence(LONG, SHARE, seed=1), sequence(130, None, 5, seed=3)]
    others = [sequence(LONG, SHARE, seed=4), sequence(140, None, seed=5), sequence(90, seed=6)]
    batch = [offloaded[0], others[0], offloaded[1], *others[1:]]
    rig, inside, plain = OffloadingRig(device), Rig(True, device), Rig(False, device)
    first, third = rig.put(offloaded[0], "0"), rig.put(offloaded[1], "2")
    tables = [first, rig.write(others[0]), third, *map(rig.write, others[1:])]
    metadata = rig.metadata(batch, tables)
    assert metadata.vllms and metadata.sparse.count == 1
    found, wanted, dense = rig.forward(batch, metadata), inside.step(batch), plain.step(batch)
    rows = [0, 1, *range(7, 9)]
    assert torch.equal(found[rows], wanted[rows])
    assert torch.equal(found[7:], dense[7:])
    torch.testing.assert_close(found[2:7], dense[2:7], rtol=0, atol=within)


def check_growth(device: str, steps: int) -> None:
    """An answer attends to the same pages as in the cache, step by step, while its pages leave the
    cache; most chosen pages have slots."""
    long = sequence(LONG + steps, None, steps, seed=2)
    rig, inside = OffloadingRig(device, HND), Rig(True, device, order=HND)
    table, there = rig.write(long), inside.write(long)
    rig.begin()
    rig.leave(table, LONG)
    for step in range(steps):
        n = LONG + step + 1
        query = long.queries[step // 4 : step // 4 + 1]  # which moves slowly
        one = Request(long.keys[:n], long.values[:n], query, SHARE)
        pages = -(-n // PAGE)
        found = rig.step([one], [table[:pages]])
        assert torch.equal(found, inside.step([one], [there[:pages]])), n
        rig.leave(table, n)
    chosen, missed = rig.memory.counts.tolist()
    assert rig.offloading.sparse == steps and missed < 0.5 * chosen


def check_host_memory(device: str) -> None:
    """Requests give host memory back, and the next one attends to its own KV. KV that is computed
    again is copied again."""
    rig = OffloadingRig(device)
    for seed in range(2):
        one, other = sequence(LONG, SHARE, seed=seed), sequence(LONG, SHARE, seed=seed + 7)
        table = rig.put(one)
        assert rig.memory.host.free_blocks == HOST_PAGES - (LONG - 1) // PAGE
        assert torch.equal(rig.step([one], [table]), Rig(True, device).step([one]))
        mixed = _mixed(one, other, 4 * PAGE)
        rig.offloading.save({"0": 4 * PAGE}, lambda _: [])
        assert rig.offloading["0"].copied == 4
        table = rig.write(mixed)
        rig.leave(table, LONG - 1)
        assert torch.equal(rig.step([mixed], [table]), Rig(True, device).step([mixed]))
        rig.offloading.begin_step({"0"}, {})
        assert rig.memory.host.free_blocks == HOST_PAGES and not rig.offloading


def _mixed(one: Request, other: Request, tokens: int) -> Any:
    """The first tokens of one, and the rest of the other."""
    keys = torch.cat([one.keys[:tokens], other.keys[tokens:]])
    values = torch.cat([one.values[:tokens], other.values[tokens:]])
    return Request(keys, values, one.queries, one.share)

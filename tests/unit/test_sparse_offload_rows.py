"""Offloaded rows in the sparse backend against those whose KV is all in the cache. No engine.

What has left the cache is overwritten with NaN, so nothing can be read from there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.sparse.backend import Request, Rig, Shape, random_sequence
from headrace_decode.sparse.engine.attention import SparseLayer
from headrace_decode.sparse.engine.page_summary_table import PageSummaryTable
from headrace_decode.sparse.offload.cpu_memory import CpuTieredMemory
from headrace_decode.sparse.offload.host_pool import HostPool
from headrace_decode.sparse.offload.offloaded_requests import OffloadedRequests

BF16 = Shape()
PAGE, PER = 32, 4
LONG, SLOTS = 2500, 5
SHARE = 0.2


class OffloadingRig(Rig):
    """A cache whose first request is offloaded.

    Args:
        host_blocks: of host memory.
        slots: blocks of its working set.
    """

    def __init__(self, blocks: int = 400, host_blocks: int = 40, slots: int = SLOTS) -> None:
        super().__init__(BF16, PAGE, True, blocks)
        keys = self.impl.sparse.keys  # type: ignore[attr-defined]
        self.summary_table = PageSummaryTable([keys], None, host_blocks * PER)
        self.impl.sparse = SparseLayer(keys, self.summary_table.summaries[0])  # type: ignore[attr-defined]
        self.host = HostPool(host_blocks, PER)
        self.memory = CpuTieredMemory([keys], self.host, self.summary_table, host_blocks * PER)
        self.offloading = OffloadedRequests(self.memory)
        if slots:
            empty = torch.zeros(slots * 128, BF16.kv_heads, BF16.head_dim, dtype=BF16.dtype)
            self.slots = (self.write(empty, empty)[::PER] // PER).tolist()
        else:
            self.slots = []

    def leave(self, table: Tensor, tokens: int) -> None:
        """A step that made so many tokens of the request final is over; cold blocks are others'."""
        assert self.offloading is not None
        self.offloading.save({"0": tokens}, lambda name: (table[::PER] // PER).tolist())
        self.cache[table[: self.held.gone].long()] = torch.nan

    def begin(self) -> None:
        """The request is offloaded."""
        assert self.offloading is not None
        self.offloading.begin_step((), {"0": self.slots})
        self.held: Any = self.offloading["0"]

    def put(self, request: Request) -> Tensor:
        """Its KV was computed by the steps before; its table."""
        table = self.write(request.keys, request.values)
        self.begin()
        self.leave(table, len(request.keys) - len(request.queries))
        return table


def of_steps(rig: Rig, batch: list[Request], tables: list[Tensor]) -> Tensor:
    """A step's attention when all summaries are made."""
    for _ in range(20):
        metadata = rig.metadata(batch, rig.common(batch, tables))
    return rig.forward(torch.cat([each.queries for each in batch]), metadata)


def plain(batch: list[Request]) -> Tensor:
    return Rig(BF16, 128, False, 200).step(batch)


@pytest.mark.parametrize("queries", [1, 5, 300])
@pytest.mark.parametrize("tokens", [LONG, 2560, 2561])
def test_a_dense_row_of_which_most_has_left_is_vllms_bit_for_bit(tokens: int, queries: int) -> None:
    request, rig = random_sequence(BF16, tokens, queries), OffloadingRig(slots=0)
    table = rig.put(request)
    assert rig.held.gone >= (tokens - queries) // 128 * PER - PER > 0
    assert torch.equal(rig.step([request], [table]), plain([request]))


@pytest.mark.parametrize("tokens", [LONG, 2560, 2561, 2600])
def test_a_sparse_row_attends_to_what_it_would_if_all_were_there(tokens: int) -> None:
    request = random_sequence(BF16, tokens, share=SHARE)
    inside, rig = Rig(BF16, PAGE, True, 400), OffloadingRig()
    wanted = of_steps(inside, [request], [inside.write(request.keys, request.values)])
    table = rig.put(request)
    assert torch.equal(of_steps(rig, [request], [table]), wanted)
    assert not torch.equal(wanted, plain([request]))
    assert rig.offloading is not None and rig.offloading.sparse > 0


def test_an_answer_that_leaves_the_cache_goes_on_as_it_did() -> None:
    request = random_sequence(BF16, LONG, share=SHARE)
    inside, rig = Rig(BF16, PAGE, True, 400), OffloadingRig()
    table = rig.write(request.keys, request.values)
    wanted = of_steps(inside, [request], [inside.write(request.keys, request.values)])
    assert torch.equal(of_steps(rig, [request], [table]), wanted), "it is in the cache"
    rig.begin()
    rig.leave(table, LONG - 1)
    assert rig.held.summarised == rig.held.copied > 0, "no summary is made twice"
    assert torch.equal(rig.step([request], [table]), wanted)
    assert rig.offloading is not None and rig.offloading.sparse == 1


def test_rows_beside_offloaded_ones_are_vllms_bit_for_bit() -> None:
    sparse, dense = random_sequence(BF16, LONG, share=SHARE), random_sequence(BF16, LONG, 200)
    others = [random_sequence(BF16, 700, 100, seed=1), random_sequence(BF16, 2300, seed=2)]
    for first in (sparse, dense):
        rig = OffloadingRig(600)
        table, tables = rig.put(first), [rig.write(each.keys, each.values) for each in others]
        output = of_steps(rig, [first, *others], [table, *tables])
        expected = plain([first, *others])
        rows = len(first.queries)
        assert torch.equal(output[rows:], expected[rows:])
        assert torch.equal(output[:rows], expected[:rows]) == (first is dense)


def test_after_its_first_step_an_answer_finds_what_it_chooses_in_all_its_slots() -> None:
    request, rig = random_sequence(BF16, LONG, share=SHARE), OffloadingRig()
    table = rig.put(request)
    of_steps(rig, [request], [table])
    assert rig.held._working is not None and not rig.held._working.has_room(0)


def test_an_answer_grows_over_many_blocks_and_little_is_waited_for() -> None:
    long, rig, inside = (
        random_sequence(BF16, 3000, 450),
        OffloadingRig(),
        Rig(BF16, PAGE, True, 400),
    )
    table = rig.write(long.keys, long.values)
    there = inside.write(long.keys, long.values)
    rig.begin()
    rig.leave(table, 2550)
    for step in range(0, 450, 5):
        n = 2551 + step
        queries = long.queries[step // 90 * 90 : step // 90 * 90 + 1]
        one = Request(long.keys[:n], long.values[:n], queries, SHARE)
        tables = [table[: -(-n // PAGE)]], [there[: -(-n // PAGE)]]
        repeats = 3 if step == 0 else 1
        for _ in range(repeats):
            found, wanted = rig.step([one], tables[0]), inside.step([one], tables[1])
        assert torch.equal(found, wanted), n
        rig.leave(table, n)
    assert rig.held.copied == 2996 // 128 * PER and rig.memory.asked > 0
    assert rig.memory.missed < 0.2 * rig.memory.asked


def test_what_has_no_working_set_attends_to_everything() -> None:
    request, rig = random_sequence(BF16, LONG, share=SHARE), OffloadingRig(slots=0)
    table = rig.put(request)
    assert torch.equal(of_steps(rig, [request], [table]), plain([request]))


def test_until_its_summaries_are_made_a_row_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_decode.sparse.offload.offloaded_requests.STEP_WORK", 20)
    request, rig = random_sequence(BF16, LONG, share=SHARE), OffloadingRig()
    table, expected = rig.put(request), plain([request])
    found = [torch.equal(rig.step([request], [table]), expected) for _ in range(6)]
    assert found == [True] * 3 + [False] * 3


def test_a_request_gives_host_memory_back_and_the_next_one_is_right() -> None:
    rig = OffloadingRig(600, host_blocks=20)
    assert rig.offloading is not None
    for seed in range(3):
        request = random_sequence(BF16, LONG, share=SHARE, seed=seed)
        inside = Rig(BF16, PAGE, True, 400)
        wanted = of_steps(inside, [request], [inside.write(request.keys, request.values)])
        table = rig.put(request)
        assert rig.host.free_blocks == 20 - 19
        assert torch.equal(of_steps(rig, [request], [table]), wanted)
        rig.offloading.begin_step({"0"}, {})
        assert rig.host.free_blocks == 20 and not rig.offloading
        rig._taken = SLOTS * PER


def test_kv_that_is_computed_again_is_copied_again() -> None:
    first, second = (random_sequence(BF16, LONG, share=SHARE, seed=seed) for seed in (1, 2))
    mixed = Request(
        torch.cat([first.keys[:1024], second.keys[1024:]]),
        torch.cat([first.values[:1024], second.values[1024:]]),
        *(second.queries, SHARE),
    )
    inside, rig = Rig(BF16, PAGE, True, 400), OffloadingRig()
    wanted = of_steps(inside, [mixed], [inside.write(mixed.keys, mixed.values)])
    table = rig.put(first)
    of_steps(rig, [first], [table])
    assert rig.offloading is not None
    rig.offloading.save({"0": 1024}, lambda name: [])
    assert rig.held.copied == 1024 // PAGE and rig.held.summarised == 1024 // PAGE
    fresh = rig.write(mixed.keys, mixed.values)
    rig.leave(fresh, LONG - 1)
    assert torch.equal(of_steps(rig, [mixed], [fresh]), wanted)


def test_more_than_host_memory_holds_is_an_error_and_not_wrong_kv() -> None:
    request, rig = random_sequence(BF16, LONG, share=SHARE), OffloadingRig(host_blocks=8)
    with pytest.raises(MemoryError, match="19 blocks of host memory, and 8 are free"):
        rig.put(request)


def test_pages_that_are_not_chosen_are_not_read() -> None:
    request, rig = random_sequence(BF16, LONG, share=SHARE), OffloadingRig()
    table = rig.put(request)
    wanted = of_steps(rig, [request], [table])
    inside = rig.held._working.pages_in(0)
    unused = np.setdiff1d(np.arange(rig.held.gone), inside[inside >= 0])
    assert len(unused)
    rig.memory.host_layers[0].cache[torch.from_numpy(rig.held.pages[unused])] = torch.nan
    assert torch.equal(rig.step([request], [table]), wanted)

"""K and V by slot in every layout, in caches and in stored bytes; what a question attends to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace_engine.kv_views import KvOrder, split_kv
from headrace_prefill.blending.engine.kv_scatter import by_token
from headrace_prefill.blending.engine.paged import BlockTable, PagedKV, stored_blocks
from headrace_prefill.blending.engine.probe import MAX_SCORES, attended

BLOCKS, HEADS, TOKENS, DIM = 6, 3, 8, 4
MEMORY = {"LBHNC": (0, 1, 2, 3), "LBNHC": (0, 2, 1, 3), "BHLNC": (0, 1, 2, 3)}
"""Order of the axes in memory by vLLM's name of a layout. In the last one, two layers share a
block's row."""


def cache(layout: str, seed: int = 0) -> torch.Tensor:
    """One layer's cache, as vLLM views it."""
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    order = MEMORY[layout]
    layers = 2 if layout == "BHLNC" else 1
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(*(shape[axis] for axis in order), layers, generator=generator)
    memory = memory.movedim(-1, 2).contiguous()[:, :, 0]
    return memory.permute(*(order.index(axis) for axis in range(4)))


CASES = [("LBHNC", KvOrder.JOINED), ("LBNHC", KvOrder.JOINED), ("BHLNC", KvOrder.JOINED)]
CASES += [("LBHNC", KvOrder.VEC)]


@pytest.mark.parametrize(("layout", "order"), CASES)
def test_what_is_put_is_gathered_and_nothing_else_changes(layout: str, order: KvOrder) -> None:
    kv = PagedKV([cache(layout), cache(layout, 1)], order, TOKENS)
    before = kv.caches[1].clone()
    slots = torch.tensor([0, 9, 47, 20])
    keys, values = torch.randn(2, 4, HEADS, DIM)
    kv.put(1, slots, keys, values)
    assert torch.equal(kv.gather(1, slots)[0], keys)
    assert torch.equal(kv.gather(1, slots)[1], values)
    assert int((kv.caches[1] != before).sum()) == 2 * keys.numel()


@pytest.mark.parametrize(("layout", "order"), CASES)
def test_what_is_added_is_added_and_nothing_else_changes(layout: str, order: KvOrder) -> None:
    kv = PagedKV([cache(layout), cache(layout, 1)], order, 2 * TOKENS)
    table, before = BlockTable(np.array([2, 0]), 2 * TOKENS), kv.caches[1].clone()
    slots = torch.from_numpy(table.slots(np.arange(5, 26)))
    placed, more = kv.gather(1, slots), torch.randn(2, 21, HEADS, DIM)
    kv.add(1, table, 5, *more)
    for found, old, by in zip(kv.gather(1, slots), placed, more, strict=True):
        assert torch.equal(found, old + by)
    assert int((kv.caches[1] != before).sum()) == more.numel()


def test_cuda_keeps_a_tokens_key_and_value_in_one_row() -> None:
    one = cache("LBNHC")
    kv = PagedKV([one], KvOrder.JOINED, TOKENS)
    keys, values = kv.gather(0, torch.tensor([2 * TOKENS + 5]))
    assert torch.equal(torch.cat([keys[0], values[0]], 1), one[2, :, 5])


def test_the_cpu_keeps_a_blocks_keys_by_channel() -> None:
    one = cache("LBHNC")
    keys, _ = PagedKV([one], KvOrder.VEC, TOKENS).gather(0, torch.tensor([2 * TOKENS + 5]))
    flat = one[2, 1].flatten()
    assert torch.equal(keys[0, 1], flat[[channel * TOKENS + 5 for channel in range(DIM)]])


@pytest.mark.parametrize(("layout", "order"), CASES)
def test_stored_bytes_read_as_the_cache_does(layout: str, order: KvOrder) -> None:
    one = cache(layout)
    axes = MEMORY[layout]
    in_order = one.permute(*axes).contiguous()
    stored = stored_blocks(in_order.flatten(1).view(torch.uint8), one)
    for found, wanted in zip(split_kv(stored, order), split_kv(one, order), strict=True):
        assert torch.equal(found, wanted)


def test_a_schedulers_block_is_several_of_the_kernels() -> None:
    kv = PagedKV([cache("LBNHC")], KvOrder.JOINED, 2 * TOKENS)
    table = BlockTable(np.array([2, 0]), 2 * TOKENS)
    assert kv.kernel_blocks(table).tolist() == [4, 5, 0, 1]
    assert table.slots(np.array([0, 9, 17])).tolist() == [32, 41, 1]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_a_stored_block_of_several_kernel_blocks_reads_token_by_token(layout: str) -> None:
    one = cache(layout)
    pair = one[2:4].permute(*MEMORY[layout]).contiguous()
    stored = stored_blocks(pair.view(1, -1).view(torch.uint8), one)
    slots = torch.arange(2 * TOKENS, 4 * TOKENS)
    wanted = PagedKV([one], KvOrder.JOINED, 2 * TOKENS).gather(0, slots)
    for found, half in zip(split_kv(stored, KvOrder.JOINED), wanted, strict=True):
        assert torch.equal(by_token(found), half)


def test_a_position_outside_its_blocks_is_refused() -> None:
    with pytest.raises(IndexError, match="32 with blocks"):
        BlockTable(np.array([2, 0]), 16).slots(np.array([3, 32]))


@pytest.mark.parametrize("most", [MAX_SCORES, 1])
def test_rows_attend_by_softmax_to_what_they_see(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_prefill.blending.engine.probe.MAX_SCORES", most)
    queries, keys, values = torch.randn(3, 4, DIM), torch.randn(10, 2, DIM), torch.randn(10, 2, DIM)
    seen = np.array([3, 8, 10])
    mass, mixed = torch.zeros(10), torch.zeros(3, 4, DIM)
    for row, count in enumerate(seen):
        for head in range(4):
            scores = keys[:count, head // 2] @ queries[row, head] * 0.5
            mass[:count] += scores.softmax(0) / 4
            mixed[row, head] = scores.softmax(0) @ values[:count, head // 2]
    found, counted = attended(queries, keys, values, seen, 0.5)
    assert torch.allclose(found, mixed, atol=1e-6)
    assert torch.allclose(counted, mass, atol=1e-6)

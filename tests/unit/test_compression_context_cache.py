"""An incrementally compressed context is found again, until others need its blocks."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash

from headrace_decode.attention.offload.block_manager import CompressionSpec, OffloadBlockManager
from headrace_decode.compression.engine.context_cache import CachedContext, ContextCache


@given(
    added=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=20),
    lost=st.sets(st.integers(1, 20)),
    prompt=st.lists(st.integers(0, 5), max_size=6),
    most=st.integers(0, 6),
)
def test_the_longest_begin_that_is_there_is_found(
    added: list[tuple[int, int]], lost: set[int], prompt: list[int], most: int
) -> None:
    remembered = ContextCache(lambda number, _: number not in lost)
    naive: dict[bytes, CachedContext] = {}
    for number, held in added:
        key = bytes([number])
        known = key in naive and naive[key].number not in lost
        kept = remembered.add(key, held)
        assert (kept is None) == known
        if kept is not None:
            assert kept.held == held and kept.number not in {each.number for each in naive.values()}
            naive[key] = kept
    hashes = [bytes([number]) for number in prompt]
    there = [
        (blocks, naive[key])
        for blocks, key in enumerate(hashes[:most], 1)
        if key in naive and naive[key].number not in lost and blocks >= 0.75 * len(prompt)
    ]
    assert remembered.longest(hashes, most) == (there[-1] if there else None)
    gone = {each.number for each in naive.values() if each.number in lost}
    assert remembered.evict() == gone and len(remembered) == len(naive) - len(gone)
    left = [each.number for each in naive.values() if each.number not in lost]
    assert remembered.evict(left[:1]) == set(left[:1])


def manager_of(blocks: int) -> OffloadBlockManager:
    init_none_hash(sha256)
    spec = CompressionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    pool: Any = BlockPool(blocks, enable_caching=True, hash_block_size=16)
    told = {"block_pool": pool, "enable_caching": True, "kv_cache_group_id": 0}
    return OffloadBlockManager(spec, scheduler_block_size=16, **told)


def test_blocks_are_found_while_they_are_free_and_gone_when_others_have_them() -> None:
    manager, kept = manager_of(11), (1, 2)
    manager.allocate_new_blocks("x", 16 * 6, 16 * 6)
    slots = manager.drop("x", 2, 4)
    assert not manager.has_slots(*kept)
    manager.cache_slots("x", 1)
    manager.free("x")
    assert manager.has_slots(*kept) and manager.block_pool.get_num_free_blocks() == 10

    manager.assign_cached_slots("y", *kept, 4)
    assert manager.slots("y") == slots and manager.held("y") == 2
    manager.assign_cached_slots("z", *kept, 4)
    manager.allocate_new_blocks("y", 16 * 5, 16 * 5)
    assert [block.is_null for block in manager.req_to_blocks["y"]] == [True] * 4 + [False]
    manager.free("y")
    assert manager.held("z") == 2 and manager.has_slots(*kept)
    manager.free("z")

    manager.allocate_new_blocks("other", 16 * 8, 16 * 8)
    assert manager.has_slots(*kept), "what nobody remembers is taken first"
    manager.allocate_new_blocks("another", 16, 16)
    assert not manager.has_slots(*kept)

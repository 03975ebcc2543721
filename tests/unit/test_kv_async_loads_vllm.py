"""Loads ahead in vLLM's own scheduler, with both sides of the connector; nobody computes.

Where vLLM moves, mend `engine/headrace_engine/connector/connector.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.v1.request import RequestStatus

from headrace_kvstore.blocks.slot_record import READY
from tests.support.scheduled import BLOCK, Scheduled


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Scheduled]:
    made = Scheduled(tmp_path)
    yield made
    made.close()


def busy(engine: Scheduled) -> None:
    """Another request decodes; every load is made ahead."""
    engine.add("other", 100, 1000)
    engine.step()
    engine.connector._price.ahead = lambda *_: True


def test_others_decode_while_a_request_loads_and_it_then_has_its_kv(engine: Scheduled) -> None:
    held = engine.served("first", 5 * BLOCK + 10)
    busy(engine)
    again = engine.add("again", 5 * BLOCK + 10, 3)
    engine.steps.clear()
    engine.step()
    assert again.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.steps == [{"other": 1}]
    engine.until(lambda: "again" in engine.steps[-1])
    assert engine.steps[-1] == {"other": 1, "again": 10}, "the rest is computed"
    [blocks] = engine.scheduler.kv_cache_manager.get_block_ids("again")
    for cache, truth in zip(engine.caches.values(), held, strict=True):
        assert torch.equal(engine.blocks(cache)[blocks[:5]], truth)
    engine.until(lambda: again.is_finished())


def test_what_does_not_come_is_computed(engine: Scheduled) -> None:
    engine.served("first", 5 * BLOCK + 10)
    arena = engine.connector.arena
    [slot] = [s for s in arena.table["depth"].nonzero()[0] if arena.table["depth"][s] == 3]
    arena.view(int(slot))[1000] ^= 1
    busy(engine)
    again = engine.add("again", 5 * BLOCK + 10, 3)
    engine.until(lambda: "again" in engine.steps[-1])
    assert engine.steps[-1]["again"] == 2 * BLOCK + 10
    engine.until(lambda: again.is_finished())


def test_of_nothing_that_came_all_is_found_under_the_step_or_computed(engine: Scheduled) -> None:
    engine.served("first", BLOCK + 10)
    arena = engine.connector.arena
    [slot] = (arena.table["state"] == READY).nonzero()[0]
    arena.view(int(slot))[1000] ^= 1
    busy(engine)
    again = engine.add("again", BLOCK + 10, 3)
    engine.until(lambda: again.is_finished())


def test_a_request_that_is_aborted_while_it_loads_gives_its_blocks_back(engine: Scheduled) -> None:
    engine.served("first", 5 * BLOCK + 10)
    pool = engine.scheduler.kv_cache_manager.block_pool
    busy(engine)
    free = pool.get_num_free_blocks()
    engine.add("again", 5 * BLOCK + 10, 3)
    engine.step()
    assert pool.get_num_free_blocks() < free
    engine.scheduler.finish_requests("again", RequestStatus.FINISHED_ABORTED)
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert pool.get_num_free_blocks() == free


def test_all_of_a_prompt_that_fills_most_of_the_cache_is_saved(engine: Scheduled) -> None:
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    engine.served("long", 31 * BLOCK + 10)
    assert (engine.connector.arena.table["state"] == READY).sum() == 31
    assert pool.get_num_free_blocks() == free and not engine.connector.scheduler.counts["save_busy"]

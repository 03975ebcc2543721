"""The queue of blocks that an engine saves, if they have several cache groups."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from headrace_engine.connector.save_queue import SaveQueue
from headrace_engine.connector.store_work import BlockSave
from tests.support.kvscheduling import Store


class Pool:
    """vLLM's block pool, of blocks with a count of references."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [SimpleNamespace(ref_cnt=0) for _ in range(blocks)]

    def touch(self, blocks: list[SimpleNamespace]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[SimpleNamespace]) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return sum(not block.ref_cnt for block in self.blocks)


def made(places: int, groups: int) -> BlockSave:
    names = [b"%d" % n for n in range(places)]
    blocks = [[1 + group * places + n for n in range(places)] for group in range(groups)]
    return BlockSave(blocks, names, [b"", *names[:-1]], [*range(places)])


@pytest.mark.parametrize("groups", [1, 2, 7])
def test_blocks_of_all_groups_count_towards_what_is_copied_at_once(groups: int) -> None:
    pool, counts = Pool(1000), Counter[str]()
    queue = SaveQueue(Store(), counts)
    queue.bind(pool)
    save = made(700 // groups, groups)
    queue.add(save)
    assert pool.get_num_free_blocks() == 1000 - save.engine_blocks
    copied: list[bytes] = []
    while queue.busy:
        begun = queue.step()
        assert 0 < queue.copied_blocks <= 250
        for each in begun.values():
            assert [len(group) for group in each.blocks] == [len(each.hashes)] * groups
            copied += each.hashes
        queue.end(begun)
    assert copied == save.hashes and pool.get_num_free_blocks() == 1000


def test_waiting_blocks_of_all_groups_yield() -> None:
    pool, counts = Pool(1000), Counter[str]()
    queue = SaveQueue(Store(), counts)
    queue.bind(pool)
    queue.add(made(490, 2))
    queue.yield_room()
    assert 62 <= pool.get_num_free_blocks() < 62 + 250
    assert counts["save_busy"] == (pool.get_num_free_blocks() - 20) // 2


def test_blocks_that_a_request_has_too_will_not_be_free() -> None:
    pool = Pool(100)
    queue = SaveQueue(Store(), Counter())
    queue.bind(pool)
    pool.touch(pool.blocks[1:3])
    assert not queue.frees_blocks
    queue.add(made(1, 2))
    assert not queue.frees_blocks
    pool.free_blocks(pool.blocks[2:3])
    assert queue.frees_blocks

"""The saves of long prompts: how much of an engine's cache they hold, and what they give up."""

from __future__ import annotations

import pytest

from headrace_engine.connector.save_queue import JOB_BLOCKS
from headrace_engine.connector.store_work import StoreWork
from tests.support.kvscheduling import B, Engine, Pool, Store, request, saved


class Long(Engine):
    """A prompt of so many blocks, in an engine of `cache` blocks.

    Args:
        store: has none of them.
        other: blocks of the cache that others hold.
    """

    def __init__(self, blocks: int, cache: int, other: int = 0) -> None:
        super().__init__(Store(), request(blocks * B))
        self.pool = Pool(cache)
        self.scheduler.bind(self.pool)
        self.pool.touch(range(cache - other, cache))
        self.pool.touch(self.blocks)
        self.others = other
        self.copied: list[int] = []
        self.admit()

    def prefill(self, step: int, copies: bool = True) -> None:
        """Compute it in steps of so many blocks; copies end with the step that comes next."""
        left = self.request.num_tokens
        while left:
            tokens = min(step * B, left)
            work = self.step(tokens, new=left == self.request.num_tokens)
            self.comes_back(tokens)
            left -= tokens
            if copies:
                self.copy(work)

    def copy(self, work: StoreWork) -> None:
        assert all(len(save.hashes) <= JOB_BLOCKS for save in work.saves.values())
        self.copied += saved(work)
        self.scheduler.saved(work.saves)

    def ends(self) -> None:
        self.scheduler.finished(self.request, [self.blocks])
        self.pool.free_blocks(self.blocks)

    def drains(self) -> None:
        for _ in range(100):
            if not self.scheduler.busy:
                return
            self.copy(self.idle())
        raise AssertionError("blocks are held for ever")


@pytest.mark.parametrize(
    ("blocks", "step", "cache"),
    [
        (2048, 512, 4096),  # 32,768 tokens in steps of 8,192
        (2048, 512, 2200),  # that fill the cache nearly
        (8192, 1024, 9500),  # 131,072 in steps of 16,384
        (512, 512, 4096),
        (37, 5, 64),
    ],
)
@pytest.mark.parametrize("copies", [True, False], ids=["at once", "after the request"])
def test_all_of_a_long_prompt_is_saved(blocks: int, step: int, cache: int, copies: bool) -> None:
    engine = Long(blocks, cache)
    engine.prefill(step, copies)
    held = engine.scheduler.save_queue.copied_blocks
    assert held <= cache / 4, "no more is copied at once"
    begun = saved(StoreWork(saves=engine.scheduler.save_queue.jobs))
    engine.ends()
    engine.scheduler.saved(list(engine.scheduler.save_queue.jobs))
    engine.drains()
    assert sorted(engine.copied + begun) == engine.blocks[:blocks]
    assert engine.pool.held == [] and not engine.scheduler.counts["save_busy"]


def test_only_a_quarter_of_the_cache_is_copied_at_once() -> None:
    engine = Long(400, 1000)
    engine.prefill(400)
    work = engine.step(1)
    assert len(saved(work)) == 250
    engine.comes_back(1)
    assert saved(engine.step(1)) == []
    engine.scheduler.saved(work.saves)
    engine.comes_back(1)
    assert len(saved(engine.step(1))) == 150


def test_what_waits_for_its_copy_is_let_go_if_requests_need_the_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Long(800, 1000)
    engine.prefill(800)
    engine.ends()
    work = engine.idle()
    assert len(saved(work)) == 250 and len(engine.pool.held) == 800
    engine.pool.touch(range(850, 1000))
    engine.scheduler.saved([])
    engine.copied += saved(engine.idle())
    free = engine.pool.get_num_free_blocks()
    assert 62 <= free < 62 + 250, "no more than is needed"
    gone = engine.scheduler.counts["save_busy"]
    assert gone and len([r for r in caplog.records if "not saved" in r.message]) == 1
    engine.scheduler.saved(work.saves)
    engine.drains()
    kept = sorted(engine.copied + saved(work))
    assert kept == engine.blocks[: 800 - gone], "the start of the prefix is saved"


def test_a_full_cache_gets_the_room_of_a_request_that_ends_before_the_next_step() -> None:
    engine = Long(400, 1000, other=580)
    engine.prefill(400)
    engine.step(1)
    engine.comes_back(1)
    engine.ends()
    assert engine.pool.get_num_free_blocks() >= 62


def test_requests_that_end_together_are_all_saved() -> None:
    engine = Long(100, 4000)
    engine.prefill(100)
    engine.step(1)
    engine.comes_back(1)
    for n in range(20):
        twin = request(100 * B, request_id=f"twin {n}", num_computed_tokens=100 * B)
        twin.block_hashes = [b"%d %d" % (n, i) for i in range(100)]
        engine.scheduler.added(twin)
        engine.scheduler._requests[twin.request_id].scheduled = 100 * B
        engine.scheduler.finished(twin, [range(1000 + 100 * n, 1100 + 100 * n)])
    engine.ends()
    engine.scheduler.saved(list(engine.scheduler.save_queue.jobs))
    engine.drains()
    assert sorted(engine.copied) == list(range(1000, 3000))

"""Who holds what: runs of blocks by node and medium, gaps, and nodes that go."""

from __future__ import annotations

import pytest

from headrace_kvstore.peers.block_directory import BlockDirectory, Event
from headrace_kvstore.protocol.events import DRAM, NVME, AllBlocksCleared, BlockRemoved, BlockStored
from tests.support.kvnode import DIGEST, keys

BOTH = (DRAM, NVME)


def stored(*numbers: int, medium: str = DRAM, digest: bytes = DIGEST) -> Event:
    return BlockStored(*(keys(*numbers), None, [], 0, None, medium, None), ownership=digest.hex())


def removed(*numbers: int, medium: str = DRAM) -> Event:
    return BlockRemoved(list(keys(*numbers)), medium, ownership=DIGEST.hex())


def test_a_run_ends_at_the_first_block_that_is_nowhere() -> None:
    directory = BlockDirectory()
    directory.apply("a", 0, [AllBlocksCleared(), stored(0, 1, 3), stored(1, 2, medium=NVME)])
    wanted = keys(0, 1, 2, 4, 3)
    assert directory.leading("a", DIGEST, wanted, BOTH) == [DRAM, DRAM, NVME]
    assert directory.leading("a", DIGEST, wanted, (DRAM,)) == [DRAM, DRAM]
    assert directory.leading("a", b"another-digest-!", wanted, BOTH) == []
    assert directory.leading("b", DIGEST, wanted, BOTH) == []


def test_blocks_that_a_node_holds_in_any_medium() -> None:
    directory = BlockDirectory()
    directory.apply("a", 0, [AllBlocksCleared(), stored(0), stored(3, medium=NVME)])
    assert directory.contains("a", DIGEST, keys(0, 1, 3)) == [True, False, True]
    assert directory.contains("a", b"another-digest-!", keys(0)) == [False]
    assert directory.contains("b", DIGEST, keys(0, 1)) == [False, False]


def test_a_block_in_two_media_is_told_by_the_faster_and_stays_in_the_other() -> None:
    directory = BlockDirectory()
    both = [stored(0), stored(0, medium=NVME)]
    directory.apply("a", 0, [AllBlocksCleared(), *both])
    assert directory.leading("a", DIGEST, keys(0), BOTH) == [DRAM]
    assert directory.apply("a", 1, [removed(0)])
    assert directory.leading("a", DIGEST, keys(0), BOTH) == [NVME]


def test_before_a_whole_state_nothing_is_taken() -> None:
    directory = BlockDirectory()
    assert not directory.apply("a", 7, [stored(0)])
    assert directory.apply("a", 7, [AllBlocksCleared(), stored(1)])
    assert directory.wanted("a") == 8


def test_a_gap_is_refused_and_an_old_batch_is_skipped() -> None:
    directory = BlockDirectory()
    directory.apply("a", 0, [AllBlocksCleared()])
    assert not directory.apply("a", 2, [stored(2)])
    assert directory.wanted("a") == 1
    assert directory.apply("a", 1, [stored(1)]) and directory.apply("a", 2, [stored(2)])
    assert directory.apply("a", 1, [removed(1)])
    assert directory.blocks("a", DRAM) == 2


def test_events_of_an_engine_say_nothing_of_a_store() -> None:
    directory = BlockDirectory()
    engine = BlockStored([5, b"x" * 32], None, [1, 2], 2, None, "GPU", None)
    assert directory.apply("a", 0, [AllBlocksCleared(), engine])
    assert directory.blocks("a", "GPU") == 0


def test_a_node_that_goes_is_forgotten_alone() -> None:
    directory = BlockDirectory()
    for node in ("a", "b"):
        directory.apply(node, 0, [AllBlocksCleared(), stored(0)])
    directory.drop("a")
    directory.drop("c")
    assert directory.wanted("a") == 0 and directory.wanted("b") == 1


def test_blocks_that_there_is_no_room_for_are_counted_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = BlockDirectory(most_blocks=3)
    directory.apply("a", 0, [AllBlocksCleared(), stored(0, 1)])
    directory.apply("b", 0, [AllBlocksCleared(), stored(2)])
    assert directory.dropped == 0
    directory.apply("b", 1, [stored(3, 4)])
    directory.apply("b", 2, [stored(5)])
    assert directory.dropped == 3
    [said] = caplog.messages
    assert "more than the 3 blocks" in said
    assert directory.leading("b", DIGEST, keys(2, 3), BOTH) == [DRAM]

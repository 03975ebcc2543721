"""The follower of an arena's events: what it publishes is of the right namespace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace_kvstore.arena.geometry import NAMESPACES
from headrace_kvstore.node.arena_follower import ArenaFollower
from headrace_kvstore.protocol.events import Change
from tests.support.kvarena import BLOCK, DIGEST, LAYERS, Make, block_hash, store
from tests.support.kvnode import until


class Writer:
    """Writes nothing behind."""

    missed, idle = False, True

    def __init__(self, has_disk: bool = False) -> None:
        self.has_disk = has_disk

    def offer(self, row: int, hashes: Sequence[bytes]) -> None:
        pass


def test_blocks_of_a_row_that_another_namespace_got_are_told_under_no_wrong_name(
    make: Make,
) -> None:
    arena = make(blocks=16)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS, keep=False)
    for number in range(1, NAMESPACES):
        arena.register_namespace(number.to_bytes(16), BLOCK, LAYERS)
    store(arena, row, 1)
    told: list[Change] = []
    resyncs: list[None] = []
    follower = ArenaFollower(arena, Writer(), told.extend, lambda: resyncs.append(None), 60.0)  # type: ignore[arg-type]
    until(lambda: len(resyncs) == 1)
    store(arena, row, 2)
    until(lambda: [(c.stored, c.digest) for c in told] == [(True, DIGEST)])
    assert arena.register_namespace(b"another--digest!", BLOCK, LAYERS) == row
    until(lambda: len(resyncs) == 2)
    assert len(told) == 1, "a removal was told under another namespace's name"
    store(arena, row, 3)
    until(lambda: len(told) == 2)
    assert (told[1].digest, told[1].hash) == (b"another--digest!", block_hash(3))
    assert follower.close(10)


@pytest.mark.parametrize("has_disk", [False, True])
def test_missed_blocks_are_swept_only_if_there_is_a_disk(make: Make, has_disk: bool) -> None:
    arena, writer = make(blocks=16), Writer(has_disk)
    follower = ArenaFollower(arena, writer, lambda changes: None, lambda: None, 0.0)  # type: ignore[arg-type]
    until(lambda: follower.caught_up)
    writer.missed = True
    if has_disk:
        until(lambda: follower.sweeps == 1)
    assert follower.caught_up
    assert follower.close(10) and follower.sweeps == has_disk

"""The worker's side of the store's connector: bytes go out, come back, and are never trusted."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace_engine.connector.arena.arena_index import ArenaIndex
from headrace_engine.connector.messages import StepSample
from headrace_engine.connector.store_work import BlockLoad, BlockSave, StepShape, StoreWork
from headrace_engine.connector.worker_connector import WorkerConnector, tenant_number
from headrace_kvstore.arena.arena import Arena, LockBusyError
from tests.support.kvworker import HASHES, LAYER_BYTES, LAYERS, NAMES, Node, save


def load(worker: WorkerConnector, blocks: list[int]) -> set[int]:
    worker.begin(StoreWork(load=BlockLoad([blocks], [HASHES[b] for b in blocks])))
    for name in NAMES:
        worker.wait(name)
    worker.end()
    return worker.failed_blocks()


def test_what_one_engine_saved_another_loads(node: Node) -> None:
    first, ours, _ = node.engine(1)
    second, theirs, _ = node.engine(2)
    save(first, [0, 2, 5])
    assert load(second, [0, 2, 5]) == set()
    assert (theirs.data[:, [0, 2, 5]] == ours.data[:, [0, 2, 5]]).all()
    assert not (theirs.data[:, 1] == ours.data[:, 1]).all()
    assert first.counts == Counter(saved=3) and second.counts == Counter(loaded_dram=3)
    [(medium, blocks, seconds)] = second.loads()
    assert (medium, blocks) == ("dram", 3) and seconds > 0
    assert second.loads() == [], "each is told once"


def test_a_block_that_is_gone_is_reported_and_the_others_arrive(node: Node) -> None:
    worker, cache, _ = node.engine(1)
    save(worker, [0, 1])
    truth = cache.data[:, :2].copy()
    cache.data[:] = 0
    assert load(worker, [0, 1, 2]) == {2}
    assert (cache.data[:, :2] == truth).all()
    assert worker.failed_blocks() == set(), "reported once"


def test_nothing_there_at_all(node: Node) -> None:
    worker, _, _ = node.engine(1)
    assert load(worker, [3, 4]) == {3, 4}


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_flipped_bit_is_seen_and_the_block_dropped(node: Node, layer: int) -> None:
    worker, _, arena = node.engine(1)
    save(worker, [0, 1])
    [slot] = arena.lookup(0, [HASHES[1]])
    arena.view(int(slot))[layer * LAYER_BYTES + 7] ^= 4
    assert load(worker, [0, 1]) == {1}
    until(lambda: list(arena.lookup(0, HASHES[:2]) >= 0) == [True, False])
    save(worker, [1], job=2)
    assert load(worker, [1]) == set()


def test_a_block_that_was_overwritten_while_it_was_read_is_gone_and_not_dropped_elsewhere(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease could not be had: the slot goes to others, and the block is stored again."""
    worker, cache, arena = node.engine(1)
    save(worker, [0, 1])
    [slot] = arena.lookup(0, HASHES[1:2])
    read, layers = cache.load, []

    def load_late(layer: int, *rest: np.ndarray) -> np.ndarray:
        if not layers:
            arena.discard(0, HASHES[1:2])
            [other] = arena.reserve(0, [HASHES[2]], [0], [0])
            assert other == slot
            arena.view(int(other))[:] = 120
            save(node.engine(1)[0], [1])
        layers.append(layer)
        return read(layer, *rest)

    monkeypatch.setattr(cache, "load", load_late)
    assert load(worker, [0, 1]) == {1}
    assert worker.counts["lost_gone"] == 1 and not worker.counts["lost_corrupt_dram"]
    worker._saver.submit(lambda: None).result(20)
    assert arena.lookup(0, HASHES[1:2])[0] >= 0, "the copy elsewhere stays"


def test_a_load_that_cannot_begin_costs_its_blocks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _, _ = node.engine(1)
    save(worker, [0, 1])

    def broken(_: np.ndarray) -> np.ndarray:
        raise ValueError("slots of more than one namespace")

    monkeypatch.setattr(worker.arena, "sums", broken)
    assert load(worker, [0, 1]) == {0, 1}
    monkeypatch.undo()
    assert load(worker, [0, 1]) == set()


def test_a_save_without_room_ends_and_costs_nothing(node: Node) -> None:
    worker, _, arena = node.engine(1)
    save(worker, [0])
    many = [i.to_bytes(4, "big") for i in range(100_000, 110_000)]
    slots = arena.reserve(0, many, [0] * len(many), [0] * len(many))
    assert (slots < 0).any()
    save(worker, [3], job=2)
    assert (worker.counts["saved"], worker.counts["save_no_room"]) == (1, 1)
    arena.abandon(slots)


def test_a_cache_that_fails_loses_no_step(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker, cache, arena = node.engine(1)
    save(worker, [0, 1])

    def broken(*_: object) -> np.ndarray:
        raise MemoryError("no")

    monkeypatch.setattr(cache, "load", broken)
    assert load(worker, [0, 1]) == {0, 1}
    monkeypatch.setattr(cache, "save", broken)
    save(worker, [2], job=2)
    assert arena.lookup(0, [HASHES[2]])[0] == -1
    monkeypatch.undo()
    save(worker, [2], job=3)
    assert load(worker, [0, 2]) == set()


def test_a_step_that_computes_a_prompt_is_measured_without_its_waits(node: Node) -> None:
    worker, _, _ = node.engine(1)
    worker.open()
    worker.begin(StoreWork(shape=StepShape(100, 2, 0, 60, 5050)))
    worker.end()
    [sample] = worker.samples()
    assert isinstance(sample, StepSample)
    assert sample[:5] == (100, 2, 0, 60, 5050) and sample.seconds > 0
    worker.open()
    worker.begin(StoreWork())
    worker.end()
    assert worker.samples() == []


def test_what_another_writer_stored_first_is_not_copied_twice(node: Node) -> None:
    first, _, arena = node.engine(1)
    second, _, _ = node.engine(2)
    slots = arena.reserve(0, [HASHES[1]], [0], [1])
    save(first, [0, 1])
    assert first.counts == Counter(saved=1, save_not_needed=1)
    arena.abandon(slots)
    save(second, [0, 1])
    assert second.counts == Counter(saved=1, save_not_needed=1)


def test_layers_that_are_not_ours_are_not_waited_for(node: Node) -> None:
    worker, _, _ = node.engine(1)
    save(worker, [0])
    worker.begin(StoreWork(load=BlockLoad([[0]], HASHES[:1])))
    worker.wait("draft.layers.0.attn")
    worker.end()
    assert worker.failed_blocks() == set()


def test_tenants_are_told_apart() -> None:
    assert tenant_number("") == 0
    assert len({tenant_number(str(i)) for i in range(1000)} - {0}) == 1000


def leased(arena: Arena) -> int:
    return int(arena.stats()["leased"])


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < limit, "it does not come about"
        time.sleep(0.002)


def test_leases_are_given_back_when_the_load_is_done(node: Node) -> None:
    worker, _, arena = node.engine(1)
    save(worker, [0, 1])
    arena.lease(0, HASHES[:2], 30.0)
    arena.lease(0, HASHES[:1], 30.0)  # another engine reads it, too
    assert leased(arena) == 2
    assert load(worker, [0, 1]) == set()
    until(lambda: leased(arena) == 1)


def test_a_lock_that_somebody_keeps_holds_up_no_step_and_ends_none(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _, arena = node.engine(1)
    _, _, holder = node.engine(2)
    save(worker, [0, 1])
    [slot] = arena.lookup(0, [HASHES[1]])
    arena.view(int(slot))[7] ^= 4
    monkeypatch.setattr(arena.section, "_patience_s", 3600.0)
    done = threading.Event()

    def step() -> None:
        index = ArenaIndex(arena, 0, 30.0)
        assert index.leading(HASHES[:2]) == 2
        index.lease(HASHES[:2])
        assert load(worker, [0, 1]) == {1}
        done.set()

    with holder.section:
        engine = threading.Thread(target=step, daemon=True)
        engine.start()
        assert done.wait(20), "a step waits for a lock"
    until(lambda: list(arena.lookup(0, HASHES[:2]) >= 0) == [True, False])


def test_an_arena_that_fails_after_a_load_ends_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _, arena = node.engine(1)
    save(worker, [0])

    def busy(*_: object) -> None:
        raise LockBusyError("the lock is held")

    monkeypatch.setattr(arena, "release", busy)
    assert load(worker, [0]) == set()
    save(worker, [1], job=2)
    assert worker.counts["saved"] == 2


def replace_arena(node: Node, old: Arena) -> tuple[Arena, int]:
    """Another arena under the same name, in which the engine's namespace has another row."""
    old.unlink()
    new = Arena.create_or_attach(
        "a", 4 << 20, folder=node.folder, block_bytes=LAYERS * LAYER_BYTES, layers=LAYERS
    )
    assert old.replaced() and not new.replaced()
    new.register_namespace(b"o" * 16, LAYERS * LAYER_BYTES, LAYERS)
    return new, new.register_namespace(b"n" * 16, LAYERS * LAYER_BYTES, LAYERS)


def test_a_worker_moves_to_an_arena_that_took_the_name_and_lets_the_old_one_go(
    node: Node,
) -> None:
    worker, cache, old = node.engine(1)
    index = ArenaIndex(old, 0, 30.0)
    save(worker, [0, 1])
    new, row = replace_arena(node, old)
    until(worker.prepare_to_move)
    worker.move(new, row)
    index.move(new, row)
    assert index.leading(HASHES[:2]) == 0
    save(worker, [2, 3], job=2)
    assert index.lacking(HASHES[:4]) == [True, True, False, False]
    truth = cache.data[:, 2].copy()
    cache.data[:, 2] = 0
    assert load(worker, [2]) == set() and (cache.data[:, 2] == truth).all()
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in open_descriptors()]
    assert not [f for f in open_files if f.startswith(str(node.folder)) and "(deleted)" in f]
    assert not [m for m in Path("/proc/self/maps").read_text().splitlines() if removed(m, node)]


def open_descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def removed(line: str, node: Node) -> bool:
    return str(node.folder) in line and line.endswith("(deleted)")


def test_a_worker_moves_only_when_nothing_uses_the_old_arena(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, cache, _ = node.engine(1)
    copies, go = threading.Event(), threading.Event()
    plain = cache.save

    def slow(*given: np.ndarray) -> np.ndarray:
        copies.set()
        assert go.wait(20)
        return plain(*given)

    monkeypatch.setattr(cache, "save", slow)
    worker.begin(StoreWork(saves={1: BlockSave([[0]], HASHES[:1], [b""], [0])}))
    worker.end()
    assert copies.wait(20) and not worker.prepare_to_move()
    worker.begin(StoreWork(saves={2: BlockSave([[1]], HASHES[1:2], [b""], [0])}))
    worker.end()
    assert worker.finished_jobs() == [2], "an engine that always saves would never move"
    go.set()
    until(worker.prepare_to_move)
    assert worker.finished_jobs() == [1] and worker.counts["saved"] == 1

"""Engines of several ranks over one store, without a model: whole blocks, whoever reads them.

Slow to import, not to run.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from headrace_engine.connector.messages import LoadSample, StepSample, WorkerReport, slowest
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.sharding import heads_are_contiguous
from headrace_kvstore.blocks.slot_record import WRITING
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.record import BlockShape, WriteRequest
from tests.support.machine import until
from tests.support.ranks import DRAM_BYTES, HASHES, Model, RankedEngine

GQA = Model(heads=4)
MODELS = {
    "GQA": GQA,
    "MQA": Model(heads=1),
    "MLA": Model(heads=1, latent=True),
    "YOCO": Model(heads=4, own=(0, 1, 2), borrowed=((3, 2), (4, 2), (5, 2))),
    "CLA": Model(heads=4, own=(0, 2, 4), borrowed=((1, 0), (3, 2), (5, 4))),
}
SAVED = [0, 2, 3, 5]

Make = Callable[..., RankedEngine]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Make]:
    """Makes engines over one arena."""
    name, made = f"ranks-{uuid.uuid4().hex[:8]}", []

    def make(model: Model, ranks: int, seed: int = 0, **options: object) -> RankedEngine:
        made.append(
            RankedEngine(model, ranks, {"name": name, "folder": str(tmp_path)}, seed, **options)
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def arena(engine: Make, tmp_path: Path) -> Iterator[Arena]:
    """That of the engines that were made."""
    engine(GQA, 1)
    [path] = tmp_path.glob("ranks-*")
    with Arena.create_or_attach(path.name, DRAM_BYTES, folder=tmp_path) as arena:
        yield arena


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("writers", "readers"), [*itertools.product((1, 2, 4), repeat=2)])
def test_what_engines_of_one_size_save_engines_of_any_size_load_byte_for_byte(
    engine: Make, kind: str, writers: int, readers: int
) -> None:
    model = MODELS[kind]
    truth, other = model.kv(1), model.kv(2)
    first, second = engine(model, writers, seed=1), engine(model, readers, seed=2)
    first.save(SAVED)
    assert second.load(SAVED) == set()
    assert (second.content()[:, SAVED] == truth[:, SAVED]).all()
    assert (second.content()[:, [1, 4]] == other[:, [1, 4]]).all(), "nothing else is touched"


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_in_every_layout_an_engine_of_the_same_size_reads_them(
    engine: Make, layout: KVCacheLayout
) -> None:
    first = engine(GQA, 2, seed=1, layout=layout)
    second = engine(GQA, 2, seed=2, layout=layout)
    first.save(SAVED)
    assert second.load(SAVED) == set()
    assert (second.content()[:, SAVED] == GQA.kv(1)[:, SAVED]).all()


def test_where_tokens_hold_all_heads_engines_of_other_sizes_are_strangers(engine: Make) -> None:
    """Their blocks have other parts, so other names: a miss, not a wrong block."""
    first = engine(GQA, 2, seed=1, layout=KVCacheLayout.LBNHC)
    other = engine(GQA, 1, seed=2, layout=KVCacheLayout.LBNHC)
    first.save(SAVED)
    assert other.load(SAVED) == set(SAVED)
    other.save(SAVED)
    assert other.load(SAVED) == set()


def test_no_block_is_there_before_all_ranks_have_saved_their_parts(
    engine: Make, arena: Arena
) -> None:
    first, second = engine(GQA, 4, seed=1), engine(GQA, 1, seed=2)
    for ranks in ([2], [0], [3]):
        first.save(SAVED, ranks)
        assert second.load(SAVED) == set(SAVED)
    first.save(SAVED, [1])
    assert second.load(SAVED) == set()
    assert (second.content()[:, SAVED] == GQA.kv(1)[:, SAVED]).all()
    assert arena.stats()["stored_total"] == len(SAVED), "one block each, whatever the ranks"


def test_what_one_rank_did_not_fill_is_given_up_once_all_have_ended(
    engine: Make, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine(GQA, 2, seed=1)
    worker = first.workers[1]._worker
    assert worker is not None

    def broken(*_: object) -> np.ndarray:
        raise MemoryError("no")

    monkeypatch.setattr(worker._cache, "save", broken)
    first.save(SAVED)
    assert arena.stats()["writing"] == len(SAVED) and arena.stats()["blocks"] == 0
    names = [HASHES[block] for block in SAVED]
    first.scheduler._give_up(names)
    assert arena.stats()["writing"] == 0
    monkeypatch.undo()
    first.save(SAVED)
    assert first.load(SAVED) == set()


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (2, 2)])
def test_each_rank_loads_its_parts_ahead_of_a_step(
    engine: Make, arena: Arena, writers: int, readers: int
) -> None:
    first, second = engine(GQA, writers, seed=1), engine(GQA, readers, seed=2)
    first.save(SAVED)
    assert second.load_ahead(SAVED) == set()
    assert (second.content()[:, SAVED] == GQA.kv(1)[:, SAVED]).all()
    [slot] = arena.lookup(0, [HASHES[SAVED[1]]])
    arena.view(int(slot))[-1] ^= 1
    assert second.load_ahead(SAVED) == {SAVED[1]}


def test_of_what_two_ranks_measured_at_once_the_slower_s_counts() -> None:
    step, other = StepSample(1, 2, 0, 4, 5, 0.25), StepSample(1, 2, 0, 8, 5, 0.25)
    load = LoadSample("dram", 4, 0.5)
    slow = step._replace(seconds=0.75)
    assert slowest([step, load], [slow, load]) == [slow, load]
    assert slowest([load, slow], [step]) == [load, slow], "a load that only one rank has ended"
    assert slowest([step], [other, step]) == [step, other]
    assert slowest([step, slow], [slow, step]) == [slow, slow]


def test_what_loads_took_is_what_eviction_reckons_with(tmp_path: Path) -> None:
    store = {"name": "told", "folder": str(tmp_path), "dram_bytes": 32 << 20}
    made = RankedEngine(GQA, 2, store, seed=1)
    try:
        loads = [LoadSample("dram", blocks, 0.01 * blocks) for blocks in (1, 8, 64) * 5]
        report = SimpleNamespace(kv_connector_worker_meta=WorkerReport({}, [], loads))
        made.scheduler.update_connector_output(report)
        block_bytes = GQA.kv(1)[:, 0].nbytes
        with Arena.attach("told", tmp_path) as arena:
            assert arena.load_cost_s_per_byte("dram") == pytest.approx(0.01 / block_bytes, rel=0.05)
            assert arena.load_cost_s_per_byte("nvme") == 0.0
    finally:
        made.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_part_that_one_rank_cannot_read_fails_the_block_for_all(
    engine: Make, arena: Arena, ranks: int
) -> None:
    first, second = engine(GQA, 1, seed=1), engine(GQA, ranks, seed=2)
    first.save(SAVED)
    [slot] = arena.lookup(0, [HASHES[SAVED[1]]])
    arena.view(int(slot))[-1] ^= 1
    assert second.load(SAVED) == {SAVED[1]}


def test_heads_that_several_ranks_have_are_stored_once(engine: Make, arena: Arena) -> None:
    model = Model(heads=2)
    first = engine(model, 4, seed=1)
    first.save(SAVED)
    space = arena.namespaces()[-1]
    assert space.block_bytes == model.kv(1)[:, 0].nbytes
    assert [worker._opened.writes for worker in first.workers] == [True, False, True, False]
    second = engine(model, 1, seed=2)
    assert second.load(SAVED) == set()
    assert (second.content()[:, SAVED] == model.kv(1)[:, SAVED]).all()


def test_blocks_stay_until_the_last_rank_has_read_them(engine: Make, arena: Arena) -> None:
    first = engine(GQA, 2, seed=1)
    first.save(SAVED)
    scheduler = first.scheduler._scheduler
    assert scheduler is not None
    names = [HASHES[block] for block in SAVED]
    scheduler._index.lease(names)
    slots = arena.lookup(0, names)
    arena.release(slots)
    assert arena.stats()["leased"] == len(SAVED)
    arena.release(slots)
    assert arena.stats()["leased"] == 0
    assert (arena.table["hits"][slots] == 1).all(), "one use, whatever the ranks"


@contextmanager
def in_files(arena: Arena, folder: Path, blocks: list[int]) -> Iterator[dict[bytes, Any]]:
    """Places of blocks of the arena in files."""
    names = [HASHES[block] for block in blocks]
    [space] = arena.namespaces()
    slots = arena.lookup(0, names)
    shape = BlockShape(space.digest, space.layers, space.block_bytes // space.layers)
    rows = zip(names, arena.addresses(slots).tolist(), arena.sums(slots), strict=True)
    file_io = FileIo()
    tier = NvmeTier.open(folder / "files", 8 << 20, 1 << 20, file_io)
    try:
        written = tier.write(shape, [WriteRequest(*row) for row in rows])
        assert all(future.result(20) for future in written)
        yield {name: tier.locate(space.digest, name) for name in names}
    finally:
        tier.close()
        file_io.close()


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_files_hold_whole_blocks_and_each_rank_reads_its_parts(
    engine: Make, arena: Arena, tmp_path: Path, writers: int, readers: int
) -> None:
    first, second = engine(GQA, writers, seed=1), engine(GQA, readers, seed=2)
    first.save(SAVED)
    with in_files(arena, tmp_path, SAVED) as places:
        arena.clear()
        assert second.load(SAVED) == set(SAVED)
        assert second.load(SAVED, places) == set()
        assert (second.content()[:, SAVED] == GQA.kv(1)[:, SAVED]).all()


def test_a_slot_that_is_never_finished_keeps_its_state(engine: Make, arena: Arena) -> None:
    first = engine(GQA, 2, seed=1)
    first.save(SAVED, [0])
    assert int((arena.table["state"] == WRITING).sum()) == len(SAVED)
    first.save(SAVED, [0])  # again, by the same rank: there is nothing for it to do
    worker = first.workers[0]._worker
    assert worker is not None and worker.counts["save_not_needed"] == len(SAVED)


IDS = [[1, 2], [4, 3]]
"""Blocks 0 and 1 of the store, in two cache groups."""


@pytest.mark.parametrize(
    ("layout", "writers", "readers"),
    [
        pytest.param(layout, *ranks, id=f"{layout.name} {ranks[0]}-{ranks[1]}")
        for layout in KVCacheLayout
        for ranks in ((1, 1), (2, 2), (1, 2), (4, 1))
        if heads_are_contiguous(layout.name) or ranks[0] == ranks[1]
    ],
)
def test_layers_of_two_cache_groups_lie_in_blocks_of_their_own(
    engine: Make, layout: KVCacheLayout, writers: int, readers: int
) -> None:
    truth, options = GQA.kv(1), {"layout": layout, "groups": 2}
    first, second = engine(GQA, writers, **options), engine(GQA, readers, **options)
    first.place(truth, [0, 1], IDS)
    first.save([0, 1], ids=IDS)
    into = [[5, -1], [2, 1]]  # outside of the first group's window the second block is not loaded
    assert second.load_ahead([0, 1], into) == set()
    found = second.placed([0, 1], into)
    assert (found[:, 0] == truth[:, 0]).all()
    assert (found[1::2, 1] == truth[1::2, 1]).all() and not found[::2, 1].any()
    rest = second.placed([2, 3], [[0, 4], [0, 4]])
    assert not rest.any(), "nothing else is touched"


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_of_one_group_reads_what_one_of_two_has_saved(engine: Make, ranks: int) -> None:
    truth = GQA.kv(1)
    first, second = engine(GQA, ranks, groups=2), engine(GQA, ranks, seed=2)
    first.place(truth, [0, 1], IDS)
    first.save([0, 1], ids=IDS)
    assert second.load([0, 1]) == set()
    assert (second.content()[:, [0, 1]] == truth[:, [0, 1]]).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_several_groups_the_request_fails_and_no_block(
    engine: Make, arena: Arena, ranks: int
) -> None:
    made = engine(GQA, ranks, groups=2)
    made.place(GQA.kv(1), [0, 1], IDS)
    made.save([0, 1], ids=IDS)
    [slot] = arena.lookup(0, HASHES[1:2])
    arena.view(int(slot))[: arena.namespaces()[0].block_bytes] ^= 1
    assert made.load_ahead([0, 1], IDS) == {"waits"}
    until(lambda: arena.lookup(0, HASHES[1:2])[0] < 0)
    assert made.load_ahead([0, 1], IDS) == {"waits"}, "a block that is missing"
    assert made.load_ahead([0], [IDS[0][:1], IDS[1][:1]]) == set()


@pytest.mark.parametrize("damaged", [False, True])
def test_layers_outside_of_a_window_are_not_read_from_files(
    engine: Make, arena: Arena, tmp_path: Path, damaged: bool
) -> None:
    made, truth = engine(GQA, 1, groups=2), GQA.kv(1)
    made.place(truth, [0, 1], IDS)
    made.save([0, 1], ids=IDS)
    if damaged:
        [slot] = arena.lookup(0, HASHES[:1])
        arena.view(int(slot))[arena.namespaces()[0].block_bytes - 1] ^= 1
    into = [[-1, 5], [2, 1]]
    with in_files(arena, tmp_path, [0, 1]) as places:
        arena.clear()
        assert made.load_ahead([0, 1], into, places) == ({"waits"} if damaged else set())
    if not damaged:
        found = made.placed([0, 1], into)
        assert (found[1::2] == truth[1::2])[:, :2].all() and (found[::2, 1] == truth[::2, 1]).all()
        assert not found[::2, 0].any()

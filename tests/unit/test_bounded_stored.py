"""What is held of a streamed context goes to the store, and another scheduler's request begins with
it. vLLM's schedulers and both halves of the connector; no model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from headrace_decode.compression.engine.cells import Cells
from headrace_decode.compression.engine.description import describe, described
from headrace_decode.compression.engine.dropped import Dropped
from headrace_decode.compression.engine.following import TOLD, Following
from headrace_decode.compression.engine.scheduler import BoundingTakingUp
from headrace_decode.compression.engine.settings import BoundedSettings
from headrace_decode.compression.engine.stored import Layout, find, names_of
from headrace_decode.compression.engine.streaming import Held
from headrace_decode.compression.scores import NOWHERE
from headrace_decode.sparse.calibration_file import Shape
from headrace_decode.sparse.engine.keys import LayerKeys
from headrace_decode.sparse.engine.offload.manager import DropSpec
from headrace_decode.sparse.engine.rows import BatchRow
from headrace_decode.sparse.engine.settings import SparseSettings
from headrace_engine.rope import Rope
from headrace_kvstore.table import READY
from tests.support.prompts import noise
from tests.support.scheduled import BLOCK, LAYERS, UNIT, Scheduled
from tests.support.sparse_engine import gate_of_chance, write_gate
from tests.support.tiny import HEAD_DIM, HEADS, KV_HEADS, tiny_llama

SPEC = DropSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32)
LAYOUT = Layout(LAYERS, KV_HEADS, UNIT, BLOCK, LAYERS * SPEC.page_size_bytes)
SHARE, BLOCKS = 0.25, 41
CONTEXT = noise(24 * BLOCK, 5)
KEPT, DESCRIBED = 6, 1
"""Blocks that it is held in."""


class Names:
    """A store that has these."""

    def __init__(self, *names: bytes) -> None:
        self.names, self.asked = set(names), 0

    def lacking(self, names: Any) -> list[bool]:
        self.asked += len(names)
        return [name not in self.names for name in names]

    def load(self, *_: Any) -> None:
        raise AssertionError

    save = load


@given(
    prompt=st.integers(0, 30),
    stored=st.lists(st.tuples(st.integers(1, 30), st.integers(2, 12)), max_size=4),
    lost=st.integers(0, 40),
    bounds=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_the_longest_begin_that_a_store_has_is_found_in_linear_time(
    prompt: int, stored: list[tuple[int, int]], lost: int, bounds: tuple[int, int]
) -> None:
    hashes = [b"%032d" % n for n in range(30)]
    stored = list({blocks: (blocks, min(count, 2 * blocks)) for blocks, count in stored}.values())
    all_names = [names_of(hashes[blocks - 1], b"gate", count) for blocks, count in stored]
    flat = [name for names in all_names for name in names]
    assert len({*flat}) == len(flat) and {len(name) for name in flat} <= {32}
    gone = flat[lost : lost + 1]
    store = Names(*(name for name in flat if name not in gone))
    found = find(store, hashes[:prompt], b"gate", *bounds)
    begins = {
        blocks: names
        for (blocks, _), names in zip(stored, all_names, strict=True)
        if bounds[0] <= blocks <= min(bounds[1], prompt) and names[0] not in gone
    }
    longest = max(begins, default=None)
    if longest is None or begins[longest][-1] in gone or not {*gone}.isdisjoint(begins[longest]):
        assert found is None
    else:
        assert found == (longest, begins[longest])
    assert store.asked <= 5 * 30
    assert find(store, hashes[:prompt], b"another gate", *bounds) is None


@given(
    layers=st.integers(1, 80),
    heads=st.integers(1, 16),
    kept=st.integers(1, 2000),
    dim=st.sampled_from([64, 128]),
)
def test_few_blocks_describe_the_others(layers: int, heads: int, kept: int, dim: int) -> None:
    layout = Layout(layers, heads, 32, 128, layers * heads * 128 * 4 * dim)
    count = layout.described_in(kept)
    assert count <= 1 + kept / dim + 1
    assert layout.described_of(count + kept) == count
    cells = kept * layers * heads * 4
    assert 4 * (layers * heads + cells * 32) <= count * layout.block_bytes


def cells_of(blocks: int) -> Cells:
    caches = torch.randn(LAYERS, blocks * BLOCK // UNIT, KV_HEADS, UNIT, 2 * HEAD_DIM)
    return Cells([LayerKeys(each) for each in caches], BLOCK // UNIT)


def held_in(cells: Cells, blocks: list[int], counts: np.ndarray[Any, Any]) -> Held:
    room, filled = cells.of_blocks(blocks), np.arange(counts.max()) < counts[..., None]
    table = np.zeros(filled.shape, np.int32)
    table[filled] = room[: counts.sum()]
    told = torch.full((*filled.shape, UNIT), NOWHERE)
    told[torch.from_numpy(filled)] = torch.rand(int(counts.sum()), UNIT)
    return Held(Dropped(9 * BLOCK, table, counts), told.flatten(-2))


@given(counts=st.lists(st.integers(0, 10), min_size=4, max_size=4).filter(any))
def test_what_is_described_is_what_was_held(counts: list[int]) -> None:
    cells, shape = cells_of(8), (LAYERS, KV_HEADS)
    mine = held_in(cells, [6, 2, 3], np.array(counts).reshape(shape))
    data = describe(mine)
    assert len(data) <= LAYOUT.described_in(3) * LAYOUT.block_bytes
    cells.write_bytes([7], data)
    read = cells.read_bytes([7])
    assert len(read) == LAYOUT.block_bytes and np.array_equal(read[: len(data)], data)
    assert not read[len(data) :].any()
    other = described(read, 9 * BLOCK, [6, 2, 3], cells)
    assert other.dropped.tokens == 9 * BLOCK and torch.equal(other.told, mine.told)
    assert np.array_equal(other.dropped.counts, mine.dropped.counts)
    assert np.array_equal(other.dropped.cells, mine.dropped.cells)
    moved = described(read, 9 * BLOCK, [1, 4, 5], cells)
    assert {*moved.dropped.cells.ravel()} <= {0, *cells.of_blocks([1, 4, 5])}


@pytest.mark.parametrize("seed", range(5))
def test_no_description_leads_out_of_the_blocks(seed: int) -> None:
    cells, rng = cells_of(8), np.random.default_rng(seed)
    data = rng.integers(0, 256, LAYOUT.block_bytes, np.uint8)
    if seed < 3:  # some counts that may be
        data[: 4 * LAYERS * KV_HEADS].view("<i4")[:] = rng.integers(0, 30, LAYERS * KV_HEADS)
    found = described(data, 9 * BLOCK, [6, 2, 3], cells)
    assert found.dropped.counts.sum() <= 3 * cells.in_block
    assert {*found.dropped.cells.ravel()} <= {0, *cells.of_blocks([6, 2, 3])}
    assert not found.told.isnan().any() and (found.told >= NOWHERE).all()


class Streaming(Scheduled):
    """An engine that streams all bounded requests; its worker chooses by queries of chance."""

    def __init__(self, folder: Path, gate: Path) -> None:
        bounded = BoundedSettings(calibration=str(gate), stream=True)
        told = SparseSettings("off").additional_config() | bounded.additional_config()
        super().__init__(folder, BLOCKS, BoundingTakingUp, SPEC, 512, told)
        layers = [LayerKeys(each) for each in self.caches.values()]
        self.cells = Cells(layers, BLOCK // UNIT)
        model = json.loads((tiny_llama() / "config.json").read_text())
        self.following = Following(
            *(self.cells, HEAD_DIM**-0.5, Rope.of(model), self.table),
            gate_of_chance(Shape.of(model)),
        )
        self.told: list[Any] = []

    def table(self, name: str) -> list[int]:
        [blocks] = self.scheduler.kv_cache_manager.get_block_ids(name)
        return list(blocks)

    def begins(self, output: Any) -> None:
        told = getattr(output, TOLD)
        self.told.append(told)
        gone = output.preempted_req_ids or set()
        self.following.step_begins(output.finished_req_ids, gone, told)
        for name, count in output.num_scheduled_tokens.items():
            end, most = self.scheduler.requests[name].num_computed_tokens, len(self.table(name))
            row = BatchRow(name, None, self.scheduler.requests[name].num_prompt_tokens)
            tables = np.zeros((1, most * BLOCK // UNIT), np.int64)
            _, read = self.following.of_step([row], np.array([0, count]), np.array([end]), tables)
            rng = torch.Generator().manual_seed(end)
            for layer in range(LAYERS):
                queries = torch.randn(count, HEADS, HEAD_DIM, generator=rng)
                self.following.see(read, layer, queries)

    def ask(self, name: str, prompt: list[int], answer: int = 3) -> Any:
        return self.add(name, prompt, answer, {"bounded": SHARE})

    def ends(self, request: Any) -> None:
        self.until(lambda: request.is_finished() and not self.connector.half.busy)

    @property
    def came(self) -> list[Any]:
        return [each for told in self.told for each in told.came.values()]

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    write_gate(tiny_llama(), tmp_path / "gate")
    return tmp_path / "gate"


@pytest.fixture
def engines(tmp_path: Path, gate: Path) -> Iterator[tuple[Streaming, Streaming]]:
    """Two engines of one node; the first has streamed the context."""
    (tmp_path / "shm").mkdir()
    both = Streaming(tmp_path / "shm", gate), Streaming(tmp_path / "shm", gate)
    first, _ = both
    first.ends(first.ask("x", CONTEXT))
    yield both
    for each in both:
        each.close()


def test_a_next_turn_begins_in_another_engine_with_what_is_held(
    engines: tuple[Streaming, Streaming],
) -> None:
    first, second = engines
    asked = second.ask("y", [*CONTEXT, *noise(300, 6)], answer=1000)
    second.step()
    assert asked.status == RequestStatus.WAITING_FOR_REMOTE_KVS and second.steps == [{}]
    second.until(lambda: "y" in second.steps[-1])
    assert second.steps[-1] == {"y": 300}, "the rest is computed"
    [came] = second.came
    assert came.tokens == len(CONTEXT) and len(came.blocks) == KEPT + DESCRIBED
    last = max(first.following._remembered)
    mine, its = first.following._remembered[last], second.following._streams["y"].held
    assert its is not None and torch.equal(mine.told, its.told)
    assert np.array_equal(mine.dropped.counts, its.dropped.counts)
    filled = np.arange(its.dropped.cells.shape[-1]) < its.dropped.counts[..., None]
    one, other = (
        each.cells.read_cells(held.dropped.cells[filled][None].astype(np.int64))
        for each, held in ((first, mine), (second, its))
    )
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    second.scheduler.finish_requests("y", RequestStatus.FINISHED_ABORTED)
    second.step()
    assert second.free == BLOCKS - 1


TURN = [*CONTEXT, *noise(300, 6)]


def flip(engine: Streaming, depth: int) -> None:
    """One bit of what is held last."""
    arena = engine.connector._arena
    ready = (arena.table["state"] == READY).nonzero()[0]
    [slot] = [s for s in ready if arena.table["depth"][s] == depth][-1:]
    arena.view(int(slot))[1000] ^= 1


@pytest.mark.parametrize("depth", [0, KEPT])
def test_one_whose_blocks_do_not_come_computes_its_prompt(
    engines: tuple[Streaming, Streaming], depth: int
) -> None:
    _, second = engines
    flip(second, depth)
    asked = second.ask("y", TURN)
    second.ends(asked)
    assert not second.came and sum(step.get("y", 0) for step in second.steps) == len(TURN) + 2
    assert second.free == BLOCKS - 1


def test_a_request_that_is_aborted_while_it_loads_gives_its_blocks_back(
    engines: tuple[Streaming, Streaming],
) -> None:
    _, second = engines
    second.ask("y", TURN)
    second.step()
    assert second.free == BLOCKS - 1 - KEPT - DESCRIBED
    second.scheduler.finish_requests("y", RequestStatus.FINISHED_ABORTED)
    second.until(lambda: "y" not in second.scheduler.requests)
    assert second.free == BLOCKS - 1
    assert second.came == []
    second.ends(second.ask("z", TURN))
    assert len(second.came) == 1


def test_another_share_another_tenant_and_another_text_find_nothing(
    engines: tuple[Streaming, Streaming],
) -> None:
    _, second = engines
    other = [CONTEXT[0] + 1, *CONTEXT[1:]]
    asked = [
        second.add("a", TURN, 2, {"bounded": 0.24}),
        second.add("b", TURN, 2, {"bounded": SHARE}, "tenant:else:"),
        second.ask("c", other),
        second.ask("d", [*CONTEXT[: 17 * BLOCK], *noise(300, 6)]),
    ]
    second.until(lambda: all(each.is_finished() for each in asked))
    assert not second.came


def test_a_question_about_most_of_the_text_begins_with_what_was_held_of_that(
    engines: tuple[Streaming, Streaming],
) -> None:
    first, second = engines
    drops = [each.tokens for told in first.told for each in told.drops.values()]
    assert drops == [16 * BLOCK, 24 * BLOCK]
    longer = noise(30 * BLOCK, 7)
    first.ends(first.ask("l", longer))
    second.ends(second.ask("m", [*longer[: 28 * BLOCK], *noise(200, 8)]))
    [came] = second.came
    assert came.tokens == 24 * BLOCK and len(came.blocks) == 8 + DESCRIBED, "of the longer one"


def test_an_engine_finds_what_its_cache_has_no_more(engines: tuple[Streaming, Streaming]) -> None:
    first, _ = engines
    first.ends(first.ask("y", TURN))
    assert not first.came and [len(told.recalls) for told in first.told if told.recalls] == [1]
    assert first.scheduler.reset_prefix_cache()
    first.ends(first.ask("z", [*TURN, *noise(200, 9)]))
    assert [each.tokens for each in first.came] == [len(TURN) // BLOCK * BLOCK]


def test_one_that_cannot_begin_when_its_blocks_have_come_gives_them_back(
    engines: tuple[Streaming, Streaming],
) -> None:
    _, second = engines
    asked = second.ask("y", TURN)
    second.step()
    pool = second.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    for _ in range(5):
        second.step()
    second.until(lambda: not second.scheduler._streams._arrivals._coming)
    assert not second.came and pool.get_num_free_blocks() == KEPT + DESCRIBED
    pool.free_blocks(taken)
    second.ends(asked)
    assert sum(step.get("y", 0) for step in second.steps) == len(TURN) + 2


def test_a_choice_waits_for_blocks_that_others_have(engines: tuple[Streaming, Streaming]) -> None:
    first, _ = engines
    asked = first.ask("y", noise(24 * BLOCK, 11), answer=10)
    first.until(lambda: asked.num_computed_tokens >= 15 * BLOCK)
    manager = first.scheduler._offloads
    pool, table = manager.block_pool, manager.req_to_blocks["y"]
    pool.touch(list(table))  # as if a copy under way held them
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 4)
    first.step()
    assert not first.told[-1].drops
    pool.free_blocks(table)
    pool.free_blocks(taken)
    begun = len(first.told)
    first.ends(asked)
    assert [each.tokens for told in first.told[begun:] for each in told.drops.values()]
    assert first.free == BLOCKS - 1

"""What is held of an incrementally compressed context goes to the store, and another scheduler's
request begins with it. vLLM's schedulers and both halves of the connector; no model."""

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
from torch import Tensor
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from headrace_decode.attention.batch import BatchRow
from headrace_decode.attention.calibration_file import ModelShape
from headrace_decode.attention.offload.block_manager import CompressionSpec
from headrace_decode.attention.offload.scheduler import OffloadSchedulerPart
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.compression.engine.compressed_attention import RetainedPages
from headrace_decode.compression.engine.compression_worker import CompressionWorker
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.engine.incremental import RetainedContext
from headrace_decode.compression.engine.metadata import COMPRESSION_KEY
from headrace_decode.compression.engine.retained_format import decode_retained, encode_retained
from headrace_decode.compression.engine.scheduler import CompressionSchedulerPart
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_decode.compression.engine.stored_context import (
    RetainedLayout,
    block_names,
    find_stored,
)
from headrace_decode.compression.scores import ABSENT
from headrace_engine.extensions.extension import metadata_of
from headrace_engine.extensions.scheduler import ExtensibleScheduler
from headrace_engine.kv_views import KvOrder
from headrace_engine.rope import Rope
from headrace_kvstore.blocks.slot_record import READY
from tests.support.prompts import noise
from tests.support.scheduled import BLOCK, LAYERS, PAGE, Scheduled
from tests.support.sparse_engine import random_predictor, write_predictor
from tests.support.tiny import HEAD_DIM, HEADS, KV_HEADS, tiny_llama

SPEC = CompressionSpec(
    block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32
)
LAYOUT = RetainedLayout(LAYERS, KV_HEADS, PAGE, BLOCK, LAYERS * SPEC.page_size_bytes)
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
    all_names = [block_names(hashes[blocks - 1], b"gate", count) for blocks, count in stored]
    flat = [name for names in all_names for name in names]
    assert len({*flat}) == len(flat) and {len(name) for name in flat} <= {32}
    gone = flat[lost : lost + 1]
    store = Names(*(name for name in flat if name not in gone))
    found = find_stored(store, hashes[:prompt], b"gate", *bounds)
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
    assert find_stored(store, hashes[:prompt], b"another predictor", *bounds) is None


@given(
    layers=st.integers(1, 80),
    heads=st.integers(1, 16),
    kept=st.integers(1, 2000),
    dim=st.sampled_from([64, 128]),
)
def test_few_blocks_describe_the_others(layers: int, heads: int, kept: int, dim: int) -> None:
    layout = RetainedLayout(layers, heads, 32, 128, layers * heads * 128 * 4 * dim)
    count = layout.description_blocks_for(kept)
    assert count <= 1 + kept / dim + 1
    assert layout.description_blocks_of(count + kept) == count
    head_pages = kept * layers * heads * 4
    assert 4 * (layers * heads + head_pages * 32) <= count * layout.block_bytes


def cells_of(blocks: int) -> HeadPages:
    caches = torch.randn(LAYERS, blocks * BLOCK // PAGE, KV_HEADS, PAGE, 2 * HEAD_DIM)
    return HeadPages(list(caches), BLOCK // PAGE, KvOrder.VEC)


def held_in(head_pages: HeadPages, blocks: list[int], counts: Tensor) -> RetainedContext:
    filled = torch.arange(int(counts.max())) < counts[..., None]
    metadata = torch.full((*filled.shape, PAGE), ABSENT)
    metadata[filled] = torch.rand(int(counts.sum()), PAGE)
    held = RetainedPages.filled(9 * BLOCK, counts, head_pages.of_blocks(blocks))
    return RetainedContext(held, metadata.flatten(-2))


@given(counts=st.lists(st.integers(0, 10), min_size=4, max_size=4).filter(any))
def test_what_is_described_is_what_was_held(counts: list[int]) -> None:
    head_pages, shape = cells_of(8), (LAYERS, KV_HEADS)
    mine = held_in(head_pages, [6, 2, 3], torch.tensor(counts).view(shape))
    data = encode_retained(mine)
    assert len(data) <= LAYOUT.description_blocks_for(3) * LAYOUT.block_bytes
    head_pages.write_bytes([7], data)
    read = head_pages.read_bytes([7])
    assert len(read) == LAYOUT.block_bytes and np.array_equal(read[: len(data)], data)
    assert not read[len(data) :].any()
    other = decode_retained(read, 9 * BLOCK, [6, 2, 3], head_pages)
    assert other.dropped.tokens == 9 * BLOCK and torch.equal(other.predicted, mine.predicted)
    assert torch.equal(other.dropped.counts, mine.dropped.counts)
    assert torch.equal(other.dropped.head_pages, mine.dropped.head_pages)
    moved = decode_retained(read, 9 * BLOCK, [1, 4, 5], head_pages)
    assert {*moved.dropped.head_pages.ravel().tolist()} <= {
        0,
        *head_pages.of_blocks([1, 4, 5]).tolist(),
    }


@pytest.mark.parametrize("seed", range(5))
def test_no_description_leads_out_of_the_blocks(seed: int) -> None:
    head_pages, rng = cells_of(8), np.random.default_rng(seed)
    data = rng.integers(0, 256, LAYOUT.block_bytes, np.uint8)
    if seed < 3:  # some counts that may be
        data[: 4 * LAYERS * KV_HEADS].view("<i4")[:] = rng.integers(0, 30, LAYERS * KV_HEADS)
    found = decode_retained(data, 9 * BLOCK, [6, 2, 3], head_pages)
    assert found.dropped.counts.sum() <= 3 * head_pages.in_block
    assert {*found.dropped.head_pages.ravel().tolist()} <= {
        0,
        *head_pages.of_blocks([6, 2, 3]).tolist(),
    }
    assert not found.predicted.isnan().any() and (found.predicted >= ABSENT).all()


class Streaming(Scheduled):
    """An engine that streams all compressed requests; its worker chooses by queries of chance."""

    def __init__(self, folder: Path, predictor: Path) -> None:
        bounded = CompressionSettings(calibration=str(predictor), stream=True)
        metadata = SparseSettings("off").additional_config() | bounded.additional_config()
        super().__init__(folder, BLOCKS, ExtensibleScheduler, SPEC, 512, metadata)
        caches = list(self.caches.values())
        self.head_pages = HeadPages(caches, BLOCK // PAGE, KvOrder.VEC)
        model = json.loads((tiny_llama() / "config.json").read_text())
        self.compression = CompressionWorker(
            *(self.head_pages, HEAD_DIM**-0.5, Rope.of(model), self.table),
            random_predictor(ModelShape.of(model)),
        )
        self.messages: list[Any] = []

    def table(self, name: str) -> list[int]:
        [blocks] = self.scheduler.kv_cache_manager.get_block_ids(name)
        return list(blocks)

    def begins(self, output: Any) -> None:
        metadata = metadata_of(output, COMPRESSION_KEY)
        self.messages.append(metadata)
        gone = output.preempted_req_ids or set()
        self.compression.begin_step(output.finished_req_ids, gone, metadata)
        for name, count in output.num_scheduled_tokens.items():
            end = self.scheduler.requests[name].num_computed_tokens
            row = BatchRow(name, None, self.scheduler.requests[name].num_prompt_tokens)
            step = [row], np.array([0, count]), np.array([end])
            _, read = self.compression.select_rows(*step)
            rng = torch.Generator().manual_seed(end)
            for layer in range(LAYERS):
                queries = torch.randn(count, HEADS, HEAD_DIM, generator=rng)
                self.compression.record_queries(read, layer, queries)

    def ask(self, name: str, prompt: list[int], answer: int = 3) -> Any:
        return self.add(name, prompt, answer, {"compression": SHARE})

    @property
    def incremental(self) -> Any:
        return self.scheduler.part(CompressionSchedulerPart).incremental

    def ends(self, request: Any) -> None:
        self.until(lambda: request.is_finished() and not self.connector.scheduler.busy)

    @property
    def loaded(self) -> list[Any]:
        return [each for metadata in self.messages for each in metadata.loaded.values()]

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@pytest.fixture
def predictor(tmp_path: Path) -> Path:
    write_predictor(tiny_llama(), tmp_path / "gate")
    return tmp_path / "gate"


@pytest.fixture
def engines(tmp_path: Path, predictor: Path) -> Iterator[tuple[Streaming, Streaming]]:
    """Two engines of one node; the first has streamed the context."""
    (tmp_path / "shm").mkdir()
    both = Streaming(tmp_path / "shm", predictor), Streaming(tmp_path / "shm", predictor)
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
    [came] = second.loaded
    assert came.tokens == len(CONTEXT) and len(came.blocks) == KEPT + DESCRIBED
    last = max(first.compression._context_cache)
    mine, its = first.compression._context_cache[last], second.compression._incremental["y"].held
    assert its is not None and torch.equal(mine.predicted, its.predicted)
    assert torch.equal(mine.dropped.counts, its.dropped.counts)
    filled = torch.arange(its.dropped.most) < its.dropped.counts[..., None]
    one, other = (
        each.head_pages.read_head_pages(held.dropped.head_pages[filled][None])
        for each, held in ((first, mine), (second, its))
    )
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    second.scheduler.finish_requests("y", RequestStatus.FINISHED_ABORTED)
    second.step()
    assert second.free == BLOCKS - 1


TURN = [*CONTEXT, *noise(300, 6)]


def flip(engine: Streaming, depth: int) -> None:
    """One bit of what is held last."""
    arena = engine.connector.arena
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
    assert not second.loaded and sum(step.get("y", 0) for step in second.steps) == len(TURN) + 2
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
    assert second.loaded == []
    second.ends(second.ask("z", TURN))
    assert len(second.loaded) == 1


def test_a_pause_ends_a_load_that_began_before_and_begins_none(
    engines: tuple[Streaming, Streaming],
) -> None:
    _, second = engines
    scheduler = second.scheduler
    asked = second.ask("y", TURN)
    second.step()
    assert [*scheduler.kv_holding_waiting] == [asked] and not scheduler.waiting
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    later = second.ask("z", TURN)
    second.until(lambda: not scheduler.has_unfinished_requests())
    second.ends(asked)
    assert [*scheduler.waiting] == [later] and len(second.loaded) == 1
    assert second.free == BLOCKS - 1
    assert scheduler.reset_prefix_cache()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    second.ends(later)
    assert len(second.loaded) == 2


def test_another_share_another_tenant_and_another_text_find_nothing(
    engines: tuple[Streaming, Streaming],
) -> None:
    _, second = engines
    other = [CONTEXT[0] + 1, *CONTEXT[1:]]
    asked = [
        second.add("a", TURN, 2, {"compression": 0.24}),
        second.add("b", TURN, 2, {"compression": SHARE}, "tenant:else:"),
        second.ask("c", other),
        second.ask("d", [*CONTEXT[: 17 * BLOCK], *noise(300, 6)]),
    ]
    second.until(lambda: all(each.is_finished() for each in asked))
    assert not second.loaded


def test_a_question_about_most_of_the_text_begins_with_what_was_held_of_that(
    engines: tuple[Streaming, Streaming],
) -> None:
    first, second = engines
    drops = [each.tokens for metadata in first.messages for each in metadata.retentions.values()]
    assert drops == [16 * BLOCK, 24 * BLOCK]
    longer = noise(30 * BLOCK, 7)
    first.ends(first.ask("l", longer))
    second.ends(second.ask("m", [*longer[: 28 * BLOCK], *noise(200, 8)]))
    [came] = second.loaded
    assert came.tokens == 24 * BLOCK and len(came.blocks) == 8 + DESCRIBED, "of the longer one"


def test_an_engine_finds_what_its_cache_has_no_more(engines: tuple[Streaming, Streaming]) -> None:
    first, _ = engines
    first.ends(first.ask("y", TURN))
    assert not first.loaded and [
        len(metadata.cached) for metadata in first.messages if metadata.cached
    ] == [1]
    assert first.scheduler.reset_prefix_cache()
    first.ends(first.ask("z", [*TURN, *noise(200, 9)]))
    assert [each.tokens for each in first.loaded] == [len(TURN) // BLOCK * BLOCK]


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
    second.until(lambda: not second.incremental._stored_loader._loading)
    assert not second.loaded and pool.get_num_free_blocks() == KEPT + DESCRIBED
    pool.free_blocks(taken)
    second.ends(asked)
    assert sum(step.get("y", 0) for step in second.steps) == len(TURN) + 2


def test_a_choice_waits_for_blocks_that_others_have(engines: tuple[Streaming, Streaming]) -> None:
    first, _ = engines
    asked = first.ask("y", noise(24 * BLOCK, 11), answer=10)
    first.until(lambda: asked.num_computed_tokens >= 15 * BLOCK)
    manager = first.scheduler.part(OffloadSchedulerPart).manager
    pool, table = manager.block_pool, manager.req_to_blocks["y"]
    pool.touch(list(table))  # as if a copy under way held them
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 4)
    first.step()
    assert not first.messages[-1].retentions
    pool.free_blocks(table)
    pool.free_blocks(taken)
    begun = len(first.messages)
    first.ends(asked)
    assert [
        each.tokens for metadata in first.messages[begun:] for each in metadata.retentions.values()
    ]
    assert first.free == BLOCKS - 1

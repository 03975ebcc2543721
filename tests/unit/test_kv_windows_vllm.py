"""The store beside sliding windows, in vLLM's own scheduler: several cache groups, whose blocks
leave their window while a request runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from tests.support.scheduled import BLOCK, SPEC, sliding
from tests.support.windowed import GOOD, GROUPS, WINDOW, Windowed, counted

PROMPT = 6 * BLOCK + 8
STEP_TOKENS = 2 * BLOCK
BLOCKS = 64


@pytest.fixture(params=[False, True], ids=["one step at a time", "asynchronous"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Windowed]:
    made = Windowed(tmp_path, request.param, blocks=BLOCKS, step_tokens=STEP_TOKENS)
    yield made
    made.close()


def test_blocks_that_have_left_the_window_are_saved(engine: Windowed) -> None:
    request = engine.answer(PROMPT, tokens=BLOCK)
    assert list(request.output_token_ids) == [GOOD] * BLOCK
    engine.ends()
    assert engine.stored(request) == [True] * ((PROMPT + BLOCK - 1) // BLOCK)
    assert engine.is_pool_free and not engine.connector.scheduler.counts["save_busy"]


def test_a_prompt_that_ends_with_its_first_step_is_saved(tmp_path: Path) -> None:
    """vLLM frees what has left the window before it tells of the end."""
    engine = Windowed(tmp_path, blocks=BLOCKS)
    request = engine.answer(PROMPT, tokens=1)
    assert len(engine.steps) == 1
    engine.ends()
    assert engine.stored(request) == [True] * 6 and engine.is_pool_free
    engine.close()


def test_blocks_that_drafts_fill_are_saved_when_the_drafts_are_right(tmp_path: Path) -> None:
    engine = Windowed(tmp_path, blocks=BLOCKS, step_tokens=STEP_TOKENS, drafts=3)
    requests = [engine.add(f"r{n}", 2 * BLOCK + n, 2 * BLOCK) for n in range(3)]
    engine.ends()
    assert len(engine.steps) < 3 + 2 * BLOCK, "some drafts were right"
    for request in requests:
        assert list(request.output_token_ids) == [GOOD] * 2 * BLOCK
        assert all(engine.stored(request)[: (request.num_tokens - 1) // BLOCK])
    assert engine.is_pool_free
    engine.close()


def test_blocks_are_queued_before_vllm_may_preempt_their_request(tmp_path: Path) -> None:
    engine = Windowed(tmp_path, blocks=BLOCKS, step_tokens=STEP_TOKENS)
    engine.add("long", PROMPT, 5)
    engine.step()
    assert engine.connector.scheduler.busy
    engine.ends()
    engine.close()


def test_a_hit_loads_each_layer_as_far_as_its_window_reaches(engine: Windowed) -> None:
    engine.store(PROMPT)
    request = engine.add("again", PROMPT, 5)
    engine.until(lambda: request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
    sliding_ids, full_ids = engine.scheduler.kv_cache_manager.get_block_ids("again")
    assert [block > 0 for block in sliding_ids] == [False] * 4 + [True] * 2
    assert all(full_ids)
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert request.num_preemptions == 0 and counted(engine, "loaded_dram") == 6
    assert not counted(engine, "lost")
    for name in engine.names:
        assert not engine.caches[name][: BLOCK // 32].any(), "the null block is not written to"


def test_the_stores_part_follows_the_engines_own(engine: Windowed) -> None:
    """The prompt's first half is in the engine's prefix cache."""
    prompt = [(7 * n) % 1000 + 20 for n in range(PROMPT)]
    engine.store(prompt)
    engine.answer(prompt[: 3 * BLOCK + 1], "half")
    before = counted(engine, "loaded")
    request = engine.answer(prompt)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded") - before == 3
    engine.ends()
    assert engine.is_pool_free


@pytest.mark.parametrize("depth", [0, 3, 5])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_request_of_which_a_block_fails_is_computed_from_its_start(
    engine: Windowed, depth: int, layer: int
) -> None:
    engine.store(PROMPT)
    engine.damage(depth, layer)
    engine.steps.clear()
    request = engine.answer(PROMPT)
    assert list(request.output_token_ids) == [GOOD] * 5
    is_loaded = layer == 1 or depth >= 4
    computed = sum(step.get("again", 0) for step in engine.steps)
    assert (computed >= PROMPT) == is_loaded, "layers before the window are not loaded"
    assert counted(engine, "lost") == is_loaded
    engine.ends()
    assert engine.is_pool_free
    engine.worker._worker._saver.submit(lambda: None).result(20)  # wrong blocks are dropped there
    if is_loaded:
        engine.forget()
        engine.answer(PROMPT, "third")
        engine.ends()
        assert all(engine.stored(request)), "what was wrong is replaced"


def test_a_local_hit_outside_of_the_window_is_not_saved(engine: Windowed) -> None:
    """The engine has the first blocks of its layers of full attention alone."""
    prompt = [(7 * n) % 1000 + 20 for n in range(PROMPT)]
    engine.answer(prompt[: 5 * BLOCK], "first")
    engine.ends()
    engine.connector.arena.clear()
    request = engine.answer(prompt)
    assert list(request.output_token_ids) == [GOOD] * 5
    engine.ends()
    kept = engine.stored(request)
    assert kept[:2] == [False] * 2 and kept[-2:] == [True] * 2 and engine.is_pool_free


def test_a_request_waits_for_blocks_that_are_being_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be preempted, and lose its KV for blocks that are free in a moment."""
    groups = [sliding(BLOCK), SPEC]
    engine = Windowed(tmp_path, blocks=19, step_tokens=4 * BLOCK, groups=groups)
    cache, goes_on = engine.worker._worker._cache, threading.Event()
    copy_out = cache.save

    def save(*arguments: Any) -> Any:
        assert goes_on.wait(20)
        return copy_out(*arguments)

    monkeypatch.setattr(cache, "save", save)
    request = engine.add("long", 12 * BLOCK - 8, 8)
    for _ in range(20):
        engine.step()
    assert request.num_computed_tokens == 8 * BLOCK, "the third step needs the room"
    goes_on.set()
    engine.ends()
    assert list(request.output_token_ids) == [GOOD] * 8
    assert request.num_preemptions == 0
    assert engine.is_pool_free
    engine.close()


def test_layers_that_all_have_a_window_are_saved_and_loaded_alike(tmp_path: Path) -> None:
    """One cache group, as of the first Mistral."""
    engine = Windowed(tmp_path, blocks=BLOCKS, step_tokens=STEP_TOKENS, groups=[sliding(WINDOW)])
    engine.store(PROMPT)
    request = engine.answer(PROMPT)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded_dram") == 6
    engine.ends()
    assert engine.stored(request) == [True] * 6 and engine.is_pool_free
    engine.forget()
    engine.damage(5)
    assert list(engine.answer(PROMPT).output_token_ids) == [GOOD] * 5
    engine.close()


@pytest.mark.parametrize("groups", [[SPEC], [SPEC, sliding(WINDOW)], [*GROUPS, *GROUPS]])
def test_engines_with_other_groups_share_blocks(tmp_path: Path, groups: list[Any]) -> None:
    """Also one in which vLLM keeps windows as full attention."""
    first = Windowed(tmp_path, blocks=BLOCKS, layers=4, groups=GROUPS)
    request = first.answer(PROMPT)
    first.ends()
    assert all(first.stored(request))
    second = Windowed(tmp_path, blocks=BLOCKS, layers=8 // len(groups), groups=groups)
    assert list(second.answer(PROMPT).output_token_ids) == [GOOD] * 5
    assert counted(second, "loaded_dram") == 6 and not counted(second, "lost")
    second.close()
    first.close()


def test_blocks_of_groups_are_loaded_into_the_blocks_of_each(tmp_path: Path) -> None:
    engine = Windowed(tmp_path, blocks=BLOCKS, groups=GROUPS)
    engine.store(2 * BLOCK + 8)
    engine.answer(2 * BLOCK + 8)
    ids = engine.tables["again"]
    assert ids[0][:2] != ids[1][:2]
    for names, table in zip(engine.groups, ids, strict=True):
        for name in names:
            content = engine.blocks(engine.caches[name])[table[:2]]
            assert torch.isfinite(content).all() and content.any()
    engine.close()

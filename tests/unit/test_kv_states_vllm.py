"""The store beside recurrent layers, in vLLM's own scheduler: states at some block boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.support.recurrent import STATES, Recurrent
from tests.support.scheduled import BLOCK, SPEC, recurrent
from tests.support.windowed import GOOD, counted

PROMPT = 6 * BLOCK + 8
STEP_TOKENS = 2 * BLOCK + 40
"""Steps end at every second block."""
BLOCKS = 64


@pytest.fixture(params=[False, True], ids=["one step at a time", "asynchronous"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Recurrent]:
    made = Recurrent(tmp_path, request.param, blocks=BLOCKS, step_tokens=STEP_TOKENS)
    yield made
    made.close()


def test_all_kv_is_saved_and_the_states_at_the_ends_of_steps(engine: Recurrent) -> None:
    request = engine.answer(PROMPT, tokens=BLOCK)
    assert list(request.output_token_ids) == [GOOD] * BLOCK
    engine.ends()
    assert engine.stored(request) == [True] * 7
    assert engine.states(request) == [False, True, False, True, False, True, True]
    assert engine.is_pool_free and not engine.connector.scheduler.counts["save_busy"]


@pytest.mark.parametrize(
    ("retention", "after"), [(0, [6]), (4 * BLOCK, [4, 6]), (2 * BLOCK, [2, 4, 6])]
)
def test_vllm_decides_after_which_steps_a_state_is_kept(
    tmp_path: Path, retention: int, after: list[int]
) -> None:
    """By default, after a prompt's last full block only."""
    made = {"blocks": BLOCKS, "step_tokens": STEP_TOKENS, "retention": retention}
    engine = Recurrent(tmp_path, **made)
    request = engine.answer(PROMPT, tokens=BLOCK)
    engine.ends()
    assert engine.stored(request) == [True] * 7
    assert [n for n, there in enumerate(engine.states(request), 1) if there] == after
    engine.forget()
    again = engine.answer(PROMPT)
    assert list(again.output_token_ids) == [GOOD] * 5 and counted(engine, "loaded_dram") == 6 + 2
    engine.close()


def test_a_prompt_that_ends_with_its_first_step_is_saved(tmp_path: Path) -> None:
    engine = Recurrent(tmp_path, blocks=BLOCKS, step_tokens=4 * BLOCK)
    request = engine.answer(2 * BLOCK, tokens=1)
    engine.ends()
    assert engine.stored(request) == [True] * 2 and engine.states(request) == [True] * 2
    assert engine.is_pool_free
    engine.close()


def test_a_hit_loads_all_kv_and_the_last_state_of_each_group(engine: Recurrent) -> None:
    engine.store(PROMPT)
    request = engine.add("again", PROMPT, 5)
    engine.until(lambda: request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
    first, attention, second = engine.scheduler.kv_cache_manager.get_block_ids("again")
    assert all(attention)
    for states in (first, second):
        assert [block > 0 for block in states] == [False] * 5 + [True]
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert request.num_preemptions == 0 and counted(engine, "loaded_dram") == 6 + 2
    assert sum(step.get("again", 0) for step in engine.steps[-10:]) == 8 + 4
    assert not counted(engine, "lost")
    engine.ends()
    assert engine.is_pool_free


def test_a_hit_ends_where_the_last_state_is(engine: Recurrent) -> None:
    """The prompts have four blocks in common; the first one's step ends there."""
    engine.store([*range(20, 20 + PROMPT)])
    request = engine.answer([*range(20, 20 + 4 * BLOCK), *range(900, 900 + BLOCK)])
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded_dram") == 4 + 2


def test_kv_without_a_state_after_it_is_no_hit(engine: Recurrent) -> None:
    """The prompts have five blocks in common."""
    engine.store([*range(20, 20 + PROMPT)])
    request = engine.answer([*range(20, 20 + 5 * BLOCK), *range(900, 900 + BLOCK)])
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded_dram") == 4 + 2
    engine.ends()
    assert engine.stored(request) == [True] * 6 and engine.states(request)[5]


def test_a_state_of_which_a_group_is_missing_is_no_hit(engine: Recurrent) -> None:
    engine.store([*range(20, 20 + PROMPT)])
    prompt = [*range(20, 20 + 2 * BLOCK + 5)]
    request = engine.answer(prompt, "first", 1)
    engine.ends()
    assert counted(engine, "loaded_dram") == 2 + 2
    arena, row = engine.connector.arena, engine.connector._opened.row
    arena.discard(row, [engine.state_name(request, 2, 2)])
    engine.forget()
    assert list(engine.answer(prompt).output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded_dram") == 2 + 2
    engine.ends()
    assert engine.states(request) == [False, True], "it is stored again"


def test_the_stores_part_follows_the_engines_own(engine: Recurrent) -> None:
    engine.store([*range(20, 20 + PROMPT)])
    engine.answer([*range(20, 20 + 2 * BLOCK + 1)], "half")
    before = counted(engine, "loaded")
    request = engine.answer([*range(20, 20 + PROMPT)])
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded") - before == 4 + 2
    engine.ends()
    assert engine.is_pool_free


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("page", [0, 1])
def test_a_request_of_which_a_block_or_state_fails_is_computed_from_its_start(
    engine: Recurrent, group: int, page: int
) -> None:
    engine.store(PROMPT)
    request = engine.add("again", PROMPT, 5)
    is_kv = engine.specs[group] is SPEC
    kv = bytes(request.block_hashes[3])
    engine.flip(kv if is_kv else engine.state_name(request, 6, group), page)
    engine.steps.clear()
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert sum(step.get("again", 0) for step in engine.steps) >= PROMPT
    assert counted(engine, "lost") == 1
    engine.ends()
    assert engine.is_pool_free
    engine.worker._worker._saver.submit(lambda: None).result(20)  # wrong blocks are dropped there
    engine.forget()
    engine.answer(PROMPT, "third")
    engine.ends()
    assert engine.states(request)[5] and all(engine.stored(request)), "what was wrong is replaced"


@pytest.mark.parametrize(
    "groups",
    [[SPEC, recurrent()], [recurrent(), SPEC], [recurrent(), recurrent(), SPEC, recurrent()]],
)
def test_engines_with_any_number_of_recurrent_groups(tmp_path: Path, groups: list[Any]) -> None:
    engine = Recurrent(tmp_path, blocks=BLOCKS, step_tokens=STEP_TOKENS, groups=groups)
    engine.store(PROMPT)
    request = engine.answer(PROMPT)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded_dram") == 6 + len(groups) - 1
    engine.close()


def test_engines_with_other_states_share_no_blocks(tmp_path: Path) -> None:
    first = Recurrent(tmp_path, blocks=BLOCKS, step_tokens=STEP_TOKENS)
    first.store(PROMPT)
    others = [(recurrent(32), SPEC, recurrent(32)), (SPEC, *STATES[::2])]
    for groups in others:
        second = Recurrent(tmp_path, blocks=BLOCKS, step_tokens=STEP_TOKENS, groups=groups)
        second.answer(PROMPT)
        assert not counted(second, "loaded")
        second.close()
    first.close()


def test_another_engine_of_the_model_finds_the_blocks(tmp_path: Path) -> None:
    """Also with another number of blocks and another length of steps."""
    first = Recurrent(tmp_path, blocks=BLOCKS, step_tokens=STEP_TOKENS)
    first.store(PROMPT)
    second = Recurrent(tmp_path, blocks=BLOCKS - 9, step_tokens=4 * BLOCK)
    assert list(second.answer(PROMPT).output_token_ids) == [GOOD] * 5
    assert counted(second, "loaded_dram") == 6 + 2
    second.close()
    first.close()

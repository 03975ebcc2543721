"""KV cache groups: blocks that a request takes, by vLLM's own managers, and what a hit needs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.engine.core import EngineCore

from headrace_engine.kv_groups import BlockUse, HitGroups, Window, block_use, hit_groups
from headrace_engine.vllm.engine import cache_groups
from headrace_engine.vllm.llm import cache_tokens
from tests.support.cache_groups import BLOCK, FULL, STATE, Managed, metadata, sliding

IN_FLIGHT = 40
GEMMA = [*[sliding(17)] * 5, FULL]
MODELS = {
    "full attention": [FULL],
    "a window first": [sliding(9), FULL],
    "as Gemma 3": GEMMA,
    "two windows": [sliding(5), FULL, sliding(30)],
    "recurrent": [FULL, STATE],
    "windows alone": [sliding(12)],
}


def use_of(groups: Sequence[Any]) -> BlockUse:
    return block_use(metadata(groups), BLOCK, IN_FLIGHT)


# Blocks of a request


def test_one_group_of_full_attention_takes_a_block_for_each_of_its_tokens() -> None:
    use = use_of([FULL])
    assert use == BlockUse() == BlockUse(1, 0, 0, 0)
    assert [use.blocks(n) for n in (0, 1, 7, 1000)] == [0, 1, 7, 1000]
    assert use.positions(37) == 37 and use.held_tokens(0.3 * 37, 5, 16) == 0.3 * 37 * 16


def test_a_window_takes_no_more_than_its_blocks() -> None:
    use = BlockUse(kept=1, windowed=2, window_blocks=10, prompt_blocks=30)
    assert [use.blocks(n) for n in (1, 4, 5, 6, 100)] == [3, 12, 15, 16, 110]
    assert [use.positions(n) for n in (3, 12, 15, 16, 110)] == [1, 4, 5, 6, 100]


def test_tokens_of_several_requests_are_those_of_equal_ones() -> None:
    use = BlockUse(kept=1, windowed=2, window_blocks=10, prompt_blocks=30)
    assert use.held_tokens(220, 2, 16) == 2 * 100 * 16
    assert use.held_tokens(220, 1, 16) == 210 * 16
    assert use.held_tokens(0, 0, 16) == 0


def test_layers_that_all_have_a_window_hold_any_number_of_tokens() -> None:
    use = use_of([sliding(12)])
    assert use.positions(3) == 3 and math.isinf(use.positions(100))
    assert use.held_tokens(100, 1, BLOCK) == 100 * BLOCK
    assert math.isinf(cache_tokens(cache_of(100), use))


def cache_of(blocks: int | None) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=BLOCK))


def test_the_longest_prompt_leaves_room_for_all_groups() -> None:
    assert cache_tokens(cache_of(100), BlockUse()) == 100 * BLOCK
    assert cache_tokens(cache_of(None), BlockUse()) == math.inf
    use = use_of(GEMMA)
    longest = cache_tokens(cache_of(100), use)
    assert longest == (100 - use.window_blocks) * BLOCK < 100 * BLOCK
    engine = Managed(GEMMA, 101, IN_FLIGHT)
    request = engine.begin(range(int(longest) - 1), BLOCK)
    while request is not None and request.num_computed_tokens < longest:
        assert engine.step(request, BLOCK)


@pytest.mark.parametrize("model", MODELS)
def test_vllm_admits_a_prompt_that_has_these_blocks(model: str) -> None:
    groups = MODELS[model]
    engine, use = Managed(groups, 4000, IN_FLIGHT), use_of(groups)
    for tokens in (1, BLOCK, BLOCK + 1, 5 * BLOCK, 100, 1000, 2000):
        request = engine.request(range(tokens))
        positions = -(-tokens // BLOCK)
        theirs = engine.manager.coordinator.get_num_blocks_to_allocate(
            *(request.request_id, tokens, tuple([] for _ in groups), 0, 0, 0, tokens),
            apply_admission_cap=True,
            prefill_end=tokens,
        )
        ours = use.kept * positions + min(use.windowed * positions, use.prompt_blocks)
        if len({repr(spec) for spec in groups if spec is not FULL}) < 2 and STATE not in groups:
            assert ours == theirs
        assert theirs <= ours <= theirs + (STATE in groups) + 4 * (model == "two windows")


@pytest.mark.parametrize("model", MODELS)
def test_a_request_that_decodes_holds_these_blocks(model: str) -> None:
    groups = MODELS[model]
    engine, use = Managed(groups, 4000, IN_FLIGHT), use_of(groups)
    request = engine.begin(range(70), IN_FLIGHT)
    assert request is not None
    while request.num_computed_tokens < 70:
        engine.step(request, IN_FLIGHT)
    differences = set()
    for _ in range(200):
        assert engine.step(request, 1)
        ours = use.blocks(-(-request.num_computed_tokens // BLOCK))
        differences.add(int(ours) - engine.held(request))
    assert min(differences) >= 0 and max(differences) <= len(groups)
    assert min(differences) == 0 or STATE in groups


@pytest.mark.parametrize("model", [name for name in MODELS if STATE not in MODELS[name]])
def test_it_is_vllms_own_size_of_the_cache(model: str) -> None:
    """As `cache_config.kv_cache_size_tokens`: requests of the maximum length, as prompts."""
    groups = MODELS[model]
    use, longest = use_of(groups), 1000
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=longest),
        max_in_flight_tokens=IN_FLIGHT,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
    )
    tokens, _ = get_kv_cache_capacity(config, Managed(groups, 3000).manager.kv_cache_config)
    positions = longest // BLOCK
    each = use.kept * positions + min(use.windowed * positions, use.prompt_blocks)
    assert tokens == int(3000 / each * longest)


# What a hit needs


def test_full_attention_needs_all_blocks_and_a_window_its_last_ones() -> None:
    assert hit_groups(metadata([FULL]), BLOCK) == HitGroups()
    found = hit_groups(metadata([sliding(9), FULL, sliding(9), STATE, FULL, sliding(2)]), BLOCK)
    assert found.kept == {1, 4}
    assert found.windows == (
        Window(0, frozenset({3})),
        Window(1, frozenset({5})),
        Window(2, frozenset({0, 2})),
    )
    assert [window.needed for window in found.windows] == [1, 1, 2]


def test_without_full_attention_all_blocks_of_each_group_are_needed() -> None:
    found = hit_groups(metadata([sliding(9), STATE]), BLOCK)
    assert found == HitGroups(frozenset({0, 1}))


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([], "0 KV cache groups"),
        ([{"group_idx": 0, "kind": "full_attention", "block_size": 8}], "blocks of 8 and 4"),
        ([{"group_idx": 0, "kind": "cross_attention", "block_size": 4}], "cross_attention"),
        ([{"group_idx": 0, "kind": "chunked_local_attention", "block_size": 4}], "chunked"),
    ],
)
def test_other_groups_are_named(groups: list[Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        hit_groups(groups, BLOCK)


def test_groups_of_other_kinds_count_as_if_they_kept_all() -> None:
    group = {"group_idx": 0, "kind": "chunked_local_attention", "block_size": 2}
    assert block_use([group], BLOCK, IN_FLIGHT) == BlockUse(kept=2)
    assert block_use([], BLOCK, IN_FLIGHT) == BlockUse()


# vLLM's own words


def test_vllm_tells_the_groups_of_a_started_engine() -> None:
    engine = Managed([sliding(9), FULL, STATE], 20)
    manager = engine.manager
    scheduler = SimpleNamespace(kv_cache_config=manager.kv_cache_config, kv_cache_manager=manager)
    core: Any = SimpleNamespace(scheduler=scheduler)

    async def call_utility_async(method: str) -> Any:
        return getattr(EngineCore, method)(core)

    llm = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=call_utility_async))
    assert asyncio.run(cache_groups(llm)) == metadata(engine.groups)

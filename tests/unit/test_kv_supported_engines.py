"""Which engines the store keeps, and how it cuts their layers. Slow to import, not to run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from headrace_engine.connector.supported_engines import engine_sharding, only_cache_group
from headrace_kvstore.blocks.sharding import HeadSharding
from headrace_kvstore.codec import CODECS, Raw

SIZE: dict[str, Any] = dict(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
FULL = FullAttentionSpec(**SIZE)
SLIDING = SlidingWindowSpec(**SIZE, sliding_window=128)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
INDEXER = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8)
MAMBA = MambaSpec(block_size=16, shapes=((4, 16),), dtypes=(torch.float32,))


def groups(*specs: KVCacheSpec) -> KVCacheConfig:
    made = [KVCacheGroupSpec([f"layers.{n}"], spec) for n, spec in enumerate(specs)]
    return KVCacheConfig(8, [], made)


def config(heads: int, ranks: int, draft_heads: int | None = None, **sizes: int) -> Any:
    kinds = ("pipeline_parallel", "prefill_context_parallel", "decode_context_parallel")
    sizes = {f"{kind}_size": 1 for kind in kinds} | sizes
    draft = None
    if draft_heads is not None:
        heads_of = SimpleNamespace(get_total_num_kv_heads=lambda: draft_heads)
        draft = SimpleNamespace(draft_model_config=heads_of)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, **{"nnodes_within_dp": 1} | sizes
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        speculative_config=draft,
    )


def spec(heads: int) -> FullAttentionSpec:
    return FullAttentionSpec(**SIZE | {"num_kv_heads": heads})


def test_one_kind_of_attention_is_kept() -> None:
    assert only_cache_group(groups(FULL)).kv_cache_spec is FULL
    assert only_cache_group(groups(MLA)).layer_names == ["layers.0"]
    alike = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": FULL})
    assert only_cache_group(groups(alike)).kv_cache_spec is alike


@pytest.mark.parametrize(
    ("specs", "kinds"),
    [
        ((FULL, SLIDING), ["full_attention", "sliding_window", "2 cache groups"]),
        ((FULL, MAMBA), ["full_attention", "mamba"]),
        (
            (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": MLA, "b": INDEXER}),),
            ["mla_attention (18432 bytes", "mla_attention (2112 bytes", "1 cache groups"],
        ),
        ((), ["0 cache groups of no kind"]),
    ],
    ids=["sliding window", "Mamba", "MLA with an indexer", "no attention"],
)
def test_others_are_refused_by_name_with_what_to_set(
    specs: tuple[KVCacheSpec, ...], kinds: list[str]
) -> None:
    with pytest.raises(ValueError) as refused:
        only_cache_group(groups(*specs))
    for part in (*kinds, "disable_hybrid_kv_cache_manager: true", "store.enabled: false"):
        assert part in str(refused.value)


def test_where_heads_lie_apart_a_part_is_a_head() -> None:
    assert engine_sharding(config(8, 2), "LBHNC", spec(4), Raw()) == HeadSharding(8, 2)
    assert engine_sharding(config(8, 1), "LBHNC", spec(8), Raw()) == HeadSharding(8, 1)
    assert engine_sharding(config(2, 4), "LBHNC", spec(1), Raw()) == HeadSharding(2, 4)


def test_else_it_is_what_a_rank_holds() -> None:
    assert engine_sharding(config(8, 2), "LBNHC", spec(4), Raw()) == HeadSharding(2, 2)
    assert engine_sharding(config(8, 2), None, spec(4), Raw()) == HeadSharding(2, 2)
    assert engine_sharding(config(2, 8), "LBNHC", spec(1), Raw()) == HeadSharding(2, 8)
    assert engine_sharding(config(8, 2), "LBHNC", spec(4), CODECS["fp8"]()) == HeadSharding(2, 2)


def test_mla_is_one_part_that_every_rank_has() -> None:
    assert engine_sharding(config(128, 8), "LBNHC", MLA, Raw()) == HeadSharding(1, 8)


@pytest.mark.parametrize(
    ("heads", "draft", "mine"),
    [(8, 4, spec(4)), (6, None, spec(1)), (8, None, spec(2))],
    ids=["a draft with other heads", "heads that do not divide", "ranks with other heads"],
)
def test_heads_that_are_not_shared_out_as_known_are_kept_rank_by_rank(
    heads: int, draft: int | None, mine: FullAttentionSpec
) -> None:
    ranks = 4 if heads == 6 else 2
    assert engine_sharding(config(heads, ranks, draft), "LBHNC", mine, Raw()) == HeadSharding(
        ranks, ranks
    )


def test_a_draft_with_the_same_heads_is_cut_alike() -> None:
    assert engine_sharding(config(8, 2, 8), "LBHNC", spec(4), Raw()) == HeadSharding(8, 2)


@pytest.mark.parametrize("kind", ["pipeline", "prefill_context", "decode_context"])
def test_engines_whose_ranks_hold_parts_of_a_prompt_or_of_the_layers_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind}_parallel_size above 1; set {kind}_p.*: 1, and"):
        engine_sharding(config(8, 2, **{f"{kind}_parallel_size": 2}), "LBHNC", spec(4), Raw())


def test_an_engine_on_several_machines_is_refused() -> None:
    with pytest.raises(ValueError, match=r"on several machines.*set nnodes: 1"):
        engine_sharding(config(8, 2, nnodes_within_dp=2), "LBHNC", spec(4), Raw())


def test_more_writers_than_a_slot_can_count_are_refused() -> None:
    with pytest.raises(ValueError, match="32 writing ranks at most; tensor_parallel_size is 64"):
        engine_sharding(config(64, 64), "LBHNC", spec(1), Raw())

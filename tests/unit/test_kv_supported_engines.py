"""Which engines the store keeps, and how it cuts their layers. Slow to import, not to run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from headrace_engine.connector.state_groups import StateGroups
from headrace_engine.connector.supported_engines import engine_sharding, stored_groups
from headrace_kvstore.blocks.sharding import HeadSharding
from headrace_kvstore.codec import CODECS, Raw

SIZE: dict[str, Any] = dict(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
FULL = FullAttentionSpec(**SIZE)
SLIDING = SlidingWindowSpec(**SIZE, sliding_window=128)
CHUNKED = ChunkedLocalAttentionSpec(**SIZE, attention_chunk_size=128)
RSWA = RSWASpec(**SIZE, rswa_window=128)
WIDE = SlidingWindowSpec(**SIZE | {"head_size": 128}, sliding_window=128)
LONG = SlidingWindowSpec(**SIZE | {"block_size": 32}, sliding_window=128)
OTHER_HEADS = SlidingWindowSpec(**SIZE | {"num_kv_heads": 2, "head_size": 128}, sliding_window=128)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
INDEXER = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8)
STATE: dict[str, Any] = dict(block_size=16, shapes=((4, 16),), dtypes=(torch.float32,))
MAMBA = MambaSpec(**STATE)
PADDED: dict[str, Any] = STATE | {"page_size_padded": FULL.page_size_bytes}
ALIGNED = MambaSpec(**PADDED, mamba_cache_mode="align")
SHORT = MambaSpec(**STATE, mamba_cache_mode="align")


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
    for spec in (FULL, MLA):
        found = stored_groups(groups(spec), Raw())
        assert found.spec is spec and found.of_layer == {"layers.0": 0}
        assert found.recovers_blocks and not found.frees_early
    alike = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": FULL})
    assert stored_groups(groups(alike), Raw()).spec is FULL
    assert stored_groups(groups(FULL), CODECS["fp8"]()).count == 1


@pytest.mark.parametrize("specs", [(FULL, SLIDING), (SLIDING, FULL, SLIDING), (CHUNKED, FULL)])
def test_windows_beside_full_attention_are_kept(specs: tuple[KVCacheSpec, ...]) -> None:
    found = stored_groups(groups(*specs), Raw())
    assert found.of_layer == {f"layers.{n}": n for n in range(len(specs))}
    assert (found.count, found.frees_early, found.recovers_blocks) == (len(specs), True, False)


def test_several_groups_of_full_attention_keep_their_blocks() -> None:
    found = stored_groups(groups(FULL, FULL), Raw())
    assert not found.frees_early and not found.recovers_blocks


@pytest.mark.parametrize("spec", [SLIDING, CHUNKED, RSWA])
def test_a_window_in_all_layers_is_one(spec: KVCacheSpec) -> None:
    found = stored_groups(groups(spec), Raw())
    assert found.frees_early and not found.recovers_blocks


@pytest.mark.parametrize("specs", [(ALIGNED, FULL), (FULL, ALIGNED, ALIGNED)])
def test_recurrent_layers_beside_full_attention_are_kept(specs: tuple[KVCacheSpec, ...]) -> None:
    """A stored block has the layers of one group."""
    found = stored_groups(groups(*specs), Raw())
    full = specs.index(FULL)
    recurrent = tuple(number for number in range(len(specs)) if number != full)
    assert found.states == StateGroups(attention=full, recurrent=recurrent)
    assert found.stored_layers == 1 and not found.recovers_blocks
    assert found.spec is ALIGNED


def test_each_rank_of_an_engine_with_recurrent_layers_has_its_own_pages() -> None:
    assert engine_sharding(config(8, 2), "LBHNC", ALIGNED, Raw()) == HeadSharding(2, 2)
    assert engine_sharding(config(2, 4), "LBHNC", ALIGNED, Raw()) == HeadSharding(4, 4)


@pytest.mark.parametrize(
    ("specs", "kinds"),
    [
        ((FULL, SHORT), ["mamba (256 bytes"]),
        ((FULL, SLIDING, ALIGNED), ["sliding_window", "mamba", "3 cache groups"]),
        ((FULL, FULL, ALIGNED), ["mamba", "3 cache groups"]),
        ((ALIGNED, ALIGNED), ["mamba", "2 cache groups"]),
        ((FULL, MAMBA), ["full_attention", "mamba", "2 cache groups"]),
        ((FULL, MLA), ["full_attention", "mla_attention"]),
        ((FULL, WIDE), ["sliding_window (32768 bytes a block of 16 tokens"]),
        ((FULL, LONG), ["sliding_window (32768 bytes a block of 32 tokens"]),
        ((FULL, OTHER_HEADS), ["full_attention", "sliding_window"]),
        (
            (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": MLA, "b": INDEXER}),),
            ["mla_attention (18432 bytes", "mla_attention (2112 bytes", "1 cache groups"],
        ),
        ((), ["0 cache groups of no kind"]),
    ],
    ids=[
        *("pages of other sizes", "states beside windows", "states beside two groups"),
        *("states alone", "states without prefix caching", "MLA", "sizes", "block sizes"),
        *("heads", "MLA with an indexer", "no attention"),
    ],
)
def test_others_are_refused_by_name_with_what_to_set(
    specs: tuple[KVCacheSpec, ...], kinds: list[str]
) -> None:
    with pytest.raises(ValueError) as refused:
        stored_groups(groups(*specs), Raw())
    for part in (*kinds, "disable_hybrid_kv_cache_manager: true", "store.enabled: false"):
        assert part in str(refused.value)


def test_several_groups_are_stored_exactly() -> None:
    for specs in ((FULL, SLIDING), (FULL, ALIGNED)):
        with pytest.raises(ValueError, match=r"codec: fp8 .* 2 cache groups; give raw, or set dis"):
            stored_groups(groups(*specs), CODECS["fp8"]())


def test_blocks_need_a_hash_each() -> None:
    found = groups(FULL, SLIDING)
    found.hash_block_size = 16
    assert stored_groups(found, Raw()).count == 2
    found.hash_block_size = 8
    with pytest.raises(ValueError, match=r"hashes 8 tokens at a time; leave out prefix_match_unit"):
        stored_groups(found, Raw())


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

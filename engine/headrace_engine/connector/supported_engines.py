"""The engines whose KV the store can keep, and the parts into which it cuts their layers.

Everything follows from vLLM's configuration alone, so both sides of a connector come to the same
result.
"""

from __future__ import annotations

from typing import Any

from headrace_engine.connector.cache_groups import CacheGroups
from headrace_engine.connector.identity.engine_identity import speculative_heads
from headrace_engine.connector.state_groups import StateGroups
from headrace_engine.vllm.kv_cache import (
    MLAAttentionSpec,
    get_kv_cache_spec_kind,
    iter_layer_specs,
    keeps_all_blocks,
    keeps_states_of_blocks,
)
from headrace_kvstore.blocks.sharding import HeadSharding, heads_are_contiguous
from headrace_kvstore.blocks.slot_record import MAX_WRITERS
from headrace_kvstore.codec import Codec

OTHER_SPLITS = ("pipeline_parallel", "prefill_context_parallel", "decode_context_parallel")
SEVERAL = frozenset({"full_attention", "sliding_window", "chunked_local_attention"})
"""Kinds of cache groups that an engine may have beside each other."""
WITH_STATES = frozenset({"full_attention", "mla_attention"})
"""Kinds of the one cache group that an engine may have beside those of recurrent layers."""


def stored_groups(kv_cache_config: Any, codec: Codec) -> CacheGroups:
    """Return the engine's KV cache groups, whose layers are all of one size.

    Args:
        kv_cache_config: vLLM's KVCacheConfig.
        codec: of the stored blocks.

    Raises:
        ValueError: other layers, or other groups than of attention over tokens; the text names
            their kinds and the setting to change.
    """
    groups = kv_cache_config.kv_cache_groups
    recurrent = _recurrent_groups(kv_cache_config, codec)
    if recurrent is not None:
        return recurrent
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    kinds = [get_kv_cache_spec_kind(spec).value for spec in specs]
    sizes = {(spec.page_size_bytes, spec.block_size, spec.num_heads) for spec in specs}
    if len(sizes) == 1 and (len(groups) == 1 or set(kinds) <= SEVERAL):
        _check_settings(kv_cache_config, specs[0].block_size, codec)
        return CacheGroups(
            _of_layer(kv_cache_config),
            specs[0],
            frees_early=not all(map(keeps_all_blocks, specs)),
        )
    about = [
        f"{kind} ({spec.page_size_bytes} bytes a block of {spec.block_size} tokens and layer)"
        for kind, spec in zip(kinds, specs, strict=True)
    ]
    raise ValueError(
        "the KV store keeps models whose layers all have the same size of KV, and are attention "
        "over tokens, or recurrent layers with prefix caching beside one group of full attention; "
        "this one has "
        f"{len(groups)} cache groups of "
        f"{', '.join(dict.fromkeys(about)) or 'no kind'}; set "
        "disable_hybrid_kv_cache_manager: true where all of them are attention over tokens, else "
        "run this model without the store (store.enabled: false, or no HeadraceConnector)"
    )


def _recurrent_groups(kv_cache_config: Any, codec: Codec) -> CacheGroups | None:
    """Return the groups of an engine with recurrent layers; None if it has none, or others that are
    not kept."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = [get_kv_cache_spec_kind(spec).value for spec in specs]
    attention = [number for number, kind in enumerate(kinds) if kind in WITH_STATES]
    recurrent = [n for n, spec in enumerate(specs) if keeps_states_of_blocks(spec)]
    sizes = {(spec.page_size_bytes, spec.block_size) for spec in specs}
    if len(attention) != 1 or not recurrent or len(specs) != 1 + len(recurrent) or len(sizes) != 1:
        return None
    _check_settings(kv_cache_config, specs[0].block_size, codec)
    states = StateGroups(recurrent=tuple(recurrent), attention=attention[0])
    return CacheGroups(_of_layer(kv_cache_config), specs[recurrent[0]], False, states)


def _of_layer(kv_cache_config: Any) -> dict[str, int]:
    """Return the number of each layer's cache group."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {name: number for number, group in groups for name in group.layer_names}


def _check_settings(kv_cache_config: Any, block_tokens: int, codec: Codec) -> None:
    groups = len(kv_cache_config.kv_cache_groups)
    if groups > 1 and codec.lossy:
        raise ValueError(
            f"codec: {codec.name} is not for models with {groups} cache groups; give raw, or set "
            "disable_hybrid_kv_cache_manager: true"
        )
    if kv_cache_config.hash_block_size not in (None, block_tokens):
        raise ValueError(
            f"the KV store names blocks of {block_tokens} tokens by their hash, and vLLM hashes "
            f"{kv_cache_config.hash_block_size} tokens at a time; leave out prefix_match_unit"
        )


def engine_sharding(
    vllm_config: Any, cache_layout: str | None, spec: Any, codec: Codec
) -> HeadSharding:
    """Return how the layers of an engine's blocks are cut. With recurrent layers, each rank's pages
    are a part.

    Args:
        vllm_config: vLLM's VllmConfig.
        cache_layout: the engine's own name of its layout (`KVCacheConfig.kv_cache_layout`).
        spec: of the layers, vLLM's AttentionSpec; the MambaSpec if some layers are recurrent.
        codec: of the stored blocks. A lossy one codes all of a rank's heads of a layer as one part.

    Raises:
        ValueError: the engine is split in another way than by tensor parallelism, or too far.
    """
    parallel = vllm_config.parallel_config
    for kind in OTHER_SPLITS:
        if getattr(parallel, f"{kind}_size") > 1:
            raise ValueError(
                f"the KV store does not serve engines with {kind}_size above 1; set "
                f"{kind}_size: 1, and raise tensor_parallel_size"
            )
    if parallel.nnodes_within_dp > 1:
        raise ValueError(
            "the KV store does not serve engines whose ranks are on several machines: a block "
            "holds the KV of all ranks; set nnodes: 1, and raise tensor_parallel_size only as far "
            "as one machine's devices go"
        )
    ranks = parallel.tensor_parallel_size
    if keeps_states_of_blocks(spec):
        parts = HeadSharding(ranks, ranks)
    else:
        heads, apart = _heads(vllm_config, spec, ranks), heads_are_contiguous(cache_layout)
        parts = HeadSharding.of(heads, ranks, apart and not codec.lossy)
    if parts.writers > MAX_WRITERS:
        raise ValueError(
            f"the KV store serves engines of {MAX_WRITERS} writing ranks at most; "
            f"tensor_parallel_size is {ranks}"
        )
    return parts


def _heads(vllm_config: Any, spec: Any, ranks: int) -> int:
    """Return the number of KV heads of all ranks. If vLLM's count differs from the heads that the
    ranks hold together (a draft model with other heads, packed heads), each rank's share counts as
    one."""
    if isinstance(spec, MLAAttentionSpec):
        return 1
    heads = int(vllm_config.model_config.get_total_num_kv_heads())
    even = heads % ranks == 0 or ranks % heads == 0
    known = even and spec.num_heads == spec.num_kv_heads == max(1, heads // ranks)
    return heads if known and speculative_heads(vllm_config) in (0, heads) else ranks

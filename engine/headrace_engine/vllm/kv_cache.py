"""vLLM's KV cache: its layout, the specs of its layers, its block hashes, and the facts on which
its bytes depend.

`tests/unit/test_contracts_store.py` pins what is used here.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

import torch
import vllm
from pydantic.fields import FieldInfo
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.config.utils import normalize_value
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    get_kv_cache_spec_kind,
    group_kernel_blocks,
    iter_layer_specs,
)

from headrace_kvstore.identity.prompt_hash import hash_prompt

__all__ = ["MLAAttentionSpec", "get_kv_cache_spec_kind", "iter_layer_specs"]

FILE_FORMATS = frozenset(
    {
        *("auto", "fastsafetensors", "hf", "instanttensor", "mistral", "npcache", "pt"),
        *("runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state"),
    }
)
"""Values of `load_format` whose weights are files of the model's folder, its commit on the hub, or
its objects. `tensorizer`, `modelexpress` and `ipc_cache` take them from
elsewhere."""


def vllm_version() -> str:
    """Return the installed vLLM's version."""
    return str(vllm.__version__)


def cpu_attention_isa(dtype: Any, block_tokens: int, head_dim: int, kv_dtype: str) -> str:
    """Return the instruction set for which vLLM's CPU attention packs keys in the cache."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, block_tokens, head_dim, kv_dtype))


def copy_batch(dst: Any, src: Any, sizes: Any) -> None:
    """Queue copies between host and device memory on the current CUDA stream, in one call.

    Args:
        dst, src, sizes: int64 tensors in host memory: addresses, and bytes of each copy.
    """
    from vllm._custom_ops import swap_blocks_batch

    swap_blocks_batch(src, dst, sizes)


def keeps_all_blocks(spec: Any) -> bool:
    """Whether vLLM keeps all of a running request's blocks of such layers: none of them leaves an
    attention window."""
    return isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec)


def keeps_states_of_blocks(spec: Any) -> bool:
    """Whether such layers are recurrent, and vLLM keeps their states at block boundaries."""
    return isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"


def recurrent_layout(vllm_config: VllmConfig, kv_cache_config: Any) -> str:
    """Return a digest of everything that decides how pages of recurrent and attention layers lie in
    the blocks of an engine's pool, beyond its cache layout: layers and groups, shapes and formats
    of states, and settings of the recurrent layers' kernels."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    groups = [
        [group.layer_names, _state_format(group.kv_cache_spec)]
        for group in kv_cache_config.kv_cache_groups
    ]
    kernels = model_settings(vllm_config.mamba_config, frozenset())
    text = repr((groups, get_conv_state_layout(), sorted(kernels.items())))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _state_format(spec: Any) -> tuple[Any, ...]:
    kind, size = get_kv_cache_spec_kind(spec).value, spec.page_size_bytes
    if not isinstance(spec, MambaSpec):
        return kind, size
    dtypes = tuple(map(str, spec.dtypes))
    return kind, size, tuple(map(tuple, spec.shapes)), dtypes, str(spec.mamba_type)


def pool_pages(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> dict[str, torch.Tensor]:
    """Return the pages of an engine's block pool, of which the layers of several cache groups are
    views: page n of a block holds the n-th layer of the group that has the block.

    Args:
        kv_caches: tensor by layer name, as vLLM's `register_kv_caches` hands over.
        kv_cache_config: vLLM's KVCacheConfig. All pages have one size.

    Returns:
        uint8 [blocks, bytes of a page] by "page.n".

    Raises:
        ValueError: the layers lie in other ways.
    """
    groups, blocks = kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
    size = groups[0].kv_cache_spec.page_size_bytes
    pages: dict[str, torch.Tensor] = {}
    for group in groups:
        for number, layer in enumerate(group.layer_names):
            cache = group_kernel_blocks(kv_caches[layer], blocks)
            axes = list(zip(cache.shape, cache.stride(), strict=True))
            item, stride = cache.element_size(), axes[0][1] * cache.element_size()
            reach = (1 + sum((extent - 1) * step for extent, step in axes[1:])) * item
            page = pages.get(f"page.{number}")
            if page is None:
                first = cache.storage_offset() * item
                page = torch.tensor([], dtype=torch.uint8, device=cache.device)
                page.set_(cache.untyped_storage(), first, (blocks, size), (stride, 1))
                pages[f"page.{number}"] = page
            if (cache.data_ptr(), stride) != (page.data_ptr(), page.stride(0)) or reach > size:
                raise ValueError(
                    f"the KV store keeps recurrent layers whose blocks are pages of {size} bytes; "
                    f"{layer} has {reach} bytes a block, {stride} apart; set "
                    "VLLM_KV_CACHE_LAYOUT=LBHNC"
                )
    return pages


def runs_layer_hooks(forward_context: Any) -> bool:
    """Whether vLLM calls a connector before each layer of the step of this context.

    False while a full CUDA graph is replayed, and if the context does not describe the step.
    """
    return (
        getattr(forward_context, "attn_metadata", None) is not None
        and forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL
    )


def recovers_failed_loads(vllm_config: Any) -> bool:
    """Whether vLLM computes the blocks whose load failed under a step before their request's next
    token.

    It does not if it schedules another step before it knows of the failure (vllm#45138), or with
    the second model runner, which keeps the old count of computed tokens (vllm#49250).
    """
    return vllm_config.max_concurrent_batches == 1 and not vllm_config.use_v2_model_runner


def model_settings(config: Any, ignored: frozenset[str]) -> dict[str, Any]:
    """Return the fields of one of vLLM's configurations that differ from their defaults, as JSON
    values.

    Args:
        config: a dataclass of `vllm.config`, or None.
        ignored: fields that are left out.

    Raises:
        TypeError: a value has no stable form.
    """
    if config is None:
        return {}
    found = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in ignored and value != _default_of(field):
            found[field.name] = normalize_value(value)
    return found


def _default_of(field: Field[Any]) -> Any:
    """Return a field's default, which pydantic keeps in an object of its own."""
    if isinstance(field.default, FieldInfo):
        return field.default.get_default(call_default_factory=True, validated_data={})
    return field.default if field.default_factory is MISSING else field.default_factory()


def identifies_media(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names the images, sound and video of prompts by their content. It numbers them
    if neither blocks nor processed media are cached."""
    media = vllm_config.model_config.multimodal_config
    if media is None or media.mm_processor_cache_gb > 0:
        return True
    return bool(vllm_config.cache_config.enable_prefix_caching)


def reads_model_files(load_format: str) -> bool:
    """Whether all weights of this `load_format` are files of the model, or its objects. False for
    plugins' loaders, which may do anything."""
    loaders = sys.modules.get("vllm.model_executor.model_loader")
    known = getattr(loaders, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).get(load_format)
    ours = known is None or known.__module__.startswith("vllm.")
    return ours and load_format in FILE_FORMATS


class BlockHasher:
    """vLLM's own hashes of a text prompt's full blocks, as its engine makes them.

    Args:
        algorithm: `cache_config.prefix_caching_hash_algo`.
        block_tokens: tokens of a block.
    """

    def __init__(self, algorithm: str, block_tokens: int) -> None:
        self._fast = algorithm == "sha256_cbor"
        self._hash = get_hash_fn_by_name(algorithm)
        self._root = self._hash(resolve_none_hash_seed(self._hash))
        self._block_tokens = block_tokens

    def __call__(
        self, token_ids: Sequence[int], salt: str, lora: tuple[str, str] | None = None
    ) -> list[bytes]:
        """Return the hashes of the blocks of a prompt that has no images or embeddings.

        Args:
            lora: name and path of its adapter, if any.
        """
        if self._fast:
            return hash_prompt(token_ids, self._block_tokens, self._root, salt, lora)
        parent, hashes = self._root, []
        later: tuple[tuple[str, ...], ...] | None = (("lora", *lora),) if lora else None
        first = (*(later or ()), ("cache_salt", salt)) if salt else later
        extra = first
        for end in range(self._block_tokens, len(token_ids) + 1, self._block_tokens):
            block = tuple(token_ids[end - self._block_tokens : end])
            parent = self._hash((parent, block, extra))
            hashes.append(bytes(parent))
            extra = later
        return hashes


def block_hasher(vllm_config: VllmConfig) -> BlockHasher:
    """Return a function: (token ids, salt, name and path of an adapter) -> an engine's hashes of a
    prompt's full blocks."""
    cache = vllm_config.cache_config
    return BlockHasher(cache.prefix_caching_hash_algo, cache.block_size)


def hash_seed(algorithm: str) -> str:
    """Return the seed from which vLLM derives its root block hash; the same in every process.

    Raises:
        ValueError: it is random, so that no other process would find this one's blocks.
    """
    hash_function = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(hash_function)
    if seed != resolve_none_hash_seed(hash_function):
        raise ValueError(
            f"prefix_caching_hash_algo: {algorithm} hashes blocks with a random seed in each "
            "process; set PYTHONHASHSEED to the same number for all engines, or use sha256_cbor"
        )
    return seed

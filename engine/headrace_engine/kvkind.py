"""An engine's kind, by which `exchange` decides with whom it can exchange KV."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headrace_engine.exchange import CHECKS_KEY, KvKind
from headrace_kvstore._vllm_compat import vllm_version
from headrace_kvstore.connector.identity import (
    connector_settings,
    model_identity,
    overrides_identity,
    sparse_unit_tokens,
)
from headrace_kvstore.keys import canonical


def kv_kind(vllm_config: Any, layout: str = "") -> KvKind:
    """An engine's kind. Reads the weights, if no process of this machine has before.

    Args:
        layout: as `_vllm_compat.cache_layout` finds it.
    """
    attention = vllm_config.attention_config.backend
    parts = [
        model_digest(vllm_config).decode(),
        f"vllm {vllm_version()}",
        f"headrace {_headrace_version()}",
        attention.name if attention else "",
        vllm_config.cache_config.block_size,
        sparse_unit_tokens(vllm_config),
    ]
    digest = hashlib.blake2b(canonical(parts).encode(), digest_size=8).hexdigest()
    settings = connector_settings(vllm_config.kv_transfer_config)
    checks = [(each.get(CHECKS_KEY) or {}).get("check") for each in settings]
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return KvKind(digest, ranks, kv_heads(vllm_config), layout, "all" in checks)


def kv_heads(vllm_config: Any) -> int:
    """KV heads of all ranks; 0 for MLA."""
    model = vllm_config.model_config
    return 0 if model.use_mla else int(model.get_total_num_kv_heads())


def model_digest(vllm_config: Any) -> bytes:
    """What tells engines apart whose KV must not mix, besides what vLLM's handshake compares: the
    weights."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    try:
        overrides = overrides_identity(model.hf_overrides)
    except ValueError:
        overrides = "?"  # vLLM's handshake does not compare them either
    parts = [*model_identity(model), model.quantization or "", overrides]
    return canonical([*parts, str(model.dtype), str(cache.cache_dtype)]).encode()


def _headrace_version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return ""

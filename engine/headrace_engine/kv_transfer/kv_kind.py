"""Determines an engine's kind, by which `compatibility` decides which engines can exchange KV."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headrace_engine.connector.identity.engine_identity import (
    connector_settings,
    first_epoch,
    kv_identity,
    sparse_page_tokens,
)
from headrace_engine.connector.identity.weights import Unidentified
from headrace_engine.kv_transfer.compatibility import CHECKS_KEY, UNIDENTIFIED, KvKind
from headrace_engine.vllm.recurrent_models import keeps_states
from headrace_kvstore.identity.namespace import canonical


def kv_kind(vllm_config: Any, layout: str = "") -> KvKind:
    """Return an engine's kind. Reads the weights, if no process of this machine has before.

    Args:
        layout: as `vllm.engine.cache_layout` finds it.
    """
    settings = connector_settings(vllm_config.kv_transfer_config)
    checks = [(each.get(CHECKS_KEY) or {}).get("check") for each in settings]
    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads, check_all = kv_heads(vllm_config), "all" in checks
    try:
        digest, why = _kind_digest(vllm_config), ""
    except Unidentified as error:
        digest, why = UNIDENTIFIED, str(error)
    return KvKind(digest, ranks, heads, layout, check_all, why)


def _kind_digest(vllm_config: Any) -> str:
    """Return a digest of everything that two engines must have in common.

    Raises:
        Unidentified: the engine's KV has no identity.
    """
    identity = kv_identity(vllm_config)
    attention = vllm_config.attention_config.backend
    parts = [
        identity.encoding.decode(),
        first_epoch(vllm_config).hex(),
        f"headrace {_headrace_version()}",
        attention.name if attention else "",
        vllm_config.cache_config.block_size,
        sparse_page_tokens(vllm_config),
        # A recurrent layer's state has room for draft tokens.
        vllm_config.num_speculative_tokens if keeps_states(vllm_config) else 0,
    ]
    return hashlib.blake2b(canonical(parts).encode(), digest_size=8).hexdigest()


def kv_heads(vllm_config: Any) -> int:
    """Return the number of KV heads of all ranks; 0 for MLA."""
    model = vllm_config.model_config
    return 0 if model.use_mla else int(model.get_total_num_kv_heads())


def _headrace_version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return ""

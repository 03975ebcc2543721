"""Which engines can exchange KV: those with the same weights, settings and versions.

vLLM's connector compares much of this when two engines meet, and then fails the pull. A rolling
change of model, settings or version meets that on every pair of an old and a new replica. So each
replica tells its kind beforehand: gateways never plan such a pair, and a prefill replica refuses
what it would compute for nothing.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headrace_kvstore._vllm_compat import vllm_version
from headrace_kvstore.connector.identity import (
    model_identity,
    overrides_identity,
    sparse_unit_tokens,
)
from headrace_kvstore.keys import canonical


def kv_kind(vllm_config: Any) -> str:
    """Digest of all that two engines must have in common; 16 hex digits. Reads the weights, if no
    process of this machine has before."""
    attention = vllm_config.attention_config.backend
    parts = [
        model_digest(vllm_config).decode(),
        f"vllm {vllm_version()}",
        f"headrace {_headrace_version()}",
        attention.name if attention else "",
        vllm_config.cache_config.block_size,
        sparse_unit_tokens(vllm_config),
    ]
    return hashlib.blake2b(canonical(parts).encode(), digest_size=8).hexdigest()


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

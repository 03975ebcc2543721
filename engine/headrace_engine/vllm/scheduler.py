"""vLLM's schedulers, their manager of KV blocks, and the specs of caches that choose it."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

__all__ = [
    "AsyncScheduler",
    "BlockHash",
    "FullAttentionManager",
    "FullAttentionSpec",
    "Scheduler",
    "make_block_hash_with_group_id",
    "register_kv_cache_spec",
    "replace_as",
]


def name_block(pool: Any, name: Any, block: Any, tokens: int) -> None:
    """Make a block of vLLM's pool findable under a name.

    Args:
        name: from `make_block_hash_with_group_id`. tokens: number of tokens that it holds.
    """
    pool._insert_block_hash(name, block, num_tokens=tokens)

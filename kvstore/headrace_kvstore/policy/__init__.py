"""Eviction and admission policies over the slot table; `base.Policy` says what one is."""

from headrace_kvstore.policy.base import Policy, block_keys, evictable, parent_keys, slot_keys
from headrace_kvstore.policy.cost_aware import CostAware
from headrace_kvstore.policy.frequency import LFU
from headrace_kvstore.policy.priority import Priority
from headrace_kvstore.policy.recency import LRU
from headrace_kvstore.policy.s3fifo import S3FIFO

__all__ = [
    "LFU",
    "LRU",
    "S3FIFO",
    "CostAware",
    "Policy",
    "Priority",
    "block_keys",
    "evictable",
    "parent_keys",
    "slot_keys",
]

"""Which blocks a store gives up for new ones.

`base.Policy` is the interface. `LRU` and `CostAware` implement it. LFU, S3-FIFO and priorities are
measured beside them in `benchmarks/kvpolicy`; `CostAware` saves more than each at every size.
"""

from headrace_kvstore.policy.base import Policy, block_keys, evictable, parent_keys, slot_keys
from headrace_kvstore.policy.cost_aware import CostAware
from headrace_kvstore.policy.recency import LRU

__all__ = [
    "LRU",
    "CostAware",
    "Policy",
    "block_keys",
    "evictable",
    "parent_keys",
    "slot_keys",
]

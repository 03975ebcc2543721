"""The eviction policies that a store can have, and which of them a store of a size gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from headrace_kvstore.blocks.slot_record import READY, SLOT
from headrace_kvstore.policy.base import Policy
from headrace_kvstore.policy.cost_aware import CostAware, history_blocks, state_dtype
from headrace_kvstore.policy.recency import LRU

logger = logging.getLogger("headrace.kvstore")

DEFAULT = "cost-aware"
HEAD_BYTES = 64
MAX_STATE_SHARE = 1 / 8
"""Maximum share of a store that a policy's state may take; if it would be more, LRU decides."""


class PolicyKind(NamedTuple):
    """A policy that a store can have."""

    code: int
    """Its number in arenas' headers; it never changes."""
    make: Callable[..., Policy]
    """Returns the policy; its argument is one record of `state`, if there is one."""
    state: Callable[[int], np.dtype] | None = None
    """Returns the dtype of its state for a store of so many bytes; None if it has no state."""


def _record(size_bytes: int) -> np.dtype:
    """Return the dtype of `CostAware`'s state for a store of `size_bytes`."""
    blocks = history_blocks(size_bytes)
    return state_dtype(max(1, blocks // 4), blocks)


KINDS: Mapping[str, PolicyKind] = {
    "lru": PolicyKind(0, LRU),
    "cost-aware": PolicyKind(4, CostAware, _record),
}
"""The policies by the name that settings give."""

NAMES = {kind.code: name for name, kind in KINDS.items()}


def state_bytes(name: str, size_bytes: int) -> int:
    """Return the bytes of a policy's state for a store of `size_bytes`."""
    state = KINDS[name].state
    return 0 if state is None else HEAD_BYTES + state(size_bytes).itemsize


def affordable(name: str, size_bytes: int) -> str:
    """Return the name of the policy, or LRU if its state would take too much of so small a store.

    Raises ValueError for an unknown name.
    """
    if name not in KINDS:
        raise ValueError(f"policy: {name!r} is unknown; give one of {', '.join(KINDS)}")
    if state_bytes(name, size_bytes) <= MAX_STATE_SHARE * size_bytes:
        return name
    logger.warning("a store of %d bytes is too small for %s; LRU evicts", size_bytes, name)
    return "lru"


def warm(name: str) -> None:
    """Compile the policy's code on a table of its own: no process may compile in the section."""
    table = np.zeros(2, SLOT)
    table["state"], table["bytes"] = READY, 1.0
    table["hash"][1] = (1).to_bytes(32, "little")
    kind = KINDS[name]
    policy = kind.make() if kind.state is None else kind.make(np.zeros(1, kind.state(0)))
    keys = np.array([1, 2], np.uint64)
    policy.prompt(keys, 0.0)
    policy.choose(table, 1.0, 1)
    policy.rates(keys, table, 1.0)
    policy.reset_history()

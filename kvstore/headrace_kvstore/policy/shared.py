"""One policy for all processes of a machine: which one, where its state is, and who may use it.

The process that creates the arena chooses the policy. The choice is in the arena's header, so every
process evicts by the same policy over the same state. One process at a time uses it, under a lock
that the kernel releases when its holder dies. Meanwhile the state's first word is 1. A process that
finds it so on entry begins the history anew, so a death inside costs what was learned.

    state = [inside: u64][7 words unused][the policy's own record]
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

import numpy as np

from headrace_kvstore.policy.base import Policy
from headrace_kvstore.policy.cost_aware import CostAware, history_blocks, state_dtype
from headrace_kvstore.policy.recency import LRU
from headrace_kvstore.table import READY, SLOT

logger = logging.getLogger("headrace.kvstore")

T = TypeVar("T")

DEFAULT = "cost-aware"
HEAD_BYTES = 64
MOST_OF_STORE = 1 / 8
"""Share of a store that a policy's state may take; where it would be more, LRU decides."""


KINDS = {"lru": 0, "cost-aware": 4}
"""Codes by the name that settings give. They stand in arenas' headers and never change."""

NAMES = {code: name for name, code in KINDS.items()}


def _record(size_bytes: int) -> np.dtype:
    """What `CostAware` remembers beside a store of `size_bytes`."""
    blocks = history_blocks(size_bytes)
    return state_dtype(max(1, blocks // 4), blocks)


def state_bytes(name: str, size_bytes: int) -> int:
    """Bytes of a policy's state beside a store of `size_bytes`."""
    return 0 if name == "lru" else HEAD_BYTES + _record(size_bytes).itemsize


def affordable(name: str, size_bytes: int) -> str:
    """The policy of that name, or LRU where its state would take too much of so small a store.

    Raises ValueError for an unknown name.
    """
    if name not in KINDS:
        raise ValueError(f"policy: {name!r} is unknown; give one of {', '.join(KINDS)}")
    if state_bytes(name, size_bytes) <= MOST_OF_STORE * size_bytes:
        return name
    logger.warning("a store of %d bytes is too small for %s; LRU evicts", size_bytes, name)
    return "lru"


class SharedPolicy:
    """The policy named, over state in shared memory; as a context manager it is the section in
    which its calls are made:

        with shared as policy:
            policy.prompt(...)

    Entering raises LockBusyError where the lock cannot be had.

    Args:
        state: u8 [state_bytes], zeroed when new; fewer bytes than this version of the policy
            needs, left by another version, make LRU decide.
    """

    def __init__(
        self,
        name: str,
        state: np.ndarray,
        size_bytes: int,
        lock: AbstractContextManager[None],
    ) -> None:
        if len(state) != state_bytes(name, size_bytes):
            logger.warning("the state of policy %s is of another version; LRU evicts", name)
            name = "lru"
        self.name, self.lock = name, lock
        self._inside: np.ndarray | None = None
        self.policy: Policy = LRU()
        if name != "lru":
            self._inside = state[:8].view(np.uint64)
            record = state[HEAD_BYTES:].view(_record(size_bytes))
            with self.lock:  # nobody is inside while a new policy sets up its state
                self.policy = CostAware(record)

    @property
    def learns(self) -> bool:
        """Whether there is any use in telling it of prompts."""
        return self.policy.learns

    def ask(self, call: Callable[[Policy], T]) -> T:
        """Call the policy inside its section. If it raises, the error is logged and LRU answers.

        None of this happens under the arena's own lock, so look-ups and leases never wait for it.
        Raises LockBusyError where others keep the policy.
        """
        try:
            with self as policy:
                return call(policy)
        except TimeoutError:
            raise
        except Exception:
            logger.exception("policy %s failed; LRU decides", self.name)
            return call(LRU())

    def __enter__(self) -> Policy:
        self.lock.__enter__()
        try:
            if self._inside is not None:
                if self._inside[0]:
                    logger.warning("the policy's history begins anew: a process died inside it")
                    self.policy.forget()
                self._inside[0] = 1
        except BaseException:
            self.lock.__exit__(None, None, None)
            raise
        return self.policy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._inside is not None:
            self._inside[0] = 0
        self.lock.__exit__(kind, error, trace)


def warm(name: str) -> None:
    """Compile what the policy needs, on a table of its own: nobody may compile in the section."""
    table = np.zeros(2, SLOT)
    table["state"], table["bytes"] = READY, 1.0
    table["hash"][1] = (1).to_bytes(32, "little")
    policy = LRU() if name == "lru" else CostAware(np.zeros(1, _record(0)))
    keys = np.array([1, 2], np.uint64)
    policy.prompt(keys, 0.0)
    policy.choose(table, 1.0, 1)
    policy.rates(keys, table, 1.0)
    policy.forget()

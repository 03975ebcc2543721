"""One policy for all processes of a machine: the choice of it, its state, and its section.

The process that creates the arena chooses the policy. The choice is in the arena's header, so every
process evicts by the same policy over the same state. One process at a time uses it, under a lock
that the kernel releases when its holder dies. The state's first word is 1 while a process uses it.
If a process finds 1 on entry, another one died inside; it then starts the history again, and all
that was learned is lost.

    state = [inside: u64][7 words unused][the policy's own record]
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple, TypeVar

import numpy as np

from headrace_kvstore.blocks.slot_record import READY, SLOT
from headrace_kvstore.policy.base import Policy
from headrace_kvstore.policy.cost_aware import CostAware, history_blocks, state_dtype
from headrace_kvstore.policy.recency import LRU

logger = logging.getLogger("headrace.kvstore")

T = TypeVar("T")

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


class SharedPolicy:
    """A policy over state in shared memory. As a context manager it is the section for its calls:

        with shared as policy:
            policy.prompt(...)

    Entering raises LockBusyError if the lock is not free in time.

    Args:
        state: u8 [state_bytes], zeroed when new. If another version of the policy left another
            size, LRU decides.
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
        kind = KINDS[name]
        if kind.state is None:
            self.policy: Policy = kind.make()
        else:
            self._inside = state[:8].view(np.uint64)
            record = state[HEAD_BYTES:].view(kind.state(size_bytes))
            with self.lock:  # no process may be inside while a new policy sets up its state
                self.policy = kind.make(record)

    @property
    def learns(self) -> bool:
        """Whether the policy learns from prompts."""
        return self.policy.learns

    def ask(self, call: Callable[[Policy], T]) -> T:
        """Call the policy inside its section. If it raises, the error is logged and LRU answers.

        The arena's own lock is not held, so look-ups and leases never wait for this. Raises
        LockBusyError if other processes hold the policy for too long.
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
                    self.policy.reset_history()
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

"""One eviction policy for all processes of a machine: its state in shared memory, and its lock.

The process that creates the arena chooses the policy. The choice is in the arena's header, so every
process evicts by the same policy over the same state. One process at a time uses it, under a lock
that the kernel releases when its holder dies. The state's first word is 1 while a process uses it.
If a process finds 1 on entry, another one died inside; it then starts the history again, and all
that was learned is lost.

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
from headrace_kvstore.policy.recency import LRU
from headrace_kvstore.policy.registry import HEAD_BYTES, KINDS, state_bytes

logger = logging.getLogger("headrace.kvstore")

T = TypeVar("T")


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

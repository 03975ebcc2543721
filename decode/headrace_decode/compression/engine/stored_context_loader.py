"""Loads retained KV from the node's store for incremental requests, and saves theirs to it
(`stored_context`).

A waiting request is given blocks. It keeps waiting, as vLLM has requests wait for KV from
elsewhere, until the store's connector has filled them. If a block cannot be loaded, or if the
request is not scheduled as soon as all are loaded, it gives the blocks back and computes its prompt
from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_decode.attention.offload.block_manager import OffloadBlockManager
from headrace_decode.compression.engine.metadata import Retention
from headrace_decode.compression.engine.stored_context import (
    ContextStore,
    StoredContext,
    block_names,
    find_stored,
)


class StoredContextLoader:
    """Loads and saves of a scheduler's incremental requests.

    Args:
        manager: manager of the scheduler's blocks.
        store: store that returns exactly the bytes that it was given; None: there is none.
        about: part of the blocks' names in the store, which distinguishes predictors and layouts of
            KV.
    """

    def __init__(
        self, manager: OffloadBlockManager, store: ContextStore | None, about: bytes
    ) -> None:
        self._manager, self._store, self._about = manager, store, about
        self._found: dict[str, StoredContext | None] = {}
        """Result of the lookup, by request that the store was asked for."""
        self._loading: dict[str, Retention] = {}
        self._finished: set[str] = set()
        """Requests of `_loading` whose load has ended."""
        self._saved: dict[str, tuple[bytes, int]] = {}
        """By request that drops KV in the step that is being scheduled: hash of its context so far,
        and its number of tokens."""

    def __bool__(self) -> bool:
        return self._store is not None

    def find_stored(
        self, name: str, hashes: Sequence[bytes], least: int, most: int
    ) -> StoredContext | None:
        """Look up retained KV for a request. The store is asked once a request."""
        if self._store is not None and name not in self._found:
            self._found[name] = find_stored(self._store, hashes, self._about, least, most)
        return self._found.get(name)

    def start_load(self, name: str, found: StoredContext, description_blocks: int) -> None:
        """Give a waiting request blocks, and begin to load retained KV into them. The caller has
        the request wait for it.

        Args:
            found: where the KV is. description_blocks: number of its blocks that describe the
                others.
        """
        assert self._store is not None
        tokens = found.blocks * self._manager.block_size
        self._manager.assign_empty_slots(name, len(found.names), found.blocks)
        slots = self._manager.slots(name)
        self._store.load(name, slots, found.names)
        self._loading[name] = Retention(tokens, slots, description_blocks=description_blocks)
        self._found[name] = None

    def on_loads_finished(self, output: Any) -> set[str]:
        """Record loads that have ended; return the requests whose load has failed.

        Args:
            output: vLLM's KVConnectorOutput of a step, or None.
        """
        ended = self._loading.keys() & (getattr(output, "finished_recving", None) or set())
        self._finished |= ended
        invalid = getattr(output, "invalid_block_ids", None) or set()
        return {name for name in ended if invalid.intersection(self._loading[name].blocks)}

    def finished_loads(self) -> list[str]:
        """Return the requests whose load has ended and that have not begun."""
        return list(self._finished)

    def pop(self, name: str) -> Retention | None:
        """Remove and return the load of a request, if there is one. The request begins with the
        loaded KV, or gives it back."""
        self._finished.discard(name)
        return self._loading.pop(name, None)

    def remove(self, name: str) -> None:
        """Remove a request that has ended."""
        self._found.pop(name, None)
        self.pop(name)

    def request_save(self, name: str, context: bytes, tokens: int) -> None:
        """Note that the KV which a request keeps of a context in this step is to be saved."""
        if self._store is not None:
            self._saved[name] = context, tokens

    def on_scheduled(self, requests: dict[str, Any], lost: set[str]) -> None:
        """Save the retained KV of a scheduled step.

        Args:
            requests: the scheduler's requests, by id.
            lost: preempted requests, which do not drop in this step and are left out.
        """
        saved, self._saved = self._saved, {}
        for name in saved.keys() & requests.keys() - lost:
            assert self._store is not None
            (context, tokens), blocks = saved[name], self._manager.slots(name)
            names = block_names(context, self._about, len(blocks))
            self._store.save(blocks, names, requests[name].cache_salt or "", tokens)

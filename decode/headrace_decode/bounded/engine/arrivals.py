"""Which streamed requests begin with what the node's store holds of their first tokens, and what of
theirs it gets (`stored`).

A request that waits is given blocks. It waits on, as vLLM has requests wait for KV from elsewhere,
until the store's connector has filled them. If a block does not come, or if the request cannot
begin as soon as all have come, it gives them back and computes its prompt from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from headrace_decode.bounded.engine.following import Drop
from headrace_decode.bounded.engine.stored import Found, Store, find, names_of
from headrace_decode.sparse.engine.offload.manager import OffloadManager


class Arrivals:
    """All of a scheduler's.

    Args:
        store: that gives back the bytes that it gets; None: there is none.
        about: tells what the names in it must tell apart, beside contexts: the gate, and how KV
            lies in blocks.
    """

    def __init__(self, manager: OffloadManager, store: Store | None, about: bytes) -> None:
        self._manager, self._store, self._about = manager, store, about
        self._found: dict[str, Found | None] = {}
        """By request that the store was asked for."""
        self._coming: dict[str, Drop] = {}
        self._here: set[str] = set()
        """Those of them whose load has ended."""
        self._saved: dict[str, tuple[bytes, int]] = {}
        """What requests hold from the step that is being scheduled on: hash of the context, and its
        tokens."""

    def __bool__(self) -> bool:
        return self._store is not None

    def find(self, name: str, hashes: Sequence[bytes], least: int, most: int) -> Found | None:
        """As `stored.find`, for a request. The store is asked once."""
        if self._store is not None and name not in self._found:
            self._found[name] = find(self._store, hashes, self._about, least, most)
        return self._found.get(name)

    def begin(self, request: Any, found: Found, described: int) -> None:
        """Load it for a request that waits."""
        assert self._store is not None
        name, tokens = request.request_id, found.blocks * self._manager.block_size
        self._manager.stand_in(name, len(found.names), found.blocks)
        slots = self._manager.slots(name)
        self._store.load(name, slots, found.names)
        self._coming[name] = Drop(tokens, slots, described=described)
        self._found[name] = None
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def loaded(self, output: Any) -> set[str]:
        """Requests whose load has failed.

        Args:
            output: vLLM's KVConnectorOutput of a step, or None.
        """
        ended = self._coming.keys() & (getattr(output, "finished_recving", None) or set())
        self._here |= ended
        invalid = getattr(output, "invalid_block_ids", None) or set()
        return {name for name in ended if invalid.intersection(self._coming[name].blocks)}

    def here(self) -> list[str]:
        """Requests whose load has ended, and who have not begun."""
        return list(self._here)

    def pop(self, name: str) -> Drop | None:
        """What was loaded for a request, if anything was: it begins with it, or gives it back."""
        self._here.discard(name)
        return self._coming.pop(name, None)

    def forget(self, name: str) -> None:
        """A request has ended."""
        self._found.pop(name, None)
        self.pop(name)

    def save(self, name: str, context: bytes, tokens: int) -> None:
        """The store is to get what a request holds of a context from the next step on."""
        if self._store is not None:
            self._saved[name] = context, tokens

    def scheduled(self, requests: dict[str, Any], lost: set[str]) -> None:
        """Have it saved, but what those lose that were preempted.

        Args:
            requests: of the scheduler, by name.
        """
        saved, self._saved = self._saved, {}
        for name in saved.keys() & requests.keys() - lost:
            assert self._store is not None
            (context, tokens), blocks = saved[name], self._manager.slots(name)
            names = names_of(context, self._about, len(blocks))
            self._store.save(blocks, names, requests[name].cache_salt or "", tokens)

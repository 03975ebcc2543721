"""The states of recurrent layers that an engine saves, and when.

vLLM caches a state when it schedules the step that ends at a block boundary, and offers the exact
block of each to connectors (`boundary_state_offloads`). The step's output confirms it. The
request's next step computes in another block, so the state does not change any more. But vLLM frees
its block before that output has arrived. So the block is held from the schedule of its step until
the output. Then it is queued, or released if the store has it or the output did not confirm it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from headrace_engine.connector.identity.adapters import BlockNames
from headrace_engine.connector.request_state import RequestState
from headrace_engine.connector.save_queue import SaveQueue
from headrace_engine.connector.state_groups import StateGroups
from headrace_engine.connector.store_work import BlockSave
from headrace_kvstore.identity.private_blocks import shared_blocks

Offer = tuple[int, int, int]
"""A state: its cache group, its block in the engine's cache, and the number of tokens before it."""
Held = dict[int, dict[int, int]]
"""Held states of a request: by number of blocks before them, the engine's block of each group."""


class StateSaver:
    """Saver of one engine's states.

    Args:
        groups: of the engine.
        queue: takes the blocks.
        names: names blocks in the store.
        block_tokens: tokens a block.
        compute_s: predicts the seconds to compute tokens.
    """

    def __init__(
        self,
        groups: StateGroups,
        queue: SaveQueue,
        names: BlockNames,
        block_tokens: int,
        compute_s: Callable[[int, int], float],
    ) -> None:
        self._groups, self._queue, self._names = groups, queue, names
        self._block_tokens, self._compute_s = block_tokens, compute_s
        self._held: dict[str, Held] = {}

    @property
    def requests(self) -> list[str]:
        """The requests of which states are held."""
        return list(self._held)

    def hold(self, request_id: str, offers: Iterable[Offer]) -> None:
        """Hold the states that the step which is being scheduled computes. Those that do not end at
        a full block have no name."""
        for group, block, tokens in offers:
            blocks, rest = divmod(tokens, self._block_tokens)
            if rest or not blocks or group not in self._groups.recurrent:
                continue
            held = self._held.setdefault(request_id, {}).setdefault(blocks, {})
            self._queue.hold([block])
            if group in held:
                self._queue.release([held[group]])
            held[group] = block

    def save(self, known: RequestState, confirmed_tokens: int, may_save: bool) -> None:
        """Queue the states that the confirmed tokens cover and that the store lacks, and release
        them.

        Args:
            confirmed_tokens: 0 if no output of the request has arrived.
        """
        request = known.request
        held = self._held.get(request.request_id, {})
        ended = [blocks for blocks in held if blocks * self._block_tokens <= confirmed_tokens]
        shared = shared_blocks(request.block_hashes) if may_save else 0
        for blocks in ended:
            if blocks <= shared:
                self._queue_states(known, blocks, held[blocks])
            self._queue.release(held.pop(blocks).values())
        if not held:
            self._held.pop(request.request_id, None)

    def release(self, request_id: str) -> None:
        """Release all states of a request."""
        held = self._held.pop(request_id, {})
        self._queue.release(chain(*[states.values() for states in held.values()]))

    def clear(self) -> None:
        """Release all states."""
        for request_id in self.requests:
            self.release(request_id)

    def _queue_states(self, known: RequestState, blocks: int, states: dict[int, int]) -> None:
        request, size = known.request, self._block_tokens
        found = self._names.of_request(request, blocks - 1, blocks)
        if not found:
            return
        [parent] = found
        names = [self._groups.name(parent, group) for group in states]
        lacks = self._queue.lacking(names)
        ids = [block for block, lack in zip(states.values(), lacks, strict=True) if lack]
        names = [name for name, lack in zip(names, lacks, strict=True) if lack]
        if ids:
            each_s = self._compute_s((blocks - 1) * size, blocks * size)
            depths, parents = [blocks] * len(ids), [parent] * len(ids)
            tenant = request.cache_salt or ""
            self._queue.add(BlockSave([ids], names, parents, depths, tenant, [each_s] * len(ids)))

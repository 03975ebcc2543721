"""Which requests of a scheduler are offloaded, and what they hold.

Host memory is promised for a request's longest when it is admitted. So no request that runs ever
lacks room to be offloaded to.

A block is given back to the engine's pool once its KV lies in host memory. The worker copies a
block at the end of the step that fills it, and attends to the last full block in place. So of a
request whose blocks the worker knows, those may go that are full without the newest 128 tokens:

    blocks below (processed tokens - block_tokens) / block_tokens
"""

from __future__ import annotations

from headrace_decode.sparse.offload.sizes import Footprint


class Ledger:
    """Offloaded requests, by vLLM's request id.

    Attributes:
        host_blocks: of all host memory.
        free_host_blocks: not promised to a request.
    """

    def __init__(self, host_blocks: int = 0) -> None:
        self.host_blocks = self.free_host_blocks = host_blocks
        self._planned: dict[str, Footprint] = {}
        self._admitted: dict[str, Footprint] = {}
        self._known: dict[str, int] = {}
        """By request: blocks that the worker knows, from the first."""

    def plan(self, request_id: str, footprint: Footprint) -> None:
        """Have a request be offloaded from its next admission on."""
        self._planned[request_id] = footprint

    def planned(self, request_id: str) -> Footprint | None:
        """Of a request that is or will be offloaded."""
        return self._planned.get(request_id)

    def is_admitted(self, request_id: str) -> bool:
        return request_id in self._admitted

    def has_room(self, footprint: Footprint) -> bool:
        """Whether host memory can hold one more such request now."""
        return footprint.host <= self.free_host_blocks

    def admit(self, request_id: str) -> None:
        """A planned request gets its blocks."""
        footprint = self._planned[request_id]
        self._admitted[request_id] = footprint
        self.free_host_blocks -= footprint.host

    def is_known(self, request_id: str) -> bool:
        """Whether the worker knows of an admitted request."""
        return request_id in self._known

    def worker_knows(self, request_id: str, blocks: int) -> None:
        """An admitted request is in a step, with so many blocks."""
        self._known[request_id] = blocks

    def cold_blocks(self, request_id: str, processed_tokens: int, block_tokens: int) -> int:
        """First blocks of a request that may go back to the pool; 0 of any other request."""
        return min(self._known.get(request_id, 0), cold_blocks(processed_tokens, block_tokens))

    def leave(self, request_id: str) -> None:
        """A request gives its blocks back: it ended, or is preempted and admitted again later."""
        self._known.pop(request_id, None)
        footprint = self._admitted.pop(request_id, None)
        if footprint is not None:
            self.free_host_blocks += footprint.host

    def forget(self, request_id: str) -> None:
        """A request ended."""
        self.leave(request_id)
        self._planned.pop(request_id, None)


def cold_blocks(processed_tokens: int, block_tokens: int) -> int:
    """First blocks that may go of a request whose blocks the worker knows."""
    return max(0, processed_tokens - block_tokens) // block_tokens

"""Record of a scheduler's offloaded requests, and of the host memory reserved for them.

When a request is admitted, host memory is reserved for its maximum length. Running requests
therefore always have room there.

A block is given back to the engine's pool once its KV is in host memory. The worker copies a block
at the end of the step that fills it, and attends to the last full block in place. If the worker
knows a request's blocks, those that are full without the newest `block_tokens` tokens may go back:

    blocks below (processed tokens - block_tokens) / block_tokens
"""

from __future__ import annotations

from headrace_decode.attention.offload.footprint import Footprint


class Ledger:
    """Offloaded requests, by vLLM's request id.

    Attributes:
        host_blocks: number of blocks that host memory holds.
        free_host_blocks: number of these that are not reserved for a request.
    """

    def __init__(self, host_blocks: int = 0) -> None:
        self.host_blocks = self.free_host_blocks = host_blocks
        self._planned: dict[str, Footprint] = {}
        self._admitted: dict[str, Footprint] = {}
        self._known: dict[str, int] = {}
        """By request: the number of its first blocks that the worker knows."""

    def plan(self, request_id: str, footprint: Footprint) -> None:
        """Plan to offload a request from its next admission on."""
        self._planned[request_id] = footprint

    def planned(self, request_id: str) -> Footprint | None:
        """Return the footprint of a request that is or will be offloaded; None for others."""
        return self._planned.get(request_id)

    def is_admitted(self, request_id: str) -> bool:
        return request_id in self._admitted

    def has_room(self, footprint: Footprint) -> bool:
        """Return whether host memory can hold one more such request now."""
        return footprint.host <= self.free_host_blocks

    def admit(self, request_id: str) -> None:
        """Reserve host memory for a planned request, which gets its blocks now."""
        footprint = self._planned[request_id]
        self._admitted[request_id] = footprint
        self.free_host_blocks -= footprint.host

    def is_known(self, request_id: str) -> bool:
        """Return whether the worker knows an admitted request."""
        return request_id in self._known

    def worker_knows(self, request_id: str, blocks: int) -> None:
        """Record that an admitted request is in a step, with so many blocks."""
        self._known[request_id] = blocks

    def cold_blocks(self, request_id: str, processed_tokens: int, block_tokens: int) -> int:
        """Return the number of a request's first blocks that may go back to the pool; 0 if the
        worker does not know the request."""
        return min(self._known.get(request_id, 0), cold_blocks(processed_tokens, block_tokens))

    def leave(self, request_id: str) -> None:
        """Release the host memory of a request that gives its blocks back: it ended, or is
        preempted and admitted again later."""
        self._known.pop(request_id, None)
        footprint = self._admitted.pop(request_id, None)
        if footprint is not None:
            self.free_host_blocks += footprint.host

    def remove(self, request_id: str) -> None:
        """Remove a request that ended."""
        self.leave(request_id)
        self._planned.pop(request_id, None)


def cold_blocks(processed_tokens: int, block_tokens: int) -> int:
    """Return the number of first blocks that may go back to the pool, of a request whose blocks the
    worker knows."""
    return max(0, processed_tokens - block_tokens) // block_tokens

"""The blocks that steps in flight fill, held until the output of their step has arrived.

vLLM frees blocks that leave an attention window when it schedules their request's next step, or
when the request ends. A block may be saved only after the output of its step, which is too late
then. So the blocks of a position are held from the schedule of the step that fills them. After the
step's output they are saved or released: a hold lasts as long as the steps in flight.

A position of which a group has vLLM's null block is not held: part of its KV is outside of a
window, and is not in this engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from headrace_engine.connector.request_state import RequestState
from headrace_engine.connector.save_queue import SaveQueue

Places = dict[int, list[int]]


class StepHolds:
    """Holds of an engine that frees blocks early.

    Args:
        queue: has the engine's block pool.
    """

    def __init__(self, queue: SaveQueue) -> None:
        self._queue = queue
        self._held: dict[str, Places] = {}
        """By request: the blocks of each held position, one a cache group."""

    @property
    def requests(self) -> list[str]:
        """The requests of which blocks are held."""
        return list(self._held)

    def hold(self, known: RequestState, places: Sequence[int]) -> None:
        """Hold the blocks of positions that a request has now."""
        held = {place: [group[place] for group in known.blocks] for place in places}
        held = {place: blocks for place, blocks in held.items() if all(blocks)}
        if held:
            self._queue.hold(chain(*held.values()))
            self._held.setdefault(known.request.request_id, {}).update(held)

    def holds(self, request_id: str, place: int) -> bool:
        """Whether the blocks of a position are held."""
        return place in self._held.get(request_id, ())

    def release(self, request_id: str, end: int | None = None) -> None:
        """Release the blocks of a request's positions before `end`, or all."""
        held = self._held.get(request_id, {})
        places = [place for place in held if end is None or place < end]
        self._queue.release(chain(*[held.pop(place) for place in reversed(places)]))
        if not held:
            self._held.pop(request_id, None)

    def clear(self) -> None:
        """Release all blocks."""
        for request_id in self.requests:
            self.release(request_id)

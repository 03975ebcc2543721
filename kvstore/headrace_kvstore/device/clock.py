"""Clocks that tell when work on a device begins and ends.

On a GPU a call returns as soon as its work is queued, so a host clock around it measures only the
queueing. A mark in the device's own queue has the time at which the device reaches it. On a CPU the
call does the work, and a mark is the host's time.

`StepTimer` uses marks to time engine steps, without waiting for any of them.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import torch

Label = TypeVar("Label")

PENDING_STEPS = 64
"""Maximum number of steps kept whose end the device has not reached; the oldest are dropped."""


class Clock(Protocol):
    """Clock of one queue of a device."""

    def mark(self) -> Any:
        """Return a mark after all work queued so far."""
        ...

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Return the seconds between two marks; None until the device has reached the later one."""
        ...

    def wait(self, mark: Any) -> None:
        """Wait until the device has reached the mark."""
        ...


class HostClock:
    """Clock of a host, where work is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self, mark: float) -> None:
        pass


class CudaClock:
    """Clock of a CUDA stream.

    Args:
        device: of the stream.
        stream: a torch.cuda.Stream; None for the calling thread's current one at each mark.
    """

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._device, self._stream = device, stream

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream or torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        return float(begin.elapsed_time(end)) / 1e3 if end.query() else None

    def wait(self, mark: Any) -> None:
        mark.synchronize()


class StepTimer(Generic[Label]):
    """Timer of steps, without the waits inside them. For one thread.

        step = (begin to end) - sum over its waits of (pause to resume)

    A pause ends on the device when all that was queued before it is done, so only the time in which
    the device had nothing to do for this step counts as a wait.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[Any] = []
        self._pending: deque[tuple[Label, list[Any]]] = deque(maxlen=PENDING_STEPS)

    def begin(self) -> None:
        """Begin a step."""
        self._marks = [self._clock.mark()]

    def pause(self) -> None:
        """Begin a wait of the host for something that the step needs."""
        if self._marks:
            self._marks.append(self._clock.mark())

    resume = pause
    """End the wait."""

    def end(self, label: Label | None) -> None:
        """End a step, all of which is queued; without a label or a `begin` it is not timed."""
        marks, self._marks = self._marks, []
        if marks and label is not None:
            self._pending.append((label, [*marks, self._clock.mark()]))

    def ended(self) -> list[tuple[Label, float]]:
        """Return the steps that the device has ended since the last call, in order, with
        seconds."""
        found = []
        while self._pending:
            label, marks = self._pending[0]
            if self._clock.seconds(marks[-2], marks[-1]) is None:
                break
            self._pending.popleft()
            # Spans between marks: work, wait, work, ...
            spans = [self._clock.seconds(a, b) or 0.0 for a, b in pairwise(marks)]
            found.append((label, sum(spans[::2])))
        return found

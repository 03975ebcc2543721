"""Times of things that are compared: taken in turns, so that a slower minute meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.figures import quantile

Arm = Callable[[], float]
"""Does the thing once and returns the seconds that count."""


class CannotRun(RuntimeError):
    """A part of the benchmark has not what it needs here; the text says what, in one line."""


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def take_turns(arms: Mapping[str, Arm], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each arm, one a round, after a round that does not count.

    Each round begins with another arm, so that none always follows the same one.
    """
    names = list(arms)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            spent = arms[name]()
            if number >= 0:
                taken[name].append(spent)
    return taken


def ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """one / other, round by round."""
    return [a / b for a, b in zip(one, other, strict=True)]


class Figures:
    """Numbers by name; of one that is a median, the quartiles too."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.quartiles: dict[str, tuple[float, float]] = {}
        self.notes: dict[str, str] = {}

    def add(self, name: str, samples: float | Sequence[float]) -> None:
        """Keep a number, or the median of several."""
        if isinstance(samples, int | float):
            self.values[name] = float(samples)
            return
        self.values[name] = statistics.median(samples)
        self.quartiles[name] = (quantile(samples, 0.25), quantile(samples, 0.75))

    def bandwidth(self, name: str, size_bytes: int, taken_s: Sequence[float]) -> None:
        """Keep GB/s (1e9 bytes) of something done once in each of these times."""
        self.add(name, [size_bytes / each / 1e9 for each in taken_s])

    def note(self, part: str, text: str) -> None:
        """Say under which conditions a part's figures hold."""
        self.notes[part] = text

"""A clock that tests move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Seconds that pass when told to."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

"""What an operator has ordered, and until when: a standing value, and one that ends by itself.

The end is kept where the order is obeyed, so that it comes though whoever gave the order is gone.
"""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

T = TypeVar("T")

FOR_MAX_S = 7 * 86400.0
"""Longest time that an order may be given for; longer is what standing orders are for."""


class Order(Generic[T]):
    """One setting that may be changed for a while. Times are those of one monotonic clock."""

    def __init__(self, standing: T) -> None:
        self._standing = self._passing = standing
        self._until_s: float | None = None

    def give(self, value: T, now_s: float, for_s: float | None = None) -> None:
        """Have `value` in force: for `for_s` seconds, and then what stands; without, it stands from
        now on, and what was given for a while is over."""
        if for_s is None:
            self._standing, self._until_s = value, None
        else:
            self._passing, self._until_s = value, now_s + for_s

    def at(self, now_s: float) -> T:
        """What is in force."""
        if self._until_s is not None and now_s >= self._until_s:
            self._until_s = None
        return self._standing if self._until_s is None else self._passing

    def left_s(self, now_s: float) -> float | None:
        """Seconds until what is in force ends by itself; None if it does not."""
        return None if self._until_s is None else max(self._until_s - now_s, 0.0)


def is_duration(value: Any) -> bool:
    """Whether `value` is a number of seconds that an order may be given for."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0 < value <= FOR_MAX_S

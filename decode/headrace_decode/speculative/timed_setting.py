"""A setting with a permanent value, and a temporary one that expires.

The time of expiry is kept where the setting is applied, so that the temporary value expires even if
its sender no longer runs.
"""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_DURATION_S = 7 * 86400.0
"""Maximum duration of a temporary value; for a longer time, set the permanent one."""


class TimedSetting(Generic[T]):
    """One setting that may be changed for a while. Times are those of one monotonic clock."""

    def __init__(self, permanent: T) -> None:
        self._permanent = self._temporary = permanent
        self._until_s: float | None = None

    def set(self, value: T, now_s: float, for_s: float | None = None) -> None:
        """Set a value.

        Args:
            value: the new value.
            now_s: the present time.
            for_s: seconds for which the value applies; after them the permanent value applies
                again. None: it becomes the permanent value, and a temporary value ends.
        """
        if for_s is None:
            self._permanent, self._until_s = value, None
        else:
            self._temporary, self._until_s = value, now_s + for_s

    def value(self, now_s: float) -> T:
        """Return the value in force."""
        if self._until_s is not None and now_s >= self._until_s:
            self._until_s = None
        return self._permanent if self._until_s is None else self._temporary

    def remaining_s(self, now_s: float) -> float | None:
        """Return the seconds until the value in force expires; None if it does not expire."""
        return None if self._until_s is None else max(self._until_s - now_s, 0.0)


def is_valid_duration(value: Any) -> bool:
    """Return whether `value` is a valid duration of a temporary value in seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0 < value <= MAX_DURATION_S

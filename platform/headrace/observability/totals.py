"""Counters that follow the totals of other components, which count since their own start."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ray.serve.metrics import Counter

_Key = tuple[str, tuple[tuple[str, str], ...]]


class TotalCounter:
    """A counter of the growth of totals.

    Args:
        name, description, tag_keys: of `ray.serve.metrics.Counter`.
    """

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
        self.counter: Any = Counter(name, description, tag_keys=tag_keys)
        self._totals: dict[_Key, float] = {}

    def follow(
        self, total: float, tags: Mapping[str, str] | None = None, *, source: str = ""
    ) -> None:
        """Count the growth of a total since it was last seen.

        A total that became smaller was started again, and counts from 0.

        Args:
            tags: values of all tag keys.
            source: the component that counts it, if there are several; not a tag.
        """
        key = source, tuple((tags or {}).items())
        before = self._totals.get(key, 0.0)
        self._totals[key] = total
        more = total - before if total >= before else total
        if more > 0:
            self.counter.inc(more, tags=tags)

    def keep(self, sources: Collection[str]) -> None:
        """Forget all sources but these."""
        self._totals = {key: total for key, total in self._totals.items() if key[0] in sources}

"""Objects that a tier does not use although a listing of the store shows them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from headrace_kvstore.objects.object_client import Listed
from headrace_kvstore.objects.object_walk import ListingPass

MAX_IGNORED = 1 << 16


class ExcludedObjects:
    """Names of objects that were removed or found unusable. Not locked."""

    def __init__(self) -> None:
        self._ignored: dict[str, tuple[str, float | None, int]] = {}
        """Objects that are not used, by name: the reason, the time stamp, and the last walk that
        saw the object. An object is used again once it was written again."""
        self._ignored_names: Counter[str] = Counter()
        """Number of objects that the last walk did not add, by reason."""
        self._removed: set[str] = set()
        self._removed_before: set[str] = set()
        """Names removed since this refresh began (`_removed`), and from the beginning of the
        previous one until then. A listing may still show them."""

    def begin_refresh(self) -> None:
        """Drop the names that were removed before the previous refresh began."""
        self._removed_before, self._removed = self._removed, set()

    def record_removed(self, names: Iterable[str]) -> None:
        """Record objects that this tier removes."""
        self._removed.update(names)

    def ignore(self, name: str, why: str, listing: int) -> None:
        """Do not use an object until it is written again. listing: number of the current walk."""
        self._ignored[name] = why, None, listing
        if len(self._ignored) > MAX_IGNORED:
            del self._ignored[next(iter(self._ignored))]

    def readmit(self, name: str) -> None:
        """Use an object that was written again."""
        self._ignored.pop(name, None)

    def excludes(self, listed: Listed, listing: int) -> bool:
        """Whether a listed object is removed or ignored. An ignored one that was written again is
        readmitted."""
        if listed.name in self._removed or listed.name in self._removed_before:
            return True
        why, stamp, _ = self._ignored.pop(listed.name, ("", -math.inf, 0))
        if not why or stamp not in (None, listed.modified_s):
            return False
        self._ignored[listed.name] = why, listed.modified_s, listing
        return True

    def finish_listing(self, listing: ListingPass) -> None:
        """Drop ignored objects that the whole walk did not show."""
        for name in [n for n, (_, _, seen) in self._ignored.items() if seen < listing.number]:
            del self._ignored[name]
        self._ignored_names = listing.ignored

    def counts(self) -> Counter[str]:
        """Return the number of objects that are not used, by reason."""
        return self._ignored_names + Counter(why for why, *_ in self._ignored.values())

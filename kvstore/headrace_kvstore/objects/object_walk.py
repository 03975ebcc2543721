"""A walk through all names of an object store, some at a time, and its results.

The index of a tier has room for the objects used last. Own objects beyond that are only counted
here, with their ages, so that the oldest can be removed by the next walk. So memory does not grow
with the number of objects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from headrace_kvstore.objects.object_client import Listed, StoreClient

AGE_S = 600.0
"""Resolution of ages: a year of objects takes about 50,000 numbers."""


@dataclass
class ListingPass:
    """One walk, from the first name to the last.

    Attributes:
        number: of this walk; later walks have higher ones.
        ended: whether all names were seen.
        after: the last name seen.
        in_order: whether names came in ascending order, so that `after` is a place to resume from.
        own_objects, own_bytes: own objects that the index has no room for.
        ages: their bytes, by time stamp // AGE_S.
        ignored: objects that are not used, by reason.
    """

    number: int
    ended: bool = False
    after: str = ""
    in_order: bool = True
    own_objects: int = 0
    own_bytes: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    names: Iterator[Listed] | None = None

    def take(self, client: StoreClient, count: int) -> list[Listed]:
        """Return the next names, from where the walk stopped. Raises what the client raises."""
        if self.names is None:
            self.names = client.list(self.after)
        some = list(islice(self.names, count))
        self.ended = len(some) < count
        for each in some:
            self.in_order &= self.after < each.name
            self.after = each.name
        return some

    def count(self, size_bytes: int, modified_s: float) -> None:
        """Count an own object that the index has no room for."""
        self.own_objects += 1
        self.own_bytes += size_bytes
        self.ages[int(modified_s // AGE_S)] += size_bytes


@dataclass
class TrimPlan:
    """Own objects beyond the index that are to be removed: those of the time stamps up to
    `until_s`, `bytes` in all."""

    bytes: int = 0
    until_s: float = -math.inf

    @classmethod
    def of(cls, listing: ListingPass, excess_bytes: int) -> TrimPlan:
        """Return the oldest objects that a walk has counted, of so many bytes."""
        left = wanted = min(excess_bytes, listing.own_bytes)
        for age in sorted(listing.ages) if wanted > 0 else ():
            left -= listing.ages[age]
            if left <= 0:
                return cls(wanted, (age + 1) * AGE_S)
        return cls()

    def takes(self, size_bytes: int, modified_s: float) -> bool:
        """Return whether an object is to be removed; if so, count it."""
        if self.bytes <= 0 or modified_s > self.until_s:
            return False
        self.bytes -= size_bytes
        return True

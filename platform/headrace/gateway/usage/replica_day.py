"""One replica's totals on one day, hour by hour, and what they add up to.

A replica's totals only grow, so a record holds them as they were last seen in each hour. What was
used in an hour is the growth since the hour before, and since `base` for the day's first hour. Any
number of gateways may write the same replica's record in any order: of two values, the larger one
counts. A gateway that was away moves usage to a later hour and loses none.

Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace_engine.usage.request_usage import RequestUsage, usage_of_dict
from headrace_engine.usage.usage_book import MAX_TENANTS

HOUR_S, DAY_S = 3_600, 86_400
MAX_RECORD_BYTES = 16 << 20

Name = Annotated[str, Meta(max_length=128)]
Quantities = dict[Annotated[str, Meta(max_length=32)], float]
Totals = Annotated[dict[Name, Quantities], Meta(max_length=MAX_TENANTS + 1)]
"""Quantities that are not zero, by tenant."""


class UsageReport(msgspec.Struct):
    """A replica's totals (`headrace_engine.usage.replica_usage.ReplicaUsage.report`)."""

    replica_id: Annotated[str, Meta(min_length=1, max_length=128)]
    model: Name
    since_s: Annotated[float, Meta(ge=0, le=1e12)]
    tenants: Totals


class ReplicaDay(msgspec.Struct):
    """A replica's totals on a day (UTC).

    Attributes:
        replica_id, model: the replica, and the served name of its model.
        base: its totals when the day began; empty if it began later.
        hours: its totals as last seen in each hour, by the hour's number, 0 to 23.
    """

    replica_id: str
    model: str
    base: Totals = msgspec.field(default_factory=dict)
    hours: dict[Annotated[int, Meta(ge=0, le=23)], Totals] = msgspec.field(default_factory=dict)

    def see(self, hour: int, totals: Totals) -> None:
        """Take totals that were seen in an hour."""
        self.hours[hour] = larger(self.hours.get(hour, {}), totals)

    def merge(self, other: ReplicaDay) -> None:
        """Take what another record of the same replica and day has."""
        self.base = larger(self.base, other.base)
        for hour, totals in other.hours.items():
            self.see(hour, totals)

    def last(self) -> Totals:
        """Return the totals as last seen."""
        return larger(self.base, self.hours[max(self.hours)]) if self.hours else self.base

    def growth(self) -> Iterator[tuple[int, str, RequestUsage]]:
        """Yield hour, tenant and what was used, for each hour and tenant with usage."""
        before = self.base
        for hour in sorted(self.hours):
            now = larger(before, self.hours[hour])
            for tenant, quantities in now.items():
                earlier = usage_of_dict(before.get(tenant, {}))
                used = usage_of_dict(quantities).minus(earlier)
                if any(used.values()):
                    yield hour, tenant, used
            before = now


def larger(one: Totals, other: Totals) -> Totals:
    """Return the larger one of each quantity of each tenant."""
    found = {tenant: dict(quantities) for tenant, quantities in one.items()}
    for tenant, quantities in other.items():
        mine = found.setdefault(tenant, {})
        for name, value in quantities.items():
            mine[name] = max(mine.get(name, 0), value)
    return found


def read_report(found: Mapping[str, Any]) -> UsageReport:
    """Return a replica's report.

    Raises:
        ValueError: it is none, or a quantity is out of bounds; the text says which.
    """
    report = msgspec.convert(found, UsageReport)
    report.tenants = {
        tenant: usage_of_dict(quantities).to_dict() for tenant, quantities in report.tenants.items()
    }
    return report


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ReplicaDay)


def encode(day: ReplicaDay) -> bytes:
    """Return a record as bytes."""
    return _encoder.encode(day)


def decode(data: bytes) -> ReplicaDay:
    """Return the record in these bytes.

    Raises:
        ValueError: they are no record.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"a record has at most {MAX_RECORD_BYTES} bytes, not {len(data)}")
    day = _decoder.decode(data)
    for totals in (day.base, *day.hours.values()):
        for quantities in totals.values():
            usage_of_dict(quantities)
    return day

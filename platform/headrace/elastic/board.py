"""What the policies of both roles know together, one board for each app, in Serve's controller.

Serve asks each deployment's policy by itself, about ten times a second. The decode role's policy
tells the board what its replicas publish; both read the counts that it decided. The board counts
the requests of each minute, measures how long replicas take to start, and decides once a minute, or
when a replica has come or gone.

A board that is new, since Serve's controller was started again, knows no traffic. It decides
nothing before its first minute is over, and stops no replica before it has observed the load for as
long as a stopped replica must not be needed (`Prices.stop_s`).

Pure: no Ray, no clock. Serve's controller calls it from one thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import NamedTuple

from headrace.advice import Load, load_of
from headrace.elastic.capacity import Bounds, Slo
from headrace.elastic.decide import Counts, Prices, decide
from headrace.elastic.forecast import BIN_S, Forecast
from headrace.elastic.published import AGE_S, CAME, router_of
from headrace.elastic.traffic import averaged

ROLES = ("prefill", "decode")
LOOK_S = 5.0
"""Between two looks at what replicas publish."""
AVERAGED_S = 3600.0
"""Over so long, means of requests are averaged: of fewer, they waver with the longest prompts."""
STARTS = 9
"""The expected start is the median of so many: a single one that waited for a machine or for a
quota changes nothing."""
MOST_STARTS = 256
RETURNS_S = 3600.0
"""A replica that Serve leaves out of the running ones may return within this time."""
MAX_REPLICAS = 4096


@dataclass(frozen=True, slots=True)
class Seen:
    """One role, as Serve sees it: replicas that run, and that it wants."""

    running: int
    wanted: int


class _Total(NamedTuple):
    """The requests of a replica's life, as it last told them."""

    requests: float
    at_s: float


@dataclass(slots=True)
class Board:
    """One app's.

    Attributes:
        counts: as decided last; None while too little is known.
    """

    slo: Slo
    prices: Prices
    bounds: Bounds
    counts: Counts | None = None
    _forecast: Forecast = field(default_factory=Forecast)
    _load: Load | None = None
    _loads: int = 0
    _seen: dict[str, Seen] = field(default_factory=dict)
    _came: dict[str, _Total] = field(default_factory=dict)
    _since_s: float | None = None
    _started_s: float = -math.inf
    _starts: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS))
    _count: float = 0.0
    _bin_end_s: float | None = None
    _looked_s: float = -1e18
    _decided_for: tuple[tuple[int, int], float] | None = None
    _orders: dict[str, deque[float]] = field(
        default_factory=lambda: {role: deque(maxlen=MOST_STARTS) for role in ROLES}
    )

    def saw(self, role: str, seen: Seen, now_s: float) -> None:
        """What Serve says of a role. A replica that runs since the last look was ordered at the
        oldest order that is open."""
        before, orders = self._seen.get(role), self._orders[role]
        self._seen[role] = seen
        if before is None:
            return
        for _ in range(min(max(0, seen.wanted - before.wanted), MOST_STARTS)):
            orders.append(now_s)
        for _ in range(min(len(orders), max(0, seen.running - before.running))):
            self._learn_start(orders.popleft(), now_s)
        while len(orders) > max(0, seen.wanted - seen.running):
            orders.pop()

    def _learn_start(self, ordered_s: float, now_s: float) -> None:
        """Learn from a start of either role, unless it was under way when the last one ended: then
        both waited for the same thing."""
        if ordered_s < self._started_s:
            return
        self._started_s = now_s
        if not self._starts:
            self._starts.append(self.prices.start_s)
        self._starts.append(now_s - ordered_s)
        self.prices = replace(self.prices, start_s=median_low(self._starts))

    def due(self, now_s: float) -> bool:
        """Whether what decode replicas publish should be read again."""
        return now_s - self._looked_s >= LOOK_S

    def learn(self, told: Mapping[str, Mapping[str, float]], now_s: float) -> None:
        """What each decode replica publishes now.

        Args:
            told: numbers by name, by replica.
        """
        self._looked_s = now_s
        if self._bin_end_s is None or now_s - self._bin_end_s > 60 * BIN_S:
            self._bin_end_s = now_s + BIN_S  # the first look, or nobody asked for long
            self._count = 0.0
        if self._since_s is None:
            self._since_s = now_s
        for name, one in told.items():
            self._count += self._new(name, one, now_s)
        while now_s >= self._bin_end_s:
            self._forecast.observe(self._count, self._bin_end_s)
            self._count, self._bin_end_s = 0.0, self._bin_end_s + BIN_S
        routers = [router for one in told.values() if (router := router_of(one)) is not None]
        if (load := load_of(routers)) is not None:
            self._loads += 1
            part = max(1.0 / self._loads, LOOK_S / AVERAGED_S)
            self._load = averaged(self._load, load, part)

    def _new(self, name: str, told: Mapping[str, float], now_s: float) -> float:
        """Return the number of requests that a replica got since it was last seen.

        One that is seen for the first time counts from its first request if it is younger than the
        board. An older one served before the board was there, and counts from now on.
        """
        assert self._since_s is not None
        total, before = float(told.get(CAME, 0.0)), self._came.pop(name, None)
        self._came[name] = _Total(total, now_s)  # the one that was seen last stands last
        while len(self._came) > MAX_REPLICAS or self._oldest_s() < now_s - RETURNS_S:
            del self._came[next(iter(self._came))]
        if before is None:
            return total if told.get(AGE_S, math.inf) <= now_s - self._since_s else 0.0
        if total < before.requests:
            return 0.0
        # What came while it was out of sight for long did not come in this minute.
        return (total - before.requests) * min(1.0, BIN_S / max(BIN_S, now_s - before.at_s))

    def _oldest_s(self) -> float:
        return next(iter(self._came.values())).at_s

    def decide(self) -> Counts | None:
        """The counts to have; None while too little is known."""
        known_s = self._forecast.known_s
        if self._load is None or self._bin_end_s is None or len(self._seen) < len(ROLES):
            return None
        if not known_s:
            return None
        there = tuple(max(self._seen[role].running, self._seen[role].wanted) for role in ROLES)
        now = (there[0], there[1])
        if self.counts is None or self._decided_for != (now, self._bin_end_s):
            end_s = self._bin_end_s - BIN_S
            self.counts = decide(
                *(now, self._load, lambda ahead_s: self._forecast.ahead(ahead_s, end_s)),
                *(self.slo, self.prices, self.bounds),
            )
            if known_s < self.prices.stop_s:
                self.counts = _no_fewer(self.counts, now, self.bounds)
            self._decided_for = now, self._bin_end_s
        return self.counts


def _no_fewer(counts: Counts, now: tuple[int, int], bounds: Bounds) -> Counts:
    """Return counts that stop no replica that runs within its role's bounds."""
    prefill = max(counts.prefill, min(now[0], bounds.prefill[1]))
    decode = max(counts.decode, min(now[1], bounds.decode[1]))
    if (prefill, decode) == (counts.prefill, counts.decode):
        return counts
    return Counts(
        prefill,
        decode,
        f"{counts.reason}; the traffic is not known for long enough to stop a replica",
    )


_BOARDS: dict[str, Board] = {}


def board_of(app: str, slo: Slo, prices: Prices, bounds: Bounds) -> Board:
    """The board of an app. Other bounds or targets take effect; what was learned stays."""
    board = _BOARDS.setdefault(app, Board(slo, prices, bounds))
    board.slo, board.bounds = slo, bounds
    return board


def forget(app: str) -> None:
    """Drop what is known of an app."""
    _BOARDS.pop(app, None)

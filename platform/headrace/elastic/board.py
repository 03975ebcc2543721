"""What the policies of both roles know together, one board for each app, in Serve's controller.

Serve asks each deployment's policy by itself, about ten times a second. The decode role's policy
tells the board what its replicas publish; both read the counts that it decided. The board counts
the requests of each minute, measures how long replicas take to start, and decides once a minute, or
when a replica has come or gone.

Pure: no Ray, no clock. Serve's controller calls it from one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.advice import Load, load_of
from headrace.elastic.capacity import Bounds, Slo
from headrace.elastic.decide import Counts, Prices, decide
from headrace.elastic.forecast import BIN_S, Forecast
from headrace.elastic.published import CAME, router_of
from headrace.elastic.traffic import averaged

ROLES = ("prefill", "decode")
LOOK_S = 5.0
"""Between two looks at what replicas publish."""
AVERAGED_S = 3600.0
"""Over so long, means of requests are averaged: of fewer, they waver with the longest prompts."""
LEARN_START = 0.3
"""Part of a measured start that the expected one takes over."""
MOST_STARTS = 256


@dataclass(frozen=True, slots=True)
class Seen:
    """One role, as Serve sees it: replicas that run, and that it wants."""

    running: int
    wanted: int


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
    _came: dict[str, float] = field(default_factory=dict)
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
        for _ in range(max(0, seen.running - before.running)):
            if orders:
                took_s = now_s - orders.popleft()
                start_s = self.prices.start_s + LEARN_START * (took_s - self.prices.start_s)
                self.prices = replace(self.prices, start_s=start_s)
        while len(orders) > max(0, seen.wanted - seen.running):
            orders.pop()

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
        came = {name: float(one.get(CAME, 0.0)) for name, one in told.items()}
        for name, total in came.items():
            before = self._came.get(name, 0.0 if self._came else total)
            if total >= before:
                self._count += total - before
        self._came = came
        while now_s >= self._bin_end_s:
            self._forecast.observe(self._count, self._bin_end_s)
            self._count, self._bin_end_s = 0.0, self._bin_end_s + BIN_S
        routers = [router for one in told.values() if (router := router_of(one)) is not None]
        if (load := load_of(routers)) is not None:
            self._loads += 1
            part = max(1.0 / self._loads, LOOK_S / AVERAGED_S)
            self._load = averaged(self._load, load, part)

    def decide(self) -> Counts | None:
        """The counts to have; None while too little is known."""
        if self._load is None or self._bin_end_s is None or len(self._seen) < len(ROLES):
            return None
        there = tuple(max(self._seen[role].running, self._seen[role].wanted) for role in ROLES)
        now = (there[0], there[1])
        if self.counts is None or self._decided_for != (now, self._bin_end_s):
            end_s = self._bin_end_s - BIN_S
            self.counts = decide(
                *(now, self._load, lambda ahead_s: self._forecast.ahead(ahead_s, end_s)),
                *(self.slo, self.prices, self.bounds),
            )
            self._decided_for = now, self._bin_end_s
        return self.counts


_BOARDS: dict[str, Board] = {}


def board_of(app: str, slo: Slo, prices: Prices, bounds: Bounds) -> Board:
    """The board of an app. Other bounds or targets take effect; what was learned stays."""
    board = _BOARDS.setdefault(app, Board(slo, prices, bounds))
    board.slo, board.bounds = slo, bounds
    return board


def forget(app: str) -> None:
    """Drop what is known of an app."""
    _BOARDS.pop(app, None)

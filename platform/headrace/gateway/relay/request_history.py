"""The history of a gateway: its last finished requests, and its key figures over time.

A key figure belongs to the step of the clock in which its request ended. Steps are 10 s long for
the last hour and 300 s for the last day. Each step counts requests, errors and answer tokens, and
has a histogram of TTFT (time to first token) and one of TPOT (time per output token after the
first). Only streams have both: of other answers, the gateway sees no first token.

A histogram's bins grow by `BIN_RATIO`, so a percentile is at most 7 % off.

Pure: no I/O. Call it from one thread.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_FINISHED = 200
"""Number of finished requests that are remembered."""
LAST_S = 60
"""Seconds that `last` describes."""
STEPS = ((10, 360), (300, 288))
"""Length of a step in seconds, and number of steps, of each series."""
BIN_RATIO = 1.15
MIN_S, MAX_S = 1e-4, 1e4
"""Bounds of the histograms' values: a shorter or longer time counts as this one."""
UNKNOWN_KEY_STATUS = 401
"""The history leaves out requests with this status: a client without a key could otherwise push out
all other requests."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request that has ended.

    Attributes:
        id: the request's id.
        path: its path, without a query.
        at: Unix time of its arrival.
        status: HTTP status of the answer; 499 if the client left before it.
        error: code of the error that ended it; None if there was none.
        tenant: the tenant that its key proves; None if no keys are configured.
        streamed: whether the answer was a stream.
        replica: id of the replica that answered; empty if none did.
        queue_s: seconds for which it waited for its body, in the queue, for a plan or a replica.
        ttft_s: seconds from its arrival to the first bytes of the answer; None if there were none.
        total_s: seconds from its arrival to its end.
        tokens: number of tokens in the answer; None if unknown.
        resumed: how often another replica took over the stream.
        model: own name of the model that it was for; empty if that was not known.
    """

    id: str
    path: str
    at: float
    status: int
    error: str | None
    tenant: str | None
    streamed: bool
    replica: str
    queue_s: float
    ttft_s: float | None
    total_s: float
    tokens: int | None
    resumed: int
    model: str = ""

    @property
    def failed(self) -> bool:
        """Whether the request ended by a fault, not by the client's mistake or wish."""
        return self.status >= 500 or (self.status == 200 and self.error is not None)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per answer token after the first; None if unknown."""
        if not self.streamed or self.ttft_s is None or self.tokens is None or self.tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (self.tokens - 1)


@dataclass(slots=True)
class _Step:
    """Sums over the requests that ended in one step."""

    requests: int = 0
    errors: int = 0
    tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    tpot: Counter[int] = field(default_factory=Counter)

    def add(self, request: FinishedRequest) -> None:
        self.requests += 1
        self.errors += request.failed
        self.tokens += request.tokens or 0
        if request.streamed and request.ttft_s is not None:
            self.ttft[_bin(request.ttft_s)] += 1
        if (tpot_s := request.tpot_s) is not None:
            self.tpot[_bin(tpot_s)] += 1

    def figures(self) -> dict[str, float | None]:
        """Return the columns of one step."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "tokens": self.tokens,
            "ttft_p50_s": percentile(self.ttft, 0.5),
            "ttft_p99_s": percentile(self.ttft, 0.99),
            "tpot_p50_s": percentile(self.tpot, 0.5),
            "tpot_p99_s": percentile(self.tpot, 0.99),
        }


class RequestHistory:
    """The history of one gateway since its start.

    Args:
        clock: a monotonic clock, in seconds.
        unix_s: Unix time now. The clock alone advances the history, so a corrected system time
            moves no step.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, unix_s: float | None = None
    ) -> None:
        self._clock = clock
        self.started_at = time.time() if unix_s is None else unix_s
        self._offset_s = self.started_at - clock()
        self._finished: deque[FinishedRequest] = deque(maxlen=MAX_FINISHED)
        self._series = [_Series(step_s, count) for step_s, count in STEPS]

    def now(self) -> float:
        """Return the Unix time by this history's clock."""
        return self._clock() + self._offset_s

    def record(self, request: FinishedRequest) -> None:
        """Record a request that has just ended."""
        if request.status == UNKNOWN_KEY_STATUS:
            return
        self._finished.append(request)
        for series in self._series:
            series.at(self.now()).add(request)

    def requests(self, in_flight: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the document of `GET /headrace/v1/requests`.

        Args:
            in_flight: the requests that have not ended, described.
        """
        return {
            "started_at": self.started_at,
            "now": self.now(),
            "in_flight": list(in_flight),
            "finished": [_rounded(asdict(each)) for each in reversed(self._finished)],
        }

    def history(self) -> dict[str, Any]:
        """Return the document of `GET /headrace/v1/history`."""
        now = self.now()
        return {
            "started_at": self.started_at,
            "now": now,
            "last": self.last(),
            "series": [series.columns(now, self.started_at) for series in self._series],
        }

    def last(self) -> dict[str, float | None]:
        """Return the key figures of the last minute, or since the start if that is later."""
        now = self.now()
        finest = self._series[0]
        begin = max(now - LAST_S, self.started_at)
        steps = [finest.get(at) for at in range(finest.step_at(begin), int(now) + 1, finest.step_s)]
        summed = _Step()
        for step in filter(None, steps):
            summed.requests += step.requests
            summed.errors += step.errors
            summed.tokens += step.tokens
            summed.ttft += step.ttft
            summed.tpot += step.tpot
        seconds = max(1.0, now - max(finest.step_at(begin), self.started_at))
        figures = summed.figures()
        counts = {name: figures.pop(name) for name in ("requests", "errors", "tokens")}
        return {
            "seconds": round(seconds, 1),
            "requests_per_s": round(summed.requests / seconds, 4),
            "tokens_per_s": round(summed.tokens / seconds, 3),
            "error_rate": summed.errors / summed.requests if counts["requests"] else None,
            **figures,
        }


class _Series:
    """The latest steps of one length."""

    def __init__(self, step_s: int, max_steps: int) -> None:
        self.step_s, self._max_steps = step_s, max_steps
        self._steps: dict[int, _Step] = {}

    def step_at(self, now: float) -> int:
        """Return the Unix time at which the step of this moment begins."""
        return int(now) // self.step_s * self.step_s

    def get(self, begin: int) -> _Step | None:
        """Return the step that begins then; None if no request ended in it."""
        return self._steps.get(begin)

    def at(self, now: float) -> _Step:
        """Return the step of this moment. Steps that are too old are dropped."""
        begin = self.step_at(now)
        if (step := self._steps.get(begin)) is None:
            step = self._steps[begin] = _Step()
            oldest = begin - (self._max_steps - 1) * self.step_s
            for old in list(itertools.takewhile(lambda each: each < oldest, self._steps)):
                del self._steps[old]
        return step

    def columns(self, now: float, started_at: float) -> dict[str, Any]:
        """Return each figure as a list over the steps since the start, oldest first."""
        end = self.step_at(now)
        begin = max(self.step_at(started_at), end - (self._max_steps - 1) * self.step_s)
        times = range(begin, end + 1, self.step_s)
        empty = _Step()
        rows = [self._steps.get(at, empty).figures() for at in times]
        names = empty.figures()
        return {
            "step_s": self.step_s,
            "at": list(times),
            **{name: [row[name] for row in rows] for name in names},
        }


def _bin(seconds: float) -> int:
    return math.floor(math.log(min(max(seconds, MIN_S), MAX_S), BIN_RATIO))


def percentile(bins: Mapping[int, int], share: float) -> float | None:
    """Return a percentile of a histogram, in seconds; None if it is empty.

    The result is the geometric middle of the bin of the value with rank ceil(share * n), which is
    the nearest-rank percentile.
    """
    rank = math.ceil(share * sum(bins.values()))
    seen = 0
    for index in sorted(bins):
        seen += bins[index]
        if seen >= rank:
            return round(BIN_RATIO ** (index + 0.5), 5)
    return None


def _rounded(document: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in document.items()
    }

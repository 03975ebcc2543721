"""The health of each replica, which decides whether the replica gets requests.

Relay, pool, planner and quarantine all use this one model of a replica's health.

    healthy   gets requests.
    suspect   gets requests only where no replica is healthy, and none in the second after it
              failed. It keeps those that it has.
    down      gets none. The requests that it has are moved to others, within a retry budget.
    draining  gets none and keeps those that it has.

The evidence of one replica:

- Probes of its health check. One that is missed makes it suspect, `MAX_FAILURES` of the last
  `WINDOW` make it down, and one that passes makes it suspect again until fewer than two failures
  are left. A connection that breaks counts as a missed probe, and the next probe decides.
- Bytes of an answer: its engine works, and failures before them count no more.
- A refused connection: its server takes nothing new, so it drains or has ended. If it has ended,
  the connections of its requests break by themselves.
- Its own word that its engine is dead: down until a probe passes.
- Reports: after `SILENT_S` without one it is suspect. They come from its event loop and do not show
  whether its engine works, so they end no other suspicion.

Time-outs follow the engine: a health check fails when a step takes a multiple of its predicted time
(`headrace_decode.http.engine_health`). So a probe's own time-out has to bound only the event loop's
stalls.

Pure: no I/O, no clocks. One thread owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MAX_FAILURES, WINDOW = 3, 5
"""A replica with so many missed probes of the last few is down. Kubernetes' default
`failureThreshold` is 3; Envoy's outlier detection (`consecutive_5xx`) and sglang's router wait for
5."""
PROBE_INTERVAL_S = 1.0
"""Time between two probes. Kubernetes' default is 10 s, for a container whose restart takes
minutes; here a stream waits."""
PROBE_TIMEOUT_S = 1.0
"""Kubernetes' default `timeoutSeconds`. With three failures, an event loop may stall for 3 s."""
MIN_GAP_S = 0.5
"""Failures that are closer count once: the connections of a killed process break together."""
SILENT_S = 2.0
"""Time without a byte of any answer until the first probe, and without a report until a replica is
suspect: ten reports are missing then."""
RETRY_RATIO, MIN_RETRIES_S = 0.2, 10.0
"""Requests that one replica takes over from replicas that are down, each second: a share of those
that it has, and at least so many. Both are Linkerd's (`retryRatio`, `minRetriesPerSecond`), and the
share is Envoy's `retry_budget`, too."""
FORGET_S = 600.0
"""Time after which the evidence on a silent replica is removed. A replica that starts again has
another id."""


class State(Enum):
    """State of a replica."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"


class Probe(Enum):
    """The result of a health check, or of trying to connect."""

    PASSED = "passed"
    MISSED = "missed"
    """No answer in time, or the answer that the engine makes no step."""
    REFUSED = "refused"
    """No connection is accepted."""
    DEAD = "dead"
    """The replica says that its engine has ended."""


@dataclass(slots=True)
class _Record:
    """The evidence of one replica."""

    passed: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Its last probes, oldest first."""
    failed_s: float | None = None
    touched_s: float = 0.0
    """Time of the last evidence of a failure."""
    refused: bool = False
    dead: bool = False
    left: bool = False
    """Whether Ray Serve no longer lists it among the replicas that run."""
    told_draining: bool = False
    reported_s: float | None = None
    silent: bool = False

    def state(self) -> State:
        failures = self.passed.count(False)
        failed_last = bool(failures) and not self.passed[-1]
        if self.dead or (failures >= MAX_FAILURES and failed_last):
            return State.DOWN
        if self.left or self.told_draining or self.refused:
            return State.DRAINING
        if self.silent or failed_last or failures > 1:
            return State.SUSPECT
        return State.HEALTHY

    def needs_probe(self) -> bool:
        """Return whether a probe could change the state."""
        return self.dead or self.refused or False in self.passed


class ReplicaHealth:
    """The health of an app's replicas, by id, as one gateway observes it. Times are one clock's."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._unhealthy: dict[str, State] = {}
        self._retries: dict[str, tuple[float, float]] = {}
        """By replica: the requests that it may take over, and the time of this count."""

    @property
    def unhealthy(self) -> Mapping[str, State]:
        """States of the replicas that are not healthy. Read only."""
        return self._unhealthy

    def state(self, replica: str) -> State:
        """Return a replica's state; one that is not known is healthy."""
        return self._unhealthy.get(replica, State.HEALTHY)

    def needs_probe(self, replica: str) -> bool:
        """Return whether a replica has failed and no later probe has cleared it."""
        record = self._records.get(replica)
        return record is not None and record.needs_probe()

    def may_be_tried(self, replica: str, now_s: float) -> bool:
        """Return whether a replica may get requests where no replica is healthy."""
        if self.state(replica) not in (State.HEALTHY, State.SUSPECT):
            return False
        record = self._records.get(replica)
        if record is None or record.failed_s is None or (record.passed and record.passed[-1]):
            return True
        return now_s - record.failed_s >= PROBE_INTERVAL_S

    # Evidence

    def on_probe(self, replica: str, probe: Probe, now_s: float) -> None:
        """Record the result of a health check or of a connection attempt."""
        if probe is Probe.PASSED and not self.needs_probe(replica):
            return
        record = self._touched(replica, now_s)
        if probe is Probe.PASSED:
            record.refused = record.dead = False
            if record.passed:
                record.passed.append(True)
        elif probe is Probe.MISSED:
            self._fail(record, now_s)
        else:
            record.refused |= probe is Probe.REFUSED
            record.dead |= probe is Probe.DEAD
        self._judge(replica)

    def on_broken(self, replica: str, now_s: float) -> None:
        """Record that a connection broke while the replica worked on a request."""
        self._fail(self._touched(replica, now_s), now_s)
        self._judge(replica)

    def on_bytes(self, replica: str, at_s: float) -> None:
        """Record that bytes of an answer came at this time."""
        record = self._records.get(replica)
        if record is not None and record.failed_s is not None and at_s > record.failed_s:
            record.passed.clear()
            record.failed_s = None
            self._judge(replica)

    def on_report(self, replica: str, now_s: float, *, draining: bool = False) -> None:
        """Record that a report came."""
        record = self._record(replica)
        record.reported_s = now_s
        if record.silent or record.told_draining != draining:
            record.silent, record.told_draining = False, draining
            self._judge(replica)

    def on_members(self, known: Iterable[str], members: Collection[str], now_s: float) -> None:
        """Record which replicas get requests, as Ray Serve reports them.

        Args:
            known: the replicas that got requests before.
        """
        for replica in known:
            if replica not in members:
                self._touched(replica, now_s).left = True
                self._judge(replica)
        for replica, record in self._records.items():
            if record.left and replica in members:
                record.left = False
                self._judge(replica)

    def remove_reports(self, replica: str) -> None:
        """Expect no more reports of a replica."""
        record = self._records.get(replica)
        if record is not None:
            record.reported_s, record.silent, record.told_draining = None, False, False
            self._judge(replica)

    def check(self, now_s: float) -> None:
        """Find missing reports, and remove old evidence. To be called about once a second."""
        for replica, record in list(self._records.items()):
            reported_s = record.reported_s
            if reported_s is not None and not record.silent and now_s - reported_s > SILENT_S:
                record.silent = True
                self._judge(replica)
            if reported_s is None and now_s - record.touched_s > FORGET_S:
                del self._records[replica]
                self._unhealthy.pop(replica, None)
        for replica, (_, at_s) in list(self._retries.items()):
            if now_s - at_s > FORGET_S:
                del self._retries[replica]

    # Retry budget

    def take_retries(self, in_flight: Mapping[str, int], wanted: int, now_s: float) -> int:
        """Return how many requests may move now, and count them.

        A replica that stalls would otherwise move its whole queue to the others at once, and they
        would stall next.

        Args:
            in_flight: the replicas that would take them over, with the requests that each has.
            wanted: how many requests wait at a replica that is down.
        """
        granted = 0
        for replica, running in in_flight.items():
            rate_s = max(MIN_RETRIES_S, RETRY_RATIO * running)
            left, at_s = self._retries.get(replica, (rate_s, now_s))
            left = min(rate_s, left + rate_s * (now_s - at_s))
            taken = min(int(left), wanted - granted)
            self._retries[replica] = left - taken, now_s
            granted += taken
        return granted

    def to_dict(self) -> dict[str, Any]:
        """Return, JSON-able, the replicas that are not healthy."""
        return {replica: state.value for replica, state in self._unhealthy.items()}

    # Inside

    def _record(self, replica: str) -> _Record:
        record = self._records.get(replica)
        if record is None:
            record = self._records[replica] = _Record()
        return record

    def _touched(self, replica: str, now_s: float) -> _Record:
        record = self._record(replica)
        record.touched_s = now_s
        return record

    @staticmethod
    def _fail(record: _Record, now_s: float) -> None:
        if record.failed_s is None or now_s - record.failed_s >= MIN_GAP_S:
            record.failed_s = now_s
            record.passed.append(False)

    def _judge(self, replica: str) -> None:
        state = self._records[replica].state()
        if state is State.HEALTHY:
            self._unhealthy.pop(replica, None)
        else:
            self._unhealthy[replica] = state

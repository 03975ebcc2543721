"""Replicas that come and go in the simulator: none of their requests is lost, and each second of
theirs is counted."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.autoscaling.scalers import QueueLength, Static
from headrace.autoscaling.capacity import ReplicaBounds
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.outcome import GoodputTargets
from headrace_lab.simulate.run import SimulationRun, SimulationSettings
from headrace_lab.simulate.scenarios.autoscaled_fleet import (
    Fleet,
    FleetObservation,
    FleetSettings,
    Scaler,
    simulate_autoscaled,
)
from headrace_lab.simulate.trace import Trace, Workload

SECONDS = 600.0
MOST = (2, 3)


def work(rate: float) -> Workload:
    """Requests of 2,048 tokens that share nothing, with answers of 100 tokens, evenly apart."""
    count = int(rate * SECONDS)
    times = (np.arange(count) + 0.5) / rate
    trace = Trace(
        arrival_s=times,
        prompt=np.full(count, 2048, np.int32),
        output=np.full(count, 100, np.int32),
        starts=np.arange(count + 1, dtype=np.int64) * 4,
        keys=np.arange(4 * count, dtype=np.int32),
        distinct=4 * count,
        tick_s=0.0,
    )
    rows = np.arange(count, dtype=np.int32)
    return Workload(trace, times, rows, np.zeros(count, np.int64), SECONDS, 4 * count)


def played(
    scaler: Scaler, first: tuple[int, int], rate: float = 2.0
) -> tuple[SimulationRun, Fleet]:
    settings = SimulationSettings(warm_share=0.0, report_s=0.5, targets=GoodputTargets())
    fleet = FleetSettings(start_s=60.0, every_s=10.0, first=first)
    return simulate_autoscaled(work(rate), Hardware(), MOST, scaler, settings, fleet)


class At:
    """Counts from each time on; keeps what it saw."""

    def __init__(self, counts: dict[float, tuple[int, int]]) -> None:
        self.counts, self.looks = counts, list[FleetObservation]()

    def __call__(self, look: FleetObservation) -> tuple[int, int]:
        self.looks.append(look)
        return next(
            one for from_s, one in sorted(self.counts.items())[::-1] if look.now_s >= from_s
        )


def test_fixed_counts_cost_their_time() -> None:
    run, fleet = played(Static(1, 2), (1, 2))
    assert (run.outcome.ended, run.outcome.lost) == (1200, 0)
    assert fleet.gpu_s == pytest.approx(3 * SECONDS, rel=0.01)
    assert fleet.ordered == 0


def test_a_replica_is_paid_from_its_order_and_serves_after_its_start() -> None:
    scaler = At({0.0: (0, 1), 200.0: (0, 2)})
    _, fleet = played(scaler, (0, 1))
    assert fleet.ordered == 1
    assert fleet.gpu_s == pytest.approx(SECONDS + 400.0, rel=0.03)
    ready = {look.now_s: look.decode.ready for look in scaler.looks}
    assert max(at for at, count in ready.items() if count == 1) == pytest.approx(260.0, abs=11.0)


def test_replicas_that_go_finish_their_requests_first() -> None:
    scaler = At({0.0: (1, 3), 300.0: (0, 1)})
    run, fleet = played(scaler, (1, 3), rate=6.0)
    assert (run.outcome.ended, run.outcome.lost) == (3600, 0)
    last = scaler.looks[-1]
    assert (last.prefill.ready, last.decode.ready, last.decode.draining) == (0, 1, 0)
    assert fleet.gpu_s == pytest.approx(300 * 4 + 300, rel=0.05)


def test_requests_wait_for_the_first_replica_and_are_answered() -> None:
    scaler = At({0.0: (0, 0), 100.0: (0, 1)})
    run, _ = played(scaler, (0, 0), rate=0.5)
    first = run.state.req["first_s"]
    assert run.outcome.ended == 300
    assert first.min() == pytest.approx(160.0, abs=2.0)
    assert scaler.looks[5].decode.ongoing == pytest.approx(25, abs=1)
    assert sum(look.arrived for look in scaler.looks) == pytest.approx(300, abs=6)


def test_every_request_that_ended_is_shown_once() -> None:
    scaler = At({0.0: (1, 2)})
    played(scaler, (1, 2))
    ended = np.concatenate([look.ended for look in scaler.looks])
    assert len(np.unique(ended)) == len(ended) >= 1150


def test_serves_queue_length_rule_follows_the_queue_after_its_delays() -> None:
    """Desired are ongoing / target replicas, up after 30 s, down after 600 s."""
    rule = QueueLength((2.0, 10.0), ReplicaBounds((1, 8), (1, 8)))

    def ask(at_s: float, ongoing: int, ready: int) -> int:
        from headrace_lab.simulate.scenarios.autoscaled_fleet import RoleObservation

        role = RoleObservation(ready, 0, 0, ongoing, 0.0)
        none = np.zeros(0, np.int64)
        return rule(FleetObservation(at_s, role._replace(ongoing=0), role, 0, none, np.zeros(0)))[1]

    assert [ask(at, 55, 2) for at in (0.0, 15.0)] == [2, 2]
    assert ask(30.0, 55, 2) == 6
    assert [ask(at, 5, 6) for at in np.arange(45.0, 600.0, 15.0).tolist()][-1] == 6
    assert ask(700.0, 5, 6) == 1

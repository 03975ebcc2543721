"""How replicas are judged: healthy, suspect, down or draining, by all evidence together."""

from __future__ import annotations

import pytest

from headrace.replica_health import (
    FORGET_S,
    MAX_FAILURES,
    MIN_RETRIES_S,
    RETRY_RATIO,
    SILENT_S,
    Probe,
    ReplicaHealth,
    State,
)

HEALTHY, SUSPECT, DOWN, DRAINING = State


def probed(*probes: Probe, each_s: float = 1.0) -> ReplicaHealth:
    made = ReplicaHealth()
    for number, probe in enumerate(probes):
        made.on_probe("a", probe, number * each_s)
    return made


M, P = Probe.MISSED, Probe.PASSED


@pytest.mark.parametrize(
    ("probes", "state"),
    [
        ([], HEALTHY),
        ([P], HEALTHY),
        ([M], SUSPECT),
        ([M, M], SUSPECT),
        ([M, M, M], DOWN),
        ([M, P, M, P, M], DOWN),
        ([M, P], HEALTHY),
        ([M, M, P], SUSPECT),
        ([M, M, M, P], SUSPECT),
        ([M, M, M, P, P, P, P], HEALTHY),
        ([M, P, P, M, P, P, M], SUSPECT),
    ],
)
def test_several_of_the_last_probes_must_be_missed(probes: list[Probe], state: State) -> None:
    assert probed(*probes).state("a") is state


def test_a_burst_of_failures_counts_once() -> None:
    made = ReplicaHealth()
    for _ in range(100):
        made.on_broken("a", 5.0)
    assert made.state("a") is SUSPECT


def test_a_suspect_is_tried_a_second_after_its_failure_or_once_a_probe_passed() -> None:
    made = ReplicaHealth()
    assert made.may_be_tried("a", 0.0)
    made.on_broken("a", 0.0)
    assert not made.may_be_tried("a", 0.9) and made.may_be_tried("a", 1.0)
    made.on_broken("a", 2.0)
    made.on_probe("a", P, 2.1)
    assert made.state("a") is SUSPECT and made.may_be_tried("a", 2.1)
    made.on_probe("a", Probe.DEAD, 3.0)
    assert not made.may_be_tried("a", 9.0)


def test_bytes_of_an_answer_end_a_doubt_that_is_older() -> None:
    made = probed(M, M, M)
    made.on_bytes("a", 1.5)
    assert made.state("a") is DOWN, "the last probe was missed after these"
    made.on_bytes("a", 2.5)
    assert made.state("a") is HEALTHY and not made.needs_probe("a")


def test_a_replica_that_refuses_connections_drains_until_a_probe_passes() -> None:
    made = probed(Probe.REFUSED, Probe.REFUSED, Probe.REFUSED, Probe.REFUSED)
    made.on_bytes("a", 9.0)
    assert made.state("a") is DRAINING and made.needs_probe("a")
    made.on_probe("a", P, 10.0)
    assert made.state("a") is HEALTHY


def test_a_dead_engine_is_down_at_once_and_until_a_probe_passes() -> None:
    made = probed(Probe.DEAD)
    made.on_report("a", 1.0)
    assert made.state("a") is DOWN
    made.on_probe("a", P, 2.0)
    assert made.state("a") is HEALTHY


def test_a_replica_that_drains_is_down_when_it_hangs() -> None:
    made = ReplicaHealth()
    made.on_report("a", 0.0, draining=True)
    assert made.state("a") is DRAINING and not made.needs_probe("a")
    for now_s in range(MAX_FAILURES):
        made.on_probe("a", M, now_s)
    assert made.state("a") is DOWN


def test_a_replica_that_left_drains_whatever_it_reports() -> None:
    made = ReplicaHealth()
    made.on_members(["a", "b"], {"b"}, 0.0)
    made.on_report("a", 0.1)
    made.on_probe("a", P, 0.2)
    assert made.unhealthy == {"a": DRAINING}
    made.on_members(["b"], {"a", "b"}, 0.3)
    assert made.unhealthy == {}


def test_without_reports_a_replica_that_reported_is_suspect() -> None:
    made = ReplicaHealth()
    made.on_report("a", 0.0)
    made.on_probe("b", P, 0.0)
    made.check(SILENT_S)
    assert made.unhealthy == {}
    made.check(SILENT_S + 0.1)
    assert made.unhealthy == {"a": SUSPECT}, "b never reported"
    made.on_report("a", 9.0)
    assert made.unhealthy == {}


def test_reports_end_no_other_doubt() -> None:
    made = probed(M, M, M)
    made.on_report("a", 4.0)
    assert made.state("a") is DOWN


def test_what_is_gone_is_forgotten() -> None:
    made = probed(M)
    made.on_report("b", 0.0)
    made.on_probe("b", M, 0.0)
    made.check(FORGET_S + 1.0)
    assert made.to_dict() == {"b": "suspect"}
    made.remove_reports("b")
    made.check(FORGET_S + 1.0)
    assert made.to_dict() == {}


def test_a_queue_moves_at_the_pace_of_the_retry_budget() -> None:
    made = ReplicaHealth()
    others = {"b": 0, "c": 500}
    first = int(MIN_RETRIES_S + RETRY_RATIO * 500)
    assert made.take_retries(others, 1000, 0.0) == first
    assert made.take_retries(others, 1000, 0.0) == 0
    assert made.take_retries(others, 1000, 0.5) == first // 2
    assert made.take_retries(others, 3, 9.0) == 3
    assert made.take_retries({}, 1000, 9.0) == 0, "there is nobody to take them over"

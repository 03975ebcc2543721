"""The policy as Serve's controller runs it: in Serve's own autoscaling state, without an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import ApplicationAutoscalingState
from ray.serve._private.common import (
    DeploymentID,
    ReplicaID,
    ReplicaMetricReport,
    TimeStampedValue,
)
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo

from headrace.autoscaling import autoscaler_state
from headrace.autoscaling.arrivals import METRICS_DELAY_S
from headrace.autoscaling.autoscaler_state import AutoscalerState, RoleStatus
from headrace.autoscaling.capacity import ReplicaBounds, Slo
from headrace.autoscaling.forecast import BIN_S
from headrace.autoscaling.replica_counts import ReplicaCosts
from headrace.autoscaling.replica_metrics import AGE_S, REQUESTS, decode_metrics, encode_metrics
from headrace.config import ConfigError, load_config, to_app_args
from headrace.replica.planner import ReplicaPlanner
from headrace.router import Geometry, Router, RouterSettings
from headrace_engine.meter import EngineMeter
from headrace_lab.simulate.hardware import default_steps

APP = "app"
MANY = ["prefill.autoscaling.max_replicas=4", "decode.autoscaling.max_replicas=6"]


@pytest.fixture(autouse=True)
def _no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler_state, "_STATES", {})


def snapshot(rate: float = 1.0) -> dict[str, Any]:
    """What a decode replica's planner tells: 0.3 s of prompt, 300 tokens of answer."""
    return {
        "outcomes": {
            "traffic": {
                "requests": 256,
                "rate": rate,
                "prompt_tokens": 8_000.0,
                "computed_tokens": 8_000.0,
                "answer_tokens": 300.0,
                "local_s": 0.3,
                "local_s_square": 0.3,
                "remote_s": 0.3,
                "remote_s_square": 0.3,
                "move_s": 0.02,
            }
        },
        "step_times": {"decode": default_steps().to_dict()},
        "engines": {"decode_blocks": 800, "block_tokens": 512},
        "prefill": {"p": {"same_machine": False}},
    }


class Served:
    """Serve's autoscaling state of an app whose roles scale as configured."""

    def __init__(self, now: pytest.MonkeyPatch) -> None:
        args = to_app_args(load_config(overrides=["model.source=/m", *MANY]))
        self.state = ApplicationAutoscalingState(APP)
        self.targets, self.now_s, self.came = {}, 1e9, 0.0
        now.setattr("time.time", lambda: self.now_s)
        for role in ("prefill", "decode"):
            given = args[f"{role}_config"]["deployment_config"]["autoscaling_config"]
            config = DeploymentConfig.from_default(autoscaling_config=given)
            info = DeploymentInfo(
                deployment_config=config,
                replica_config=None,
                start_time_ms=0,
                deployer_job_id="",
                version="1",
            )
            name = DeploymentID(role, APP)
            self.targets[name] = self.state.register_deployment(name, info, 1)
            self.run(name)

    def run(self, name: DeploymentID) -> None:
        """All replicas that are wanted run."""
        replicas = [ReplicaID(f"{name.name}{n}", name) for n in range(self.targets[name])]
        self.state.update_running_replica_ids(name, replicas)

    def publish(self, requests: float) -> None:
        """Each decode replica reports; the first has had so many requests more."""
        self.came += requests
        name = DeploymentID("decode", APP)
        for n in range(self.targets[name]):
            came = self.came if n == 0 else 0.0
            told = {**encode_metrics(snapshot()), REQUESTS: came, AGE_S: self.now_s - 1e9}
            self.state.record_request_metrics_for_replica(
                ReplicaMetricReport(
                    replica_id=ReplicaID(f"decode{n}", name),
                    metrics={
                        key: [TimeStampedValue(self.now_s, value)] for key, value in told.items()
                    },
                    timestamp=self.now_s,
                )
            )

    def minutes(self, count: int, rate: float) -> tuple[int, int]:
        """Let time pass; the counts at its end, prefill and decode."""
        for _ in range(count * 6):
            self.now_s += BIN_S / 6
            self.publish(rate * BIN_S / 6)
            self.targets |= self.state.get_decision_num_replicas(self.targets)
            for name in self.targets:
                self.run(name)
        by_name = {name.name: target for name, target in self.targets.items()}
        return by_name["prefill"], by_name["decode"]


def test_serve_starts_and_stops_replicas_of_both_roles_as_the_policy_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch)
    assert served.minutes(5, 0.5) == (1, 1)
    busy = served.minutes(20, 8.0)
    assert 4 <= sum(busy) <= 6
    assert sum(served.minutes(45, 0.5)) == 2


def test_while_nothing_is_known_serves_queue_length_policy_starts_replicas_but_stops_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch)
    name = DeploymentID("decode", APP)
    served.targets[name] = 3
    served.run(name)
    served.now_s += 60.0
    assert served.state.get_decision_num_replicas(served.targets)[name] == 3
    monkeypatch.setattr(
        served.state._deployment_autoscaling_states[name], "get_total_num_requests", lambda: 70.0
    )
    assert served.state.get_decision_num_replicas(served.targets)[name] == 5  # of 16 each


def test_a_policy_that_fails_leaves_the_queue_length_to_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch)
    monkeypatch.setattr(AutoscalerState, "decide", lambda self: 1 / 0)
    assert served.minutes(2, 8.0) == (1, 1)


def test_a_role_without_bounds_of_its_own_keeps_its_number() -> None:
    args = to_app_args(load_config(overrides=["model.source=/m", "prefill.replicas=2", MANY[1]]))
    assert args["prefill_config"]["deployment_config"]["num_replicas"] == 2
    scaling = args["decode_config"]["deployment_config"]["autoscaling_config"]
    assert scaling["policy"]["policy_kwargs"]["prefill"] == [2, 2]
    assert (scaling["min_replicas"], scaling["initial_replicas"], scaling["max_replicas"]) == (
        *(1, 1),
        6,
    )


def test_bounds_that_contradict_each_other_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"decode\.autoscaling.*max_replicas: is 2, below"):
        load_config(
            overrides=[
                "model.source=/m",
                "decode.autoscaling.min_replicas=3",
                "decode.autoscaling.max_replicas=2",
            ]
        )


def test_what_a_replica_publishes_is_numbers_and_can_be_read_again() -> None:
    told = encode_metrics(snapshot())
    assert all(isinstance(value, float) for value in told.values())
    router = decode_metrics(told)
    assert router is not None
    assert router["outcomes"]["traffic"]["local_s"] == 0.3
    assert router["step_times"]["decode"]["state"] == default_steps().to_dict()["state"]
    assert encode_metrics({**snapshot(), "outcomes": {"traffic": {"requests": 0}}}) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"headrace.kv_tokens": 1.0},
        {**encode_metrics(snapshot()), "headrace.steps.state.0": 1e14},
    ],
)
def test_numbers_that_no_replica_publishes_are_not_believed(wrong: dict[str, float]) -> None:
    assert decode_metrics(wrong) is None


def one_state(start_s: float = 120.0) -> AutoscalerState:
    return AutoscalerState(
        Slo(attainment=0.95), ReplicaCosts(start_s), ReplicaBounds((0, 4), (0, 6))
    )


def test_the_time_that_starts_take_is_measured() -> None:
    app = one_state()
    app.record_replicas("decode", RoleStatus(1, 1), 0.0)
    for n in range(12):
        app.record_replicas("decode", RoleStatus(1, 2), 1000.0 * n + 10.0)
        app.record_replicas("decode", RoleStatus(2, 2), 1000.0 * n + 310.0)
        app.record_replicas("decode", RoleStatus(1, 1), 1000.0 * n + 500.0)
    assert app.prices.start_s == pytest.approx(300.0, abs=5.0)


def test_an_order_that_is_taken_back_measures_nothing() -> None:
    app = one_state()
    for seen, at_s in (
        (RoleStatus(1, 1), 0.0),
        (RoleStatus(1, 2), 1.0),
        (RoleStatus(1, 1), 2.0),
        (RoleStatus(2, 2), 9.0),
    ):
        app.record_replicas("decode", seen, at_s)
    assert app.prices.start_s < 121.0


@pytest.mark.parametrize("together", [1, 3])
def test_one_slow_start_is_an_outlier(together: int) -> None:
    """It waited two hours for a machine; so did all that were ordered with it."""
    app = one_state()
    app.record_replicas("decode", RoleStatus(1, 1), 0.0)
    app.record_replicas("decode", RoleStatus(1, 1 + together), 10.0)
    app.record_replicas("decode", RoleStatus(1 + together, 1 + together), 7210.0)
    assert app.prices.start_s == 120.0


def test_starts_that_keep_taking_longer_are_believed() -> None:
    app = one_state()
    for n in range(2):
        app.record_replicas("decode", RoleStatus(1, 1), 10_000.0 * n)
        app.record_replicas("decode", RoleStatus(1, 2), 10_000.0 * n + 10.0)
        app.record_replicas("decode", RoleStatus(2, 2), 10_000.0 * n + 910.0)
    assert app.prices.start_s == 900.0


def test_nothing_is_decided_before_both_roles_and_a_minute_of_traffic_are_known() -> None:
    app = one_state()
    assert app.decide() is None
    app.record_replicas("decode", RoleStatus(1, 1), 0.0)
    app.record_metrics({"a": encode_metrics(snapshot())}, 0.0)
    assert app.decide() is None
    app.record_replicas("prefill", RoleStatus(1, 1), 0.0)
    assert app.decide() is None
    app.record_metrics({"a": encode_metrics(snapshot())}, BIN_S)
    assert app.decide() is None, "the minute's last count is not known yet"
    app.record_metrics({"a": encode_metrics(snapshot())}, BIN_S + METRICS_DELAY_S)
    assert app.decide() is not None


@pytest.mark.parametrize("least", [0, 1])
def test_a_state_that_is_new_stops_nothing_before_it_knows_the_traffic(least: int) -> None:
    """Serve's controller was started again while three decode replicas served."""
    prices = ReplicaCosts(120.0, 20.0)
    app = AutoscalerState(Slo(attainment=0.95), prices, ReplicaBounds((0, 4), (least, 6)))
    at_s, totals = 0.0, 0.0
    while at_s < prices.stop_s:
        app.record_replicas("prefill", RoleStatus(1, 1), at_s)
        app.record_replicas("decode", RoleStatus(3, 3), at_s)
        app.record_metrics(
            {"a": {**encode_metrics(snapshot()), REQUESTS: totals, AGE_S: 9000.0 + at_s}}, at_s
        )
        counts = app.decide()
        assert counts is None or (counts.prefill >= 1 and counts.decode >= 3), counts
        at_s, totals = at_s + 5.0, totals + 0.01
    while counts is None or counts.decode == 3:  # it knows by now that nobody comes
        app.record_metrics(
            {"a": {**encode_metrics(snapshot()), REQUESTS: totals, AGE_S: 9000.0 + at_s}}, at_s
        )
        counts, at_s = app.decide(), at_s + 5.0
        assert at_s < 7200.0


def test_a_planner_publishes_how_many_requests_came_and_what_they_cost() -> None:
    """Of a real router: the names that are published are those that it tells."""
    router = Router(RouterSettings(), Geometry(16, 1000, 100, 100), replica="d1")
    router.prefill_members({"x"})
    mine = ReplicaPlanner(router, EngineMeter(), None, "here")
    assert mine.demand().keys() == {REQUESTS, AGE_S} and mine.demand()[REQUESTS] == 0.0
    for n in range(40):
        asyncio.run(mine.plan(f"r{n}", range(100), "", None))
        mine.first_token(f"r{n}", 0.3, 0)
        mine.finished(f"r{n}", range(20))
    mine._demand_until_s = 0.0
    told = mine.demand()
    assert told[REQUESTS] == 40.0
    app = one_state()
    for role in autoscaler_state.ROLES:
        app.record_replicas(role, RoleStatus(1, 1), 0.0)
    app.record_metrics({"d1": told}, 0.0)
    app.record_metrics({"d1": told}, BIN_S + METRICS_DELAY_S)
    assert app.load is not None
    assert (app.load.prompt_tokens, app.load.answer_tokens) == pytest.approx((100.0, 20.0))
    assert app.decide() is not None


def test_models_of_one_app_have_states_of_their_own() -> None:
    shared = (Slo(2.0, 0.0, 0.1, 0.9), ReplicaCosts(10.0, 20.0), ReplicaBounds((1, 1), (1, 1)))
    states = [autoscaler_state.state_of(APP, *shared, model) for model in ("", "a", "b", "a")]
    assert states[1] is states[3] and len({id(state) for state in states}) == 3
    assert autoscaler_state.state_of(APP, *shared) is states[0]

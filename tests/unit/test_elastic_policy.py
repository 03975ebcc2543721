"""The policy as Serve's controller runs it: in Serve's own autoscaling state, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
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

from headrace.config import ConfigError, load_config, to_app_args
from headrace.elastic import board
from headrace.elastic.board import Board, Seen
from headrace.elastic.capacity import Bounds, Slo
from headrace.elastic.decide import Prices
from headrace.elastic.forecast import BIN_S
from headrace.elastic.published import CAME, published, router_of
from headrace.planning import ReplicaPlanner
from headrace.router import Geometry, Router, RouterSettings
from headrace.simulate.hardware import default_steps
from headrace_engine.meter import EngineMeter

APP = "app"
MANY = ["prefill.autoscaling.max_replicas=4", "decode.autoscaling.max_replicas=6"]


@pytest.fixture(autouse=True)
def _no_boards() -> Iterator[None]:
    yield
    board.forget(APP)


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
        "fits": {"shared_cores": {"lost_share": 0.25}},
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
            told = {**published(snapshot()), CAME: self.came if n == 0 else 0.0}
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
    assert sum(served.minutes(90, 0.5)) == 2


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
    monkeypatch.setattr(Board, "decide", lambda self: 1 / 0)
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
    told = published(snapshot())
    assert all(isinstance(value, float) for value in told.values())
    router = router_of(told)
    assert router is not None
    assert router["outcomes"]["traffic"]["local_s"] == 0.3
    assert router["step_times"]["decode"]["state"] == default_steps().to_dict()["state"]
    assert published({**snapshot(), "outcomes": {"traffic": {"requests": 0}}}) == {}


@pytest.mark.parametrize(
    "wrong",
    [{}, {"headrace.kv_tokens": 1.0}, {**published(snapshot()), "headrace.steps.state.0": 1e14}],
)
def test_numbers_that_no_replica_publishes_are_not_believed(wrong: dict[str, float]) -> None:
    assert router_of(wrong) is None


def one_board(start_s: float = 120.0) -> Board:
    return Board(Slo(share=0.95), Prices(start_s), Bounds((0, 4), (0, 6)))


def test_the_time_that_starts_take_is_measured() -> None:
    app = one_board()
    app.saw("decode", Seen(1, 1), 0.0)
    for n in range(12):
        app.saw("decode", Seen(1, 2), 1000.0 * n + 10.0)
        app.saw("decode", Seen(2, 2), 1000.0 * n + 310.0)
        app.saw("decode", Seen(1, 1), 1000.0 * n + 500.0)
    assert app.prices.start_s == pytest.approx(300.0, abs=5.0)


def test_an_order_that_is_taken_back_measures_nothing() -> None:
    app = one_board()
    for seen, at_s in ((Seen(1, 1), 0.0), (Seen(1, 2), 1.0), (Seen(1, 1), 2.0), (Seen(2, 2), 9.0)):
        app.saw("decode", seen, at_s)
    assert app.prices.start_s < 121.0


def test_a_replica_that_restarts_is_not_counted_twice_or_below_zero() -> None:
    app = one_board()
    for at_s, came in ((0.0, 1000.0), (10.0, 1030.0), (20.0, 5.0), (30.0, 10.0), (70.0, 10.0)):
        app.learn({"a": {CAME: came}}, at_s)
    assert app._forecast._level == pytest.approx(35.0)


def test_a_new_replica_counts_from_its_first_request() -> None:
    app = one_board()
    app.learn({"a": {CAME: 0.0}}, 0.0)
    app.learn({"a": {CAME: 5.0}, "b": {CAME: 7.0}}, 30.0)
    app.learn({"a": {CAME: 5.0}, "b": {CAME: 7.0}}, 61.0)
    assert app._forecast._level == pytest.approx(12.0)


def test_nothing_is_decided_before_both_roles_and_traffic_are_known() -> None:
    app = one_board()
    assert app.decide() is None
    app.saw("decode", Seen(1, 1), 0.0)
    app.learn({"a": published(snapshot())}, 0.0)
    assert app.decide() is None
    app.saw("prefill", Seen(1, 1), 0.0)
    assert app.decide() is not None


def test_a_planner_publishes_how_many_requests_came_and_what_they_cost() -> None:
    """Of a real router: the names that are published are those that it tells."""
    router = Router(RouterSettings(), Geometry(16, 1000, 100, 100), replica="d1")
    router.prefill_members({"x"})
    mine = ReplicaPlanner(router, EngineMeter(), None, "here")
    assert mine.demand() == {CAME: 0.0}
    for n in range(40):
        asyncio.run(mine.plan(f"r{n}", range(100), "", None))
        mine.first_token(f"r{n}", 0.3, 0)
        mine.finished(f"r{n}", range(20))
    mine._demand_until_s = 0.0
    told = mine.demand()
    assert told[CAME] == 40.0
    app = one_board()
    for role in board.ROLES:
        app.saw(role, Seen(1, 1), 0.0)
    app.learn({"d1": told}, 0.0)
    assert app._load is not None
    assert (app._load.prompt_tokens, app._load.answer_tokens) == pytest.approx((100.0, 20.0))
    assert app.decide() is not None

"""What calls, transfers and loads are taken to cost, before and after they were measured."""

import pytest

from headrace.router.replica_planner.cost_models import CostModels, OverheadModel, transfer_time


def test_a_transfer_is_taken_to_need_5_ms_and_1_ns_a_byte() -> None:
    assert transfer_time().seconds(10**9) == pytest.approx(1.005)
    assert transfer_time().seconds(0) == 0.0


def test_each_medium_has_a_speed_of_its_own() -> None:
    costs = CostModels()
    for _ in range(20):
        for size in (10**6, 10**7):
            costs.load("nvme").observe(size, size / 1e7)
    assert costs.load("nvme").seconds(10**7) == pytest.approx(1.0, rel=0.05)
    assert costs.load("dram").seconds(10**7) == pytest.approx(0.015)


def test_a_call_overhead_is_a_mean_that_forgets() -> None:
    model = OverheadModel(0.02)
    for _ in range(100):
        model.observe(0.01)
    assert model.seconds() == pytest.approx(0.01, abs=0.001)
    for _ in range(200):
        model.observe(0.08)
    assert model.seconds() == pytest.approx(0.08, rel=0.05)


def test_a_call_overhead_is_never_negative() -> None:
    model = OverheadModel(0.02)
    for _ in range(100):
        model.observe(-0.5)
    assert model.seconds() == 0.0

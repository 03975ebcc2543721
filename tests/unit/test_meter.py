"""What an engine's meter keeps of steps and transfers, and how vLLM's statistics reach it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.meter import BACKLOG_SAMPLES, EngineMeter, Step, StoreLoad, Transfer


def test_totals_grow_and_the_load_is_the_last_one_seen() -> None:
    meter = EngineMeter()
    meter.load(3, 2, 0.25)
    meter.load(1, 0, 0.12345)
    meter.step(Step(100, 2, 0.1))
    meter.step(Step(0, 3, 0.05))
    meter.transfers([Transfer(1000, 0.5), Transfer(500, 0.25)], failed=1)
    meter.transfers([], failed=2)
    assert meter.snapshot() == {
        "running": 1,
        "waiting": 0,
        "kv_usage": 0.1235,
        "steps": 2,
        "prompt_tokens_computed": 100,
        "nixl": {"transfers": 2, "bytes": 1500, "seconds": 0.75, "failures": 3},
        "store": {},
    }
    json.dumps(meter.snapshot())


def test_samples_reach_whoever_listens() -> None:
    meter, steps, transfers = EngineMeter(), [], []
    meter.watch(steps.append, transfers.append)
    meter.step(Step(1, 2, 3.0))
    meter.transfers([Transfer(4, 5.0)], failed=0)
    assert (steps, transfers) == ([Step(1, 2, 3.0)], [Transfer(4, 5.0)])


def test_the_backlog_is_taken_once_and_bounded() -> None:
    meter = EngineMeter()
    for tokens in range(BACKLOG_SAMPLES + 10):
        meter.step(Step(tokens, 0, 0.01))
    taken = meter.take_steps()
    assert len(taken) == BACKLOG_SAMPLES
    assert taken[-1].ctx_tokens == BACKLOG_SAMPLES + 9, "the oldest are dropped"
    assert meter.take_steps() == []
    assert meter.snapshot()["steps"] == BACKLOG_SAMPLES + 10


# vLLM's side


def scheduler_stats(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "num_running_reqs": 1,
        "num_waiting_reqs": 0,
        "num_skipped_waiting_reqs": 0,
        "kv_cache_usage": 0.5,
        "iteration_details": None,
        "kv_connector_stats": None,
    }
    return SimpleNamespace(**{**values, **changes})


def iteration_stats(prompt: int, generated: int, first_tokens: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        prompt_token_stats=SimpleNamespace(computed=prompt),
        num_generation_tokens=generated,
        time_to_first_tokens_iter=[0.1] * first_tokens,
    )


@pytest.fixture
def meter() -> EngineMeter:
    return EngineMeter()


@pytest.fixture
def logger(meter: EngineMeter) -> Any:
    from headrace_engine._vllm_compat import MeterStatLogger

    return MeterStatLogger(meter, None)  # type: ignore[arg-type]


def test_requests_that_wait_for_kv_count_as_waiting(logger: Any, meter: EngineMeter) -> None:
    logger.record(scheduler_stats(num_waiting_reqs=2, num_skipped_waiting_reqs=3), None)
    assert (meter.running, meter.waiting, meter.kv_usage) == (1, 5, 0.5)
    logger.record(None, None)
    assert meter.waiting == 5


def test_a_detailed_step_is_taken_as_measured(logger: Any, meter: EngineMeter) -> None:
    details = SimpleNamespace(
        num_ctx_tokens=64, num_generation_requests=3, elapsed_ms=12.5, is_dummy=False
    )
    logger.record(scheduler_stats(iteration_details=details), None)
    details.is_dummy = True
    logger.record(scheduler_stats(iteration_details=details), None)
    assert meter.take_steps() == [Step(64, 3, 0.0125)]


def test_without_details_a_step_is_the_time_between_two_records(
    logger: Any, meter: EngineMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("headrace_engine._vllm_compat.time.monotonic", lambda: now)
    logger.record(scheduler_stats(), iteration_stats(10, 1, first_tokens=1))
    assert meter.take_steps() == [], "nobody knows when the first step began"
    now = 100.5
    logger.record(scheduler_stats(), iteration_stats(20, 3, first_tokens=1))
    assert meter.take_steps() == [Step(20, 2, 0.5)]
    now = 101.0
    logger.record(scheduler_stats(num_running_reqs=0), iteration_stats(0, 1))
    assert meter.take_steps() == [Step(0, 1, 0.5)]
    now = 161.0
    logger.record(scheduler_stats(), iteration_stats(5, 1, first_tokens=1))
    assert meter.take_steps() == [], "the idle minute is no step"


def test_nixls_statistics_become_transfers(logger: Any, meter: EngineMeter) -> None:
    stats = {
        "bytes_transferred": [100, 200],
        "transfer_duration": [0.1, 0.2],
        "num_failed_transfers": [1],
    }
    logger.record(scheduler_stats(kv_connector_stats=stats), None)
    assert meter.snapshot()["nixl"] == {
        "transfers": 2,
        "bytes": 300,
        "seconds": 0.3,
        "failures": 1,
    }


def test_statistics_without_transfers_are_none() -> None:
    from headrace_engine._vllm_compat import nixl_transfers

    assert nixl_transfers({}) == ([], 0)
    assert nixl_transfers({"num_failed_transfers": [1, 1]}) == ([], 2)


def test_a_store_beside_nixl_is_told_apart_from_it(logger: Any, meter: EngineMeter) -> None:
    loads: list[StoreLoad] = []
    meter.watch(on_load=loads.append)
    nixl = {"transfer_duration": [0.1], "bytes_transferred": [100], "num_failed_transfers": []}
    store = {
        "loaded_dram": 2,
        "loads": [["dram", 4096, 0.5], ["nvme", 1024, 0.25]],
        "digests": ["ab" * 16],
    }
    nested = {"NixlPullConnector": {"data": nixl}, "HeadraceConnector": {"data": store}}
    logger.record(scheduler_stats(kv_connector_stats=nested), None)
    logger.record(scheduler_stats(kv_connector_stats=store), None)
    assert meter.transfer_bytes_total == 100
    assert loads == 2 * [StoreLoad("dram", 4096, 0.5), StoreLoad("nvme", 1024, 0.25)]
    assert meter.store_digests == [b"\xab" * 16]
    assert meter.snapshot()["store"] == {
        "loaded_dram": 4,
        "load_bytes": 2 * 5120,
        "load_seconds": 1.5,
    }

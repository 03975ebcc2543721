"""What an engine's meter keeps of steps and transfers, and how vLLM's statistics reach it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.meter import (
    BACKLOG_SAMPLES,
    ContextEstimate,
    EngineMeter,
    Finished,
    Step,
    StoreLoad,
    Transfer,
)
from headrace_engine.step_time import pairs_of


def test_totals_grow_and_the_load_is_the_last_one_seen() -> None:
    meter = EngineMeter()
    meter.load(3, 2, 0.25)
    meter.load(1, 0, 0.12345)
    meter.step(Step(100, 2, 0, 0, 0, 0.1))
    meter.step(Step(0, 3, 0, 0, 0, 0.05))
    meter.transfers([Transfer(1000, 0.5), Transfer(500, 0.25)], failed=1)
    meter.transfers([], failed=2)
    assert meter.snapshot() == {
        "running": 1,
        "waiting": 0,
        "kv_usage": 0.1235,
        "steps": 2,
        "prompt_tokens_computed": 100,
        "nixl": {
            "transfers": 2,
            "bytes": 1500,
            "seconds": 0.75,
            "failures": 3,
            "proofs": {},
            "proof_seconds": {},
        },
        "store": {},
        "usage": {"total": {}, "without_tenant": {}, "step_s": 0.0, "vllm": {}},
    }
    json.dumps(meter.snapshot())


def test_samples_reach_whoever_listens() -> None:
    meter, steps, transfers = EngineMeter(), [], []
    meter.on_step.append(steps.append)
    meter.on_transfer.append(transfers.append)
    meter.step(Step(1, 2, 0, 0, 0, 3.0))
    meter.transfers([Transfer(4, 5.0)], failed=0)
    assert (steps, transfers) == ([Step(1, 2, 0, 0, 0, 3.0)], [Transfer(4, 5.0)])


def test_the_backlog_of_loads_is_taken_once_and_bounded() -> None:
    meter = EngineMeter()
    for size in range(BACKLOG_SAMPLES + 10):
        meter.store({}, [StoreLoad("dram", size, 0.01)], [])
    taken = meter.take_loads()
    assert len(taken) == BACKLOG_SAMPLES
    assert taken[-1].bytes == BACKLOG_SAMPLES + 9, "the oldest are dropped"
    assert meter.take_loads() == []


def test_step_times_are_fitted_to_each_step() -> None:
    meter = EngineMeter()
    for _ in range(50):
        meter.step(Step(100, 0, 0, 0, 5050, 0.5))
    assert meter.step_time.samples == 50
    assert meter.step_time.seconds(100, pairs=5050) == pytest.approx(0.5, rel=0.02)


class TestContext:
    """What a step attends to, from statistics that do not say it."""

    def test_a_prompt_that_ends_in_the_step_stands_at_its_own_end(self) -> None:
        finished = Finished(prompts=1, tokens=1000, computed=100)
        _, pairs = ContextEstimate().step(100, 1, 0, 0, finished)
        assert pairs == pytest.approx(pairs_of(900, 1000), rel=0.01)

    def test_prompts_that_end_together_share_the_tokens(self) -> None:
        finished = Finished(prompts=4, tokens=400, computed=400)
        _, pairs = ContextEstimate().step(400, 4, 0, 0, finished)
        assert pairs == pytest.approx(4 * pairs_of(0, 100), rel=0.02)

    def test_a_long_prompts_steps_stand_one_behind_the_other(self) -> None:
        estimate = ContextEstimate()
        steps = [estimate.step(2048, 1, 0, 0, Finished())[1] for _ in range(2)]
        last = Finished(prompts=1, tokens=5000, computed=5000)
        steps.append(estimate.step(904, 1, 0, 0, last)[1])
        expected = [pairs_of(0, 2048), pairs_of(2048, 4096), pairs_of(4096, 5000)]
        assert steps == pytest.approx(expected, rel=0.01)
        assert estimate.step(100, 1, 0, 0, Finished())[1] == 100 * 100 / 2, "the next one is new"

    def test_rows_attend_to_what_requests_hold_beyond_prompts(self) -> None:
        estimate = ContextEstimate()
        assert estimate.step(0, 3, 3, 6000.0, Finished()) == (6000.0, 0.0)
        assert estimate.step(500, 1, 3, 6500.0, Finished())[0] == 6000.0
        assert estimate.step(0, 0, 3, 0.0, Finished())[0] == 3.0, "a row attends to itself"

    def test_without_rows_there_is_no_context(self) -> None:
        """A prefill engine holds what others have not pulled yet."""
        assert ContextEstimate().step(100, 1, 0, 9000.0, Finished())[0] == 0.0


# vLLM's side


def scheduler_stats(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "num_running_reqs": 1,
        "num_waiting_reqs": 0,
        "num_skipped_waiting_reqs": 0,
        "kv_cache_usage": 0.5,
        "iteration_details": None,
        "kv_connector_stats": None,
        "ec_connector_stats": None,
        "prefix_cache_stats": None,
        "connector_prefix_cache_stats": None,
        "spec_decoding_stats": None,
    }
    return SimpleNamespace(**{**values, **changes})


def iteration_stats(prompt: int, generated: int, first_tokens: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        prompt_token_stats=SimpleNamespace(computed=prompt, total=prompt),
        num_generation_tokens=generated,
        time_to_first_tokens_iter=[0.1] * first_tokens,
    )


@pytest.fixture
def meter() -> EngineMeter:
    return EngineMeter()


@pytest.fixture
def logger(meter: EngineMeter) -> Any:
    from headrace_engine.vllm.engine import MeterStatLogger

    cache = SimpleNamespace(num_gpu_blocks=100, block_size=16)
    config = SimpleNamespace(cache_config=cache, max_concurrent_batches=1)
    return MeterStatLogger(meter, config)  # type: ignore[arg-type]


@pytest.fixture
def steps(meter: EngineMeter) -> list[Step]:
    """The meter's steps, as they come."""
    seen: list[Step] = []
    meter.on_step.append(seen.append)
    return seen


def test_requests_that_wait_for_kv_count_as_waiting(logger: Any, meter: EngineMeter) -> None:
    logger.record(scheduler_stats(num_waiting_reqs=2, num_skipped_waiting_reqs=3), None)
    assert (meter.running, meter.waiting, meter.kv_usage) == (1, 5, 0.5)
    logger.record(None, None)
    assert meter.waiting == 5


def test_a_detailed_step_is_taken_as_measured(logger: Any, steps: list[Step]) -> None:
    details = SimpleNamespace(
        num_ctx_tokens=64,
        num_ctx_requests=1,
        num_generation_requests=3,
        num_generation_tokens=8,
        elapsed_ms=12.5,
        is_dummy=False,
        num_encoder_inputs=0,
    )
    logger.record(scheduler_stats(iteration_details=details), None)
    details.is_dummy = True
    logger.record(scheduler_stats(iteration_details=details), None)
    assert steps == [Step(64, 3, 5, 0.5 * 1600 - 64, 64 * 64 / 2, 0.0125)]


def test_a_step_with_the_encoder_of_images_teaches_no_step_time(
    logger: Any, meter: EngineMeter, steps: list[Step]
) -> None:
    details = SimpleNamespace(
        num_ctx_tokens=64,
        num_ctx_requests=1,
        num_generation_requests=0,
        num_generation_tokens=0,
        elapsed_ms=900.0,
        is_dummy=False,
        num_encoder_inputs=1,
    )
    logger.record(scheduler_stats(iteration_details=details), None)
    assert len(steps) == meter.steps_total == 1 and meter.step_time.samples == 0
    details.num_encoder_inputs = 0
    logger.record(scheduler_stats(iteration_details=details), None)
    assert meter.step_time.samples == 1


@pytest.mark.parametrize("with_details", [True, False])
def test_what_reused_kv_took_of_a_step_is_no_part_of_it(
    logger: Any, steps: list[Step], monkeypatch: pytest.MonkeyPatch, with_details: bool
) -> None:
    now = 100.0
    monkeypatch.setattr("headrace_engine.vllm.engine.time.monotonic", lambda: now)
    details = SimpleNamespace(
        num_ctx_tokens=0,
        num_ctx_requests=0,
        num_generation_requests=1,
        num_generation_tokens=1,
        elapsed_ms=520.0,
        is_dummy=False,
        num_encoder_inputs=0,
    )
    told = {"StoredBlendingConnector": {"recompute_s": 0.5}}
    given = details if with_details else None
    logger.record(scheduler_stats(), iteration_stats(10, 1, first_tokens=1))
    now += 0.52
    logger.record(
        scheduler_stats(iteration_details=given, kv_connector_stats=told),
        iteration_stats(0, 1, first_tokens=0),
    )
    assert steps[-1].seconds == pytest.approx(0.02)


def test_a_prompt_that_computes_one_token_is_a_row_of_the_step(
    logger: Any, steps: list[Step], meter: EngineMeter
) -> None:
    """It reads its KV for one token. Booked as a prompt, 2,000 tokens whose KV was pulled made the
    pairs of prompts look 20 times as dear, and a local prefill eight times."""
    details = SimpleNamespace(
        num_ctx_tokens=2,
        num_ctx_requests=2,
        num_generation_requests=3,
        num_generation_tokens=3,
        elapsed_ms=36.0,
        is_dummy=False,
        num_encoder_inputs=0,
    )
    logger.record(scheduler_stats(iteration_details=details), iteration_stats(2, 5, first_tokens=2))
    assert steps == [Step(0, 5, 0, 800.0, 0.0, 0.036)]
    assert meter.prompt_tokens_total == 2


def test_without_details_a_step_is_the_time_between_two_records(
    logger: Any, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("headrace_engine.vllm.engine.time.monotonic", lambda: now)
    logger.record(scheduler_stats(), iteration_stats(10, 1, first_tokens=1))
    assert steps == [], "nobody knows when the first step began"
    now = 100.5
    logger.record(scheduler_stats(), iteration_stats(20, 3, first_tokens=1))
    now = 101.0
    logger.record(scheduler_stats(num_running_reqs=0), iteration_stats(0, 1))
    now = 161.0
    logger.record(scheduler_stats(), iteration_stats(5, 1, first_tokens=1))
    assert [(s.prompt, s.rows, s.draft, s.seconds) for s in steps] == [
        (20, 2, 0, 0.5),
        (0, 1, 0, 0.5),
    ], "the idle minute is no step"


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
        "proofs": {},
        "proof_seconds": {},
    }


def test_statistics_without_transfers_are_none() -> None:
    from headrace_engine.vllm.engine import nixl_transfers

    assert nixl_transfers({}) == ([], 0)
    assert nixl_transfers({"num_failed_transfers": [1, 1]}) == ([], 2)


def test_a_rank_s_share_of_a_transfer_is_told_with_the_number_of_shares() -> None:
    from headrace_engine.pull_proof.stats import TransferStats
    from headrace_engine.vllm.engine import nixl_transfers

    stats = TransferStats()
    nixl = {"xferDuration": 5e5, "postDuration": 1, "totalBytes": 100, "descCount": 3}
    stats.record_transfer(SimpleNamespace(**nixl))
    stats.record_transfer(SimpleNamespace(**nixl, pieces=4))
    assert nixl_transfers(stats.data) == ([Transfer(100, 0.5), Transfer(100, 0.5, 4)], 0)


def test_a_store_beside_nixl_is_told_apart_from_it(logger: Any, meter: EngineMeter) -> None:
    loads: list[StoreLoad] = []
    meter.on_load.append(loads.append)
    nixl = {"transfer_duration": [0.1], "bytes_transferred": [100], "num_failed_transfers": []}
    store = {
        "loaded_dram": 2,
        "loads": [["dram", 4096, 0.5], ["nvme", 1024, 0.25]],
        "digest": "ab" * 16,
        "states": [0, 2],
    }
    nested = {"NixlPullConnector": nixl, "HeadraceConnector": store}
    logger.record(scheduler_stats(kv_connector_stats=nested), None)
    logger.record(scheduler_stats(kv_connector_stats=store), None)
    assert meter.transfer_bytes_total == 100
    assert loads == 2 * [StoreLoad("dram", 4096, 0.5), StoreLoad("nvme", 1024, 0.25)]
    assert meter.store_digest == b"\xab" * 16 and meter.store_states == (0, 2)
    assert meter.snapshot()["store"] == {
        "loaded_dram": 4,
        "load_bytes": 2 * 5120,
        "load_seconds": 1.5,
    }


def test_after_a_reset_of_the_engine_none_of_the_stores_blocks_are_its_own(
    logger: Any, meter: EngineMeter
) -> None:
    """Or plans would count on blocks that the engine does not find."""
    from headrace_engine.pull_proof.stats import TransferStats

    for data in ({}, TransferStats().data):
        logger.record(scheduler_stats(kv_connector_stats={"digest": "ab" * 16}), None)
        assert meter.store_digest
        logger.record(scheduler_stats(kv_connector_stats={**data, "epochs": ["aa"]}), None)
        assert meter.store_digest == b"" and meter.kv_epoch == "aa"


def test_where_steps_overlap_a_step_is_the_time_between_two_results(
    meter: EngineMeter, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core measures what it still waited for a step that ran beside the next one's launch."""
    from headrace_engine.vllm.engine import MeterStatLogger

    cache = SimpleNamespace(num_gpu_blocks=100, block_size=16)
    config: Any = SimpleNamespace(cache_config=cache, max_concurrent_batches=2)
    logger, now = MeterStatLogger(meter, config), 100.0
    monkeypatch.setattr("headrace_engine.vllm.engine.time.monotonic", lambda: now)
    details = SimpleNamespace(
        num_ctx_tokens=0,
        num_ctx_requests=0,
        num_generation_requests=4,
        num_generation_tokens=4,
        elapsed_ms=0.25,
        is_dummy=False,
        num_encoder_inputs=0,
    )
    for running, at_s in ((4, 100.0), (4, 100.5), (0, 101.25), (4, 200.0), (4, 200.5)):
        now = at_s
        logger.record(scheduler_stats(num_running_reqs=running, iteration_details=details), None)
    assert [(s.rows, s.seconds) for s in steps] == [(4, 0.5), (4, 0.75), (4, 0.5)]


def test_an_engine_without_a_request_runs_none_whatever_its_last_step_told() -> None:
    """A client that hangs up ends its request, and no step follows that would tell."""
    from headrace_engine.vllm.engine import engine_progress

    meter, config = EngineMeter(), SimpleNamespace()
    config.cache_config = SimpleNamespace(num_gpu_blocks=100, block_size=16)
    config.scheduler_config = SimpleNamespace(max_num_batched_tokens=2048)
    unfinished = {"r"}
    llm: Any = SimpleNamespace(output_processor=SimpleNamespace())
    llm.output_processor.get_num_unfinished_requests = lambda: len(unfinished)
    meter.step(Step(100, 0, 0, 0, 5000, 0.1))
    meter.load(1, 0, 0.5)
    progress = engine_progress(config, meter, llm)  # type: ignore[arg-type]
    assert progress.running == 1 and progress.longest_step_s is not None
    unfinished.clear()
    assert engine_progress(config, meter, llm).running == 0  # type: ignore[arg-type]
    assert (meter.running, meter.kv_usage) == (0, 0.5)
    unfinished.add("its first step may hang")
    progress = engine_progress(config, meter, llm)  # type: ignore[arg-type]
    assert (progress.running, progress.longest_step_s) == (1, None)

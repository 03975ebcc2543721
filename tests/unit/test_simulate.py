"""The simulator's parts: traces, blocks, step times, fits, reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace_engine.step_time import StepTime
from headrace_lab.simulate import other_routers
from headrace_lab.simulate.calibration import CalibrationError, calibrate_hardware
from headrace_lab.simulate.cluster_state import EnginePair
from headrace_lab.simulate.hardware import (
    Engine,
    Hardware,
    curve_of,
    default_steps,
    step_s,
)
from headrace_lab.simulate.html_report import chart
from headrace_lab.simulate.outcome import GoodputTargets, gap_percentile
from headrace_lab.simulate.run import SimulationError, SimulationSettings, simulate
from headrace_lab.simulate.state import ITL_BINS
from headrace_lab.simulate.trace import (
    TraceError,
    parse_trace,
    read_trace,
    scale_trace,
    with_block_size,
)

GOOD = {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 7]}


def lines(*changes: dict[str, object]) -> list[str]:
    return [json.dumps(GOOD | change) for change in changes]


# ---- traces -----------------------------------------------------------------------------------


def test_a_trace_keeps_full_blocks_in_order_of_arrival() -> None:
    trace = parse_trace(
        lines({"timestamp": 3000}, {"timestamp": 1000, "input_length": 512, "hash_ids": [5]})
    )
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert trace.prompt.tolist() == [512, 1100]
    assert np.diff(trace.starts).tolist() == [1, 2]
    assert trace.keys[0] == trace.keys[1]
    assert trace.distinct == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (json.dumps(GOOD | {"timestamp": "1"}), "timestamp"),
        (json.dumps(GOOD | {"timestamp": -1}), "timestamp"),
        (json.dumps(GOOD | {"input_length": 0}), "input_length"),
        (json.dumps(GOOD | {"input_length": True}), "input_length"),
        (json.dumps(GOOD | {"output_length": 1.5}), "output_length"),
        (json.dumps(GOOD | {"hash_ids": [1]}), "1 hash_ids for 1100 tokens"),
        (json.dumps(GOOD | {"hash_ids": ["a", "b", "c"]}), "hash_ids"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_line_that_is_wrong_is_named(line: str, why: str) -> None:
    with pytest.raises(TraceError, match="line 2") as error:
        parse_trace([json.dumps(GOOD), line])
    assert why in str(error.value)


def test_an_empty_trace_and_a_missing_file_say_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no requests"):
        parse_trace(["", "  "])
    with pytest.raises(TraceError, match="missing"):
        read_trace(tmp_path / "missing")


def test_smaller_blocks_are_shared_where_those_of_the_trace_are() -> None:
    trace = parse_trace(
        lines({}, {"timestamp": 1, "hash_ids": [5, 8, 9]}, {"timestamp": 2, "input_length": 100})
    )
    small = with_block_size(trace, 128)
    assert small.block_tokens == 128
    assert np.diff(small.starts).tolist() == [8, 8, 0]
    first, second = small.keys[:8].tolist(), small.keys[8:].tolist()
    assert first[:4] == second[:4]
    assert len(set(first) | set(second)) == 12
    tiny = with_block_size(trace, 16)
    assert np.diff(tiny.starts).tolist() == [68, 68, 6]
    assert len(set(tiny.keys.tolist())) == 68 + 36 + 6
    assert tiny.keys.max() < tiny.distinct
    assert with_block_size(trace, 512).keys.tolist() == trace.keys.tolist()
    with pytest.raises(TraceError, match="do not divide"):
        with_block_size(trace, 100)


def test_copies_share_no_block_and_come_at_the_rate_asked_for() -> None:
    trace = parse_trace(lines(*({"timestamp": 100 * n} for n in range(200))))
    work = scale_trace(trace, 3.5, 40.0, seed=1)
    assert len(work) == pytest.approx(3.5 * 200 * 40.0 / trace.seconds, rel=0.05)
    assert (np.diff(work.arrival_s) >= 0).all()
    assert work.arrival_s[-1] < 40.0
    used = {
        (int(offset), int(key) + int(offset))
        for offset, row in zip(work.offset, work.row, strict=True)
        for key in trace.keys[trace.starts[row] : trace.starts[row + 1]]
    }
    assert len({key for _, key in used}) == len(used)
    assert max(key for _, key in used) < work.keys


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1.0), (1.0, 0.0), (1e5, 1e6)])
def test_a_run_that_is_too_large_or_empty_is_refused(rate: float, seconds: float) -> None:
    with pytest.raises(TraceError):
        scale_trace(parse_trace(lines({})), rate, seconds, seed=0)


# ---- machines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [(), (8, 16, 256)])
def test_the_compiled_curve_is_the_model(padded: tuple[int, ...]) -> None:
    fit, rng = StepTime(padded), Random(1)
    for _ in range(50):
        shape = rng.randrange(3000), rng.randrange(64), 0, rng.randrange(10**5), 1e6
        fit.observe(*shape, 0.01 + 1e-5 * shape[0])
    for model in (fit, default_steps()):
        curve = curve_of(model)
        for prompt, rows in [(0, 1), (1, 0), (100, 3), (2048, 16), (40_000, 1), (0, 256)]:
            told = step_s(curve, prompt, rows, 5e4, 3e6)
            assert told == pytest.approx(model.seconds(prompt, rows, 0, 5e4, 3e6), rel=1e-9)


def test_fits_of_a_file_and_of_a_status_are_taken_over() -> None:
    fit = StepTime()
    told = {"decode": fit.to_dict(), "kv_blocks": 99, "step_tokens": 64, "kv_bytes_per_token": 7}
    found = calibrate_hardware(Hardware(), told)
    assert found.decode.steps.seconds(100, 2) == pytest.approx(fit.seconds(100, 2))
    assert (found.prefill.kv_blocks, found.decode.step_tokens) == (99, 64)
    assert found.kv_bytes_per_token == 7
    slow = default_steps()
    for _ in range(300):
        slow.observe(200, 0, 0, 0, 20_000, 3.0)
    router = {
        "fits": {"transfer": {"fixed_s": 0.01, "each_s": 1e-9}},
        "step_times": {"decode": fit.to_dict(), "prefill": slow.to_dict()},
    }
    status = {"replicas": [{"role": "prefill"}, {"router": router}, {"router": router}]}
    found = calibrate_hardware(Hardware(), status)
    assert found.prefill.steps.seconds(200, pairs=20_000) == pytest.approx(3.0, rel=0.05)
    assert found.decode.steps.seconds(100, 2) == pytest.approx(fit.seconds(100, 2))
    assert found.link_bytes_s == pytest.approx(1e9)
    assert (found.block_tokens, found.mixed_nodes, found.store_bytes) == (512, False, 0.0)


def test_sizes_and_neighbours_of_a_running_app_are_taken_over() -> None:
    router = {
        "fits": {
            "load_dram": {"fixed_s": 0.002, "each_s": 1e-9},
            "call": {"seconds": 0.01},
            "handoff": {"seconds": 0.02},
        },
        "engines": {
            "block_tokens": 128,
            "kv_bytes_per_token": 23_040,
            "prefill_blocks": 300,
            "decode_blocks": 364,
            "step_tokens": 2048,
        },
        "prefill": {"one": {"same_machine": True}},
    }
    status = {
        "replicas": [{"role": "prefill"}, {"router": router}],
        "store": [{"down": "why"}, {"tiers": {"dram": {"size_bytes": 10**9}}}],
    }
    found = calibrate_hardware(Hardware(), status)
    assert (found.block_tokens, found.kv_bytes_per_token) == (128, 23_040)
    assert (found.prefill.kv_blocks, found.decode.kv_blocks) == (300, 364)
    assert (found.decode.step_tokens, found.engines_per_node, found.mixed_nodes) == (2048, 2, True)
    assert found.handoff_s == pytest.approx(0.03)
    assert (found.store_bytes, found.store_fixed_s) == (1e9, 0.002)
    assert found.store_bytes_s == pytest.approx(1e9)


@pytest.mark.parametrize(
    "told",
    [
        [],
        {"replicas": []},
        {"replicas": 3},
        {"prefill": {}},
        {"replicas": [{"router": {"fits": {}, "step_times": {"decode": {"state": [1]}}}}]},
        {"kv_blocks": 0},
        {"kv_blocks": "many"},
        {"handoff_s": -1.0},
        {"transfer": {"fixed_s": "soon", "each_s": 0}},
    ],
)
def test_fits_that_are_wrong_are_refused(told: object) -> None:
    with pytest.raises(CalibrationError):
        calibrate_hardware(Hardware(), told)


def test_rays_rule_counts_cache_in_use_in_blocks() -> None:
    """Also that of the prompts sent since the report."""
    cluster: Any = SimpleNamespace(
        alive=np.ones(3, np.bool_),
        prefills=2,
        hardware=Hardware(),
        sent_requests=np.zeros(3, np.int64),
        report=SimpleNamespace(used=np.array([10, 0, 0])),
        since_tokens=np.array([0, 4 * Hardware().block_tokens, 0]),
    )
    request: Any = SimpleNamespace(store=np.zeros(3, np.int32), prompt=2048)
    assert other_routers.ray(cluster, request, Random(0)).prefill == 1


def test_the_fits_of_engines_of_several_models_are_not_mixed() -> None:
    fits = {"transfer": {"fixed_s": 0.001, "each_s": 1e-9}}
    replicas = [{"model": name, "router": {"fits": fits}} for name in ("a", "b", "a")]
    with pytest.raises(CalibrationError, match="the app serves a, b, whose engines differ"):
        calibrate_hardware(Hardware(), {"replicas": replicas})
    calibrate_hardware(
        Hardware(), {"replicas": [*replicas[::2], {"model": "b", "role": "prefill"}]}
    )


def test_impossible_machines_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_blocks"):
        Engine(kv_blocks=0)
    with pytest.raises(ValueError, match="step_tokens"):
        Engine(step_tokens=10, max_requests=10)
    with pytest.raises(ValueError, match="link_bytes_s"):
        replace(Hardware(), link_bytes_s=0.0)


# ---- runs -------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused_before_anything_runs() -> None:
    work = scale_trace(parse_trace(lines({})), 1.0, 10.0, seed=0)
    small = Hardware(decode=Engine(kv_blocks=2))

    def nowhere(*_: object) -> EnginePair:
        return EnginePair(None, 7)

    with pytest.raises(SimulationError, match="decode engine"):
        simulate(work, Hardware(), 1, 0, nowhere)
    with pytest.raises(SimulationError, match="1,108 tokens needs 3 KV blocks"):
        simulate(work, small, 0, 1, nowhere)
    with pytest.raises(SimulationError, match="do not exist"):
        simulate(work, Hardware(), 0, 1, nowhere)
    with pytest.raises(SimulationError, match="report_s"):
        SimulationSettings(report_s=0.0)
    with pytest.raises(ValueError, match="above 0"):
        GoodputTargets(ttft_s=0.0)


def test_blocks_of_the_trace_must_be_those_of_the_engines() -> None:
    work = scale_trace(parse_trace(lines({})), 1.0, 10.0, seed=0)
    with pytest.raises(SimulationError, match="512 tokens, of the engines 128"):
        simulate(work, Hardware(block_tokens=128), 0, 1, lambda *_: EnginePair(None, 0))


def test_the_gap_percentile_is_right_to_2_percent() -> None:
    histogram = np.zeros(ITL_BINS, np.int64)
    histogram[int(np.log(0.02 / 1e-4) / np.log(1.02))] = 98
    histogram[int(np.log(0.3 / 1e-4) / np.log(1.02))] = 2
    assert gap_percentile(histogram, 0.5) == pytest.approx(0.02, rel=0.02)
    assert gap_percentile(histogram, 0.99) == pytest.approx(0.3, rel=0.02)
    assert gap_percentile(np.zeros(ITL_BINS, np.int64), 0.99) == 0.0


def test_a_chart_draws_long_courses_in_few_points() -> None:
    x = np.arange(1.0, 10_001.0)
    drawn = chart([(x, x), (x[:3], np.zeros(3))])
    assert drawn.count("<polyline") == 2
    assert len(drawn) < 20_000

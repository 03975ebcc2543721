"""Whether the advice on roles is right: what it recommends, beside the best of all splits.

    python -m benchmarks.advice --trace FILE [--engines 8] [--json FILE]

For each load (as in `benchmarks.placement`), and for answers of the trace's length and four times
as long, every split of the engines is simulated: prefill engines as `headrace-remote` places, none
as `headrace` does. The advice (`headrace.disaggregation`) sees the traffic of the run on half of
each. Figures, where a request's seconds are from its arrival to its last token:

    LOAD.xANSWERS.cost_vs_best   mean seconds in the split advised, over those in the best split
    LOAD.xANSWERS.ttft_ratio     predicted mean TTFT over the simulated, in the split advised
    LOAD.xANSWERS.token_ratio    the same of seconds a token
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headrace.disaggregation import TrafficLoad, advise
from headrace_engine.step_time import pairs_of
from headrace_lab.simulate.best_case import capacity_rate
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.policy_catalog import find_policy
from headrace_lab.simulate.run import SimulationRun, SimulationSettings, simulate
from headrace_lab.simulate.trace import Trace, Workload, read_trace, scale_trace

SECONDS, WARM_SHARE, SEED = 300.0, 0.5, 0
LOADS = (0.3, 0.6, 0.9)
ANSWERS = (1, 4)


def play(work: Workload, hardware: Hardware, engines: int, prefills: int) -> SimulationRun:
    """One split."""
    policy = find_policy("headrace-remote" if prefills else "headrace")
    settings = SimulationSettings(seed=SEED, warm_share=WARM_SHARE)
    return simulate(work, hardware, prefills, engines - prefills, policy, settings)


def figures(work: Workload, hardware: Hardware, engines: int, prefills: int) -> dict[str, float]:
    """Return the means over the requests that came when the caches were warm."""
    run = play(work, hardware, engines, prefills)
    requests = run.state.req
    seen = requests[requests["arrival_s"] >= WARM_SHARE * work.seconds]
    until_s = float(run.state.now_s[0])
    request_s = np.minimum(seen["end_s"], until_s) - seen["arrival_s"]
    return {
        "request_s": float(request_s.mean()),
        "ttft_s": run.outcome.ttft_mean,
        "token_s": run.outcome.tpot_mean,
    }


def load_of(run: SimulationRun, work: Workload, hardware: Hardware) -> TrafficLoad:
    """Return the traffic of a run as a replica's `Outcomes` would tell it."""
    requests = run.state.req
    seen = requests[requests["arrival_s"] >= WARM_SHARE * work.seconds]
    times: dict[str, list[float]] = {"local": [], "remote": [], "move": []}
    for one in seen:
        end = int(one["prompt"])
        tokens = max(1, end - int(one["cached"]) - int(one["loaded"]))
        pairs = pairs_of(end - tokens, end)
        for name, engine in (("local", hardware.decode), ("remote", hardware.prefill)):
            seconds = engine.steps.prefill_s(tokens, pairs, step_tokens=engine.step_tokens)
            times[name].append(seconds)
        moved = end * hardware.kv_bytes_per_token / hardware.link_bytes_s
        times["move"].append(hardware.handoff_s + hardware.transfer_fixed_s + moved)
    local, remote, move = (np.array(times[name]) for name in times)
    held = hardware.decode.kv_blocks * hardware.block_tokens
    size = float(seen["prompt"].mean() + seen["output"].mean() / 2)
    return TrafficLoad(
        rate=len(seen) / ((1 - WARM_SHARE) * work.seconds),
        prompt_tokens=float(seen["prompt"].mean()),
        answer_tokens=float(seen["output"].mean()),
        local_s=float(local.mean()),
        local_square=float((local**2).mean()),
        remote_s=float(remote.mean()),
        remote_square=float((remote**2).mean()),
        move_s=float(move.mean()),
        steps=hardware.decode.steps,
        most_running=min(hardware.decode.max_requests, int(held / size)),
    )


def compare(
    trace: Trace, engines: int, rate: float, cell: tuple[float, int]
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Return every split's figures, and the advice."""
    load, answers = cell
    longer = replace(trace, output=trace.output * answers)
    work, hardware = scale_trace(longer, load * rate, SECONDS, SEED), Hardware()
    seen = load_of(play(work, hardware, engines, engines // 2), work, hardware)
    told = [figures(work, hardware, engines, p) for p in range(engines)]
    return told, advise(seen, engines // 2, engines - engines // 2).to_dict()


def _over(predicted: float | None, simulated: float) -> float:
    """Their ratio; inf where overload is predicted."""
    return math.inf if predicted is None else predicted / simulated


def main() -> None:
    """Play, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="requests as Mooncake's traces")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (all cores)")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    rate = capacity_rate(trace, Hardware(), args.engines // 2, SECONDS, WARM_SHARE)
    cells = [(load, answers) for load in LOADS for answers in ANSWERS]
    report: dict[str, Any] = {}
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        found = pool.map(partial(compare, trace, args.engines, rate), cells)
        for (load, answers), (told, advice) in zip(cells, found, strict=True):
            best = advice["best" if advice["disaggregation_pays"] else "colocated"]
            mine = told[best["prefill"]]
            least = min(one["request_s"] for one in told)
            name = f"load{load}.x{answers}"
            report |= {
                f"{name}.advised_prefill": best["prefill"],
                f"{name}.best_prefill": [one["request_s"] for one in told].index(least),
                f"{name}.cost_vs_best": mine["request_s"] / least,
                f"{name}.ttft_ratio": _over(best["ttft_s"], mine["ttft_s"]),
                f"{name}.token_ratio": _over(best["token_s"], mine["token_s"]),
                f"{name}.half_vs_best": told[args.engines // 2]["request_s"] / least,
                f"{name}.together_vs_best": told[0]["request_s"] / least,
            }
            print(name, [round(one["request_s"], 2) for one in told], file=sys.stderr, flush=True)
    for name, value in report.items():
        print(f"{name:28} {value:8.3f}" if isinstance(value, float) else f"{name:28} {value:8}")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

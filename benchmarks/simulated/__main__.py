"""Whether the simulator is right: the laptop's app and its simulation on the same requests.

    python -m benchmarks.simulated --trace FILE [--slices N] --json FILE

Starts the app as `headrace up` does on two cores (one prefill and one decode engine), plays a part
of a production trace on it, scaled down, and then has the simulator play the same requests at the
same times, with the fits that the app tells in its status (as `headrace lab simulate --calibrate`).

    simulated.ttft_mean_vs_real          mean over the slices of the ratio of mean TTFTs
    simulated.sliceN.ttft_mean_vs_real   of one slice; 1 is right
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.client import run_first
from benchmarks.serving.arms import MODEL_ID, Arm, ArmError
from benchmarks.serving.environment import environment
from benchmarks.serving.load import Sample
from benchmarks.serving.runner import say, start_all
from benchmarks.simulated import work
from headrace_lab.simulate.calibration import calibrate_hardware
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.policy_catalog import find_policy
from headrace_lab.simulate.run import SimulationRun, SimulationSettings, simulate
from headrace_lab.simulate.trace import read_trace

WARM_REQUESTS, WARM_S = 12, 20.0


def main() -> int:
    """Measure, simulate, print, write; 1 if the app did not start or a request failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated")
    parser.add_argument("--trace", type=Path, required=True, help="in Mooncake's form")
    parser.add_argument("--slices", type=int, default=3)
    parser.add_argument("--requests", type=int, default=80, help="of a slice")
    parser.add_argument("--seconds", type=float, default=100.0, help="in which they come")
    parser.add_argument("--scale", type=int, default=24, help="prompts and answers shorter by this")
    parser.add_argument("--keep", type=float, default=0.03, help="share of the conversations")
    parser.add_argument("--model", help="a model folder, a known name or a hub id")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    from headrace.model import resolve

    run_first()
    model = resolve(args.model)
    trace = read_trace(args.trace)
    cuts = [
        work.scaled(trace, args.requests, args.seconds, number, args.keep, args.scale)
        for number in range(args.slices)
    ]
    warm = work.scaled(trace, WARM_REQUESTS, WARM_S, args.slices, args.keep, args.scale)
    slices: list[dict[str, Any]] = []
    try:
        with ExitStack() as stack:
            arm = Arm("headrace", "headrace", model)
            start_all([arm], stack)
            arm.resume()
            uvloop.run(play(arm.url, warm))
            for number, one in enumerate(cuts):
                seen = uvloop.run(play(arm.url, one))
                plans = [arm.get(f"/headrace/v1/plans/cmpl-{each.request_id}-0") for each in seen]
                status = arm.get("/headrace/v1/status")
                found = compared(one, seen, plans, simulated(one, status))
                slices.append(found | {"status": status})
                say(f"slice {number + 1}: {summary(slices[-1])}")
    except ArmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    ratios = [one["ratio"] for one in slices]
    figures = {f"simulated.slice{n}.ttft_mean_vs_real": r for n, r in enumerate(ratios, 1)}
    figures["simulated.ttft_mean_vs_real"] = statistics.fmean(ratios)
    for name, value in figures.items():
        print(f"{name} {value:.3f}")
    if args.json:
        document = {"figures": figures, "slices": slices, "environment": environment(model)}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(one["errors"] for one in slices) else 0


async def play(url: str, requests: work.Requests) -> list[Sample]:
    """Ask for each completion at its time; samples in the requests' order."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        return await work.open_loop(session, MODEL_ID, requests)


def simulated(requests: work.Requests, status: Any) -> SimulationRun:
    """Return the same requests on the engines that the status describes."""
    hardware = calibrate_hardware(Hardware(), status)
    settings = SimulationSettings(warm_share=0.0)
    load = requests.workload(hardware.block_tokens)
    return simulate(load, hardware, 1, 1, find_policy("headrace"), settings)


def compared(
    requests: work.Requests, seen: list[Sample], plans: list[Any], run: SimulationRun
) -> dict[str, Any]:
    """Compare measurements with the simulation, request by request and in the mean."""
    req = run.state.req
    rows = [
        {
            "at_s": round(requests.at_s[n], 3),
            "prompt": len(requests.prompts[n]),
            "answer": requests.answers[n],
            "real_s": sample.ttft_s,
            "simulated_s": round(float(req["first_s"][n] - req["arrival_s"][n]), 4),
            "simulated_remote": bool(req["p"][n] >= 0),
            "simulated_cached": int(req["cached"][n] + req["loaded"][n]),
            "real_e2e_s": round(sample.e2e_s, 4),
            "simulated_e2e_s": round(float(req["end_s"][n] - req["arrival_s"][n]), 4),
            "plan": plans[n],
        }
        for n, sample in enumerate(seen)
    ]
    known = [row for row in rows if row["real_s"] is not None]
    real = statistics.fmean(row["real_s"] for row in known)
    told = statistics.fmean(row["simulated_s"] for row in known)
    return {
        "real_mean_s": real,
        "simulated_mean_s": told,
        "ratio": told / real,
        "real_p50_s": statistics.median(row["real_s"] for row in known),
        "simulated_p50_s": statistics.median(row["simulated_s"] for row in known),
        "errors": [sample.error for sample in seen if sample.error is not None],
        "rows": rows,
    }


def summary(one: dict[str, Any]) -> str:
    """One line."""
    return (
        f"mean TTFT {one['real_mean_s']:.3f} s measured, {one['simulated_mean_s']:.3f} s "
        f"simulated, ratio {one['ratio']:.2f}; median {one['real_p50_s']:.3f} and "
        f"{one['simulated_p50_s']:.3f} s; {len(one['errors'])} failed"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Placement of several routers: ``python -m benchmarks.placement [--trace FILE] [--json FILE]``.

Plays a production trace on simulated engines (`headrace_lab.simulate`; an 8B model on GPUs of the
H100 kind), once for each policy, load and seed, with the same requests at the same times. Every
policy has the same view: exact prefixes, reports 5 times a second, its own requests in flight.

Load 1.0 is the rate at which the prefill engines would compute all the time if each block of KV
were computed only once (`capacity_rate`).

Goodput is the share of requests with their first token within 2 s plus 0.1 ms a token of the
prompt, and at most 50 ms a token after it on average.

``ttft_p90_vs_best_peer``: ours over the best peer's of the same seed, mean over seeds; without a
size in its name, the worst of the sizes. ``goodput_vs_best_peer`` is the same for goodput; without
a size, the lowest of the sizes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace_lab.simulate import policy_catalog
from headrace_lab.simulate.best_case import capacity_rate
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.outcome import GoodputTargets, SimulationOutcome
from headrace_lab.simulate.run import SimulationSettings, simulate
from headrace_lab.simulate.trace import Trace, read_trace, scale_trace

TARGETS = GoodputTargets(ttft_s=2.0, ttft_token_s=1e-4, itl_s=0.05)
HEADRACE_POLICIES = "headrace"
FIGURES = (
    *("goodput", "ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "tpot_mean", "tpot_p99"),
    *("itl_p99", "hit_rate", "reachable", "local_share", "prefill_use", "decode_use"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of the runs: engines of each role, seconds of requests and the share of them that
    only fills caches, loads, and seeds."""

    engines: int
    seconds: float
    warm_share: float
    loads: tuple[float, ...]
    seeds: int


FULL = (
    Plan(16, 600.0, 0.5, (0.3, 0.5, 0.7, 0.9, 1.1), 5),
    Plan(256, 200.0, 0.5, (0.3, 0.7, 0.9, 1.1), 5),
)
QUICK = (Plan(16, 300.0, 0.5, (0.3, 0.7, 0.9), 2),)

SHOWN = ("goodput", "ttft_mean", "ttft_p90", "ttft_p99")

Results = dict[tuple[int, float, str], list[SimulationOutcome]]


class Cell(NamedTuple):
    """Settings of a run that are the same for all policies."""

    plan: Plan
    load: float
    rate: float
    """Requests a second at load 1."""
    seed: int


def play(
    trace: Trace, plans: tuple[Plan, ...], policies: list[str], jobs: int
) -> tuple[Results, float]:
    """Outcomes by size, load and policy, one a seed; and the seconds that it took. So many `jobs`
    play at once, each a cell."""
    hardware, begun = Hardware(), time.perf_counter()
    rates = [
        capacity_rate(trace, hardware, plan.engines, plan.seconds, plan.warm_share)
        for plan in plans
    ]
    cells = [
        Cell(plan, load, rate, seed)
        for plan, rate in zip(plans, rates, strict=True)
        for load in plan.loads
        for seed in range(plan.seeds)
    ]
    found: Results = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        outcomes = pool.map(partial(play_cell, trace, hardware, policies), cells)
        for cell, played in zip(cells, outcomes, strict=True):
            for name, told in zip(policies, played, strict=True):
                found.setdefault((cell.plan.engines, cell.load, name), []).append(told)
    return found, time.perf_counter() - begun


def play_cell(
    trace: Trace, hardware: Hardware, policies: list[str], cell: Cell
) -> list[SimulationOutcome]:
    """Return the outcome of each policy."""
    plan, load, rate, seed = cell
    work = scale_trace(trace, load * rate, plan.seconds, seed)
    settings = SimulationSettings(seed=seed, warm_share=plan.warm_share, targets=TARGETS)
    outcomes = []
    for name in policies:
        started = time.perf_counter()
        policy = policy_catalog.find_policy(name)
        told = simulate(work, hardware, plan.engines, plan.engines, policy, settings).outcome
        print(
            f"{plan.engines} load {load} seed {seed} {name:19s} "
            f"{time.perf_counter() - started:6.1f} s: goodput {told.goodput:.3f}, "
            f"TTFT {told.ttft_mean:.2f} p90 {told.ttft_p90:.2f} p99 {told.ttft_p99:.2f}, "
            f"a token {1e3 * told.tpot_mean:.0f} p99 {1e3 * told.tpot_p99:.0f} ms, "
            f"hits {told.hit_rate:.3f} of {told.reachable:.3f}, "
            f"local {told.local_share:.2f}, use {told.prefill_use:.2f} {told.decode_use:.2f}",
            file=sys.stderr,
            flush=True,
        )
        outcomes.append(told)
    return outcomes


def figures_of(results: Results) -> dict[str, float]:
    """Return the means over seeds, and ours against the best peer of each seed."""
    figures: dict[str, float] = {}
    sizes = sorted({size for size, _, _ in results})
    for (size, load, name), outcomes in results.items():
        for field in FIGURES:
            values = [getattr(outcome, field) for outcome in outcomes]
            figures[f"n{size}.load{load}.{name}.{field}"] = sum(values) / len(values)
    rules = (
        name for name in policy_catalog.names() if name not in policy_catalog.HEADRACE_POLICIES
    )
    peers = [name for name in rules if any(name == key[2] for key in results)]
    for load in sorted({load for _, load, _ in results}):
        slow, good = [], []
        for size in sizes:
            if not peers or (size, load, HEADRACE_POLICIES) not in results:
                continue
            ours = results[size, load, HEADRACE_POLICIES]
            others = [results[size, load, name] for name in peers]
            ratios = {
                "ttft_p90_vs_best_peer": [
                    one.ttft_p90 / min(other[seed].ttft_p90 for other in others)
                    for seed, one in enumerate(ours)
                ],
                "goodput_vs_best_peer": [
                    one.goodput / max(max(other[seed].goodput for other in others), 1e-9)
                    for seed, one in enumerate(ours)
                ],
            }
            for name, values in ratios.items():
                figures[f"n{size}.load{load}.{name}"] = sum(values) / len(values)
                figures[f"n{size}.load{load}.{name}.spread"] = max(values) - min(values)
            slow.append(figures[f"n{size}.load{load}.ttft_p90_vs_best_peer"])
            good.append(figures[f"n{size}.load{load}.goodput_vs_best_peer"])
        if slow:
            figures[f"load{load}.ttft_p90_vs_best_peer"] = max(slow)
            figures[f"load{load}.goodput_vs_best_peer"] = min(good)
    return figures


def table(figures: dict[str, float], size: int, loads: list[float], policies: list[str]) -> str:
    """Return Markdown: goodput, and mean, p90 and p99 TTFT in seconds."""
    lines = [
        "| policy | " + " | ".join(f"load {load}" for load in loads) + " |",
        "|---|" + "---|" * len(loads),
    ]
    for name in policies:
        cells = []
        for load in loads:
            at = f"n{size}.load{load}.{name}"
            goodput, *ttft = (figures[f"{at}.{field}"] for field in SHOWN)
            cells.append(f"{100 * goodput:.1f} %; " + ", ".join(f"{s:.2f}" for s in ttft))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    every = list(policy_catalog.names())
    parser = argparse.ArgumentParser(description="Which router places best, simulated.")
    parser.add_argument(
        "--trace", type=Path, default=Path("../shared/traces/mooncake_conversation.jsonl")
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="16 + 16 engines, 2 seeds, 3 loads")
    parser.add_argument("--policies", nargs="+", choices=every, default=every)
    parser.add_argument("--engines", type=int, nargs="+", help="only these sizes")
    parser.add_argument("--loads", type=float, nargs="+", help="instead of the loads given")
    parser.add_argument("--seeds", type=int, help="instead of the number of seeds given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (all cores)")
    args = parser.parse_args()
    plans: tuple[Plan, ...] = QUICK if args.quick else FULL
    if args.engines:
        plans = tuple(plan for plan in plans if plan.engines in args.engines)
    if args.loads:
        plans = tuple(replace(plan, loads=tuple(args.loads)) for plan in plans)
    if args.seeds:
        plans = tuple(replace(plan, seeds=args.seeds) for plan in plans)
    results, seconds = play(read_trace(args.trace), plans, args.policies, args.jobs)
    figures = figures_of(results)
    figures["seconds"] = seconds
    for plan in plans:
        print(f"\n{plan.engines} + {plan.engines} engines\n")
        print(table(figures, plan.engines, list(plan.loads), args.policies))
    print()
    for name, value in figures.items():
        if name.startswith("load"):
            print(f"{name} {value:.3f}")
    if args.json:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()

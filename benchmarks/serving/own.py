"""Time that our own code adds to each request: the gateway before it forwards, and planning.

    python -m benchmarks.serving.own [--quick] --json FILE

Headrace runs with the laptop preset under the `short` workload, at 1 client and at 8. The times are
read from its own metrics, `headrace_gateway_overhead_seconds` and `headrace_planning_seconds`. They
are wall-clock times in the serving processes, so at 8 clients they include waits for a busy core.
The sum of the two medians is the figure `own.added_ms_p50`. It does not include engine, network and
Ray, nor the relaying of each chunk, which `python -m benchmarks.gateway` measures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from pathlib import Path

import uvloop

from benchmarks.serving import load, report, workloads
from benchmarks.serving.arms import MODEL_ID, Arm
from benchmarks.serving.environment import environment
from benchmarks.serving.prometheus import Histogram, histogram
from benchmarks.serving.runner import say

METRICS = {
    "gateway": "ray_headrace_gateway_overhead_seconds",
    "plan": "ray_headrace_planning_seconds",
}
EXPORT_TIMEOUT_S = 60.0  # Ray's processes report their metrics every 10 s


def read(arm: Arm) -> dict[str, Histogram]:
    """Both histograms as they stand."""
    with urllib.request.urlopen(arm.url + "/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {part: histogram(text, name) for part, name in METRICS.items()}


def settled(arm: Arm, before: dict[str, Histogram], requests: int) -> dict[str, Histogram]:
    """Return the observations since `before`, once they count `requests` requests.

    Raises:
        TimeoutError: they did not within `EXPORT_TIMEOUT_S`.
    """
    deadline = time.monotonic() + EXPORT_TIMEOUT_S
    while True:
        now = {part: known.since(before[part]) for part, known in read(arm).items()}
        counts = {part: known.count for part, known in now.items()}
        if min(counts.values()) >= requests:
            return now
        if time.monotonic() > deadline:
            raise TimeoutError(f"{requests} requests were sent, /metrics counts {counts}")
        time.sleep(2.0)


def measure(arm: Arm, clients: int, requests: int) -> tuple[dict[str, float], list[str]]:
    """Return the milliseconds by part at so many clients, and the errors."""
    cell = workloads.Cell(workloads.WORKLOADS["short"], clients, requests, clients)
    warm = workloads.conversations(cell, clients, seed=0, scope="own/warm-up")
    uvloop.run(load.run(arm.url, MODEL_ID, warm, clients, output_tokens=4))
    time.sleep(12.0)  # until the warm-up has been reported
    before = read(arm)
    talks = workloads.conversations(cell, requests, seed=0, scope="own")
    seen = uvloop.run(load.run(arm.url, MODEL_ID, talks, clients, output_tokens=4))
    parts = settled(arm, before, requests)
    out = {"added_ms_p50": 0.0, "added_ms_mean": 0.0}
    for part, known in parts.items():
        out[f"{part}_ms_p50"] = 1e3 * known.quantile(0.5)
        out[f"{part}_ms_p99"] = 1e3 * known.quantile(0.99)
        out["added_ms_p50"] += 1e3 * known.quantile(0.5)
        out["added_ms_mean"] += 1e3 * known.mean
    return out, [s.error for s in seen.samples if s.error is not None]


def main() -> int:
    """Run, print, write; 1 if a request failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.own")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--model", help="a model folder, a known name or a hub id")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="fill its own markers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    from headrace.model import resolve

    model = resolve(args.model)
    figures: dict[str, float] = {}
    errors: list[str] = []
    arm = Arm("headrace", "headrace", model)
    try:
        say("starting headrace")
        arm.start()
        arm.wait()
        for clients, requests in ((1, 30 if args.quick else 100), (8, 80 if args.quick else 240)):
            parts, failed = measure(arm, clients, requests)
            errors += failed
            figures |= {f"own.c{clients}.{name}": value for name, value in parts.items()}
            say(f"{clients} clients: {parts['added_ms_p50']:.3f} ms added at p50")
    finally:
        arm.stop()
    # The figure is that of one client, since the machine's load is not a cost of our own code.
    figures["own.added_ms_p50"] = figures["own.c1.added_ms_p50"]
    figures = {name: round(value, 4) for name, value in figures.items()}
    about = environment(model)
    lines = [f"{about['date']}, {about['cpu']}, {about['cores']} cores.", ""]
    lines += ["| figure | value |", "|---|---:|"]
    lines += [f"| `{name}` | {value:.3f} |" for name, value in figures.items()]
    page = "\n".join(lines) + "\n"
    print(f"\n{page}")
    if args.markdown:
        report.write_markdown(args.markdown, {"own": page})
    if args.json:
        args.json.write_text(
            json.dumps({"figures": figures, "environment": about}, indent=1) + "\n"
        )
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

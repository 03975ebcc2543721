"""Headrace's three token paths side by side: relay, direct (HAProxy) and classic (actor calls).

    python -m benchmarks.serving.paths [--quick] [--parts paced,engine] --json FILE

`engine`: whole Headrace apps with real engines, all prefill local so that the path alone differs;
TTFT at 1 client, tokens/s at 64. `paced`: relay and direct before a replica that streams a token
each 20 ms and computes nothing, at 1 and 64 clients; only there can two milliseconds be told apart,
as a step of a CPU engine takes a hundred.

Figures, with PART `engine` or `paced`: `paths.PART.cC.ttft_ms_PATH_minus_direct` (the medians'
difference, repeat by repeat) and `paths.PART.cC.tok_s_PATH_vs_direct`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.client import run_first
from benchmarks.serving import load, report, workloads
from benchmarks.serving.arms import MODEL_ID, Arm, ArmError, CpuClock
from benchmarks.serving.environment import environment
from benchmarks.serving.report import Repeat, summarise
from benchmarks.serving.runner import say
from benchmarks.serving.workloads import WORKLOADS, Cell

BASE = "direct"
STREAMS = 64
TINY = replace(WORKLOADS["short"], name="tiny", user_words=4)


@dataclass(frozen=True)
class Shape:
    """Load of one repeat on each path."""

    clients: int
    requests: int
    tokens: int


# One client's answers are short, as its TTFT is what counts.
SHAPES = {
    "engine": (Shape(1, 25, 2), Shape(STREAMS, 2 * STREAMS, 32)),
    "paced": (Shape(1, 150, 2), Shape(STREAMS, 8 * STREAMS, 50)),
}
PATHS = {"engine": ("direct", "relay", "classic"), "paced": ("direct", "relay")}


def figures(repeats: Sequence[Repeat]) -> dict[str, float]:
    """The figures, from repeats whose workload is the part's name and whose arm the path's."""
    by_key = {(r.cell, r.arm, r.number): r.measures for r in repeats}
    out: dict[str, float] = {}
    for cell, path in dict.fromkeys((r.cell, r.arm) for r in repeats):
        pairs = [
            (measures, by_key[cell, BASE, number])
            for (c, arm, number), measures in by_key.items()
            if (c, arm) == (cell, path) and (cell, BASE, number) in by_key
        ]
        if path == BASE or not pairs:
            continue
        more_ms = [1e3 * (ours["ttft_p50_s"] - base["ttft_p50_s"]) for ours, base in pairs]
        rates = [ours["tok_s"] / base["tok_s"] for ours, base in pairs]
        out[f"paths.{cell}.ttft_ms_{path}_minus_{BASE}"] = round(statistics.median(more_ms), 3)
        out[f"paths.{cell}.tok_s_{path}_vs_{BASE}"] = round(statistics.median(rates), 4)
    return out


def table(repeats: Sequence[Repeat], env: Mapping[str, Any]) -> str:
    """Return the medians by part, clients and path, and the figures."""
    lines = [f"{env['date']}, {env['cpu']}, {env['cores']} cores.", ""]
    lines += ["| part | clients | path | TTFT p50 ms | tokens/s |", "|---|---:|---|---:|---:|"]
    for row in report.cells(repeats):
        ttft, rate = row["ttft_p50_s"], row["tok_s"]
        lines.append(
            f"| {row['workload']} | {row['concurrency']} | {row['arm']} "
            f"| {1e3 * ttft['median']:.1f} ({1e3 * ttft['min']:.1f} to {1e3 * ttft['max']:.1f}) "
            f"| {rate['median']:.1f} ({rate['min']:.1f} to {rate['max']:.1f}) |"
        )
    lines += ["", "| figure | value |", "|---|---:|"]
    lines += [f"| `{name}` | {value:g} |" for name, value in figures(repeats).items()]
    return "\n".join(lines) + "\n"


def measure(
    part: str, model: str, paths: Sequence[str], repeats: int, first: int = 0
) -> list[Repeat]:
    """All repeats of a part, its paths up together and asked in rotation; numbered from `first`."""
    kind = {"engine": "headrace", "paced": "paced"}[part]
    done: list[Repeat] = []
    with ExitStack() as stack:
        arms = {path: Arm(f"{part}-{path}", kind, model, path, policy="local") for path in paths}
        for arm in arms.values():
            say(f"starting {arm.name}")
            stack.callback(arm.stop)
            arm.start()
            arm.wait()
            arm.pause()
        for number in range(-1, repeats):  # the first round warms up and is not kept
            for shape in SHAPES[part]:
                for path in workloads.rotated(paths, max(0, number)):
                    repeat = _once(part, path, arms, shape, first + number)
                    if number >= 0:
                        done.append(repeat)
        say(f"stopping {part}")
    return done


def _once(part: str, path: str, arms: dict[str, Arm], shape: Shape, number: int) -> Repeat:
    cell = Cell(TINY, shape.clients, shape.requests, 0)
    scope = f"{part}/{path}/{number}"
    talks = workloads.conversations(cell, shape.requests, seed=0, scope=scope)
    prime = workloads.conversations(workloads.PRIMER, 1, seed=0, scope=f"{scope}/{shape}/prime")
    arm = arms[path]
    arm.resume()
    uvloop.run(load.run(arm.url, MODEL_ID, prime, 1, output_tokens=4))
    clock = CpuClock(arms.values())
    seen = uvloop.run(
        load.run(
            arm.url,
            MODEL_ID,
            talks,
            shape.clients,
            output_tokens=shape.tokens,
            ramp_s=0.5 if part == "paced" else 0.0,
        )
    )
    cores = clock.cores()
    arm.pause()
    errors = [s.error for s in seen.samples if s.error is not None]
    measures = summarise(seen)
    say(
        f"{part} c{shape.clients:<3} {path:8} TTFT p50 {1e3 * measures['ttft_p50_s']:8.2f} ms, "
        f"{measures['tok_s']:7.1f} tok/s"
        + (f", {len(errors)} FAILED: {errors[0]}" if errors else "")
    )
    return Repeat(
        workload=part,
        concurrency=shape.clients,
        arm=path,
        number=number,
        measures=measures,
        requests=len(seen.samples),
        errors=errors,
        cores={k: round(v, 3) for k, v in cores.items()},
    )


def main() -> int:
    """Run, print, write; 1 if a request failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.paths")
    parser.add_argument("--quick", action="store_true", help="2 repeats of each instead of 5")
    parser.add_argument("--parts", default="paced,engine", metavar="P,P")
    parser.add_argument("--paths", metavar="P,P", help="of the engine part; direct is always in it")
    parser.add_argument("--model", help="a model folder, a known name or a hub id")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="fill its paths markers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and repeats here")
    args = parser.parse_args()
    from headrace.model import resolve

    run_first()
    model = resolve(args.model)
    began, repeats = time.monotonic(), 2 if args.quick else 5
    done: list[Repeat] = []
    failure: str | None = None
    try:
        for part in args.parts.split(","):
            chosen = PATHS[part]
            if args.paths and part == "engine":
                chosen = tuple(p for p in chosen if p == BASE or p in args.paths.split(","))
            # Two whole apps at a time: four engines are what 24 GB hold.
            for number, path in enumerate(p for p in chosen if p != BASE):
                done += measure(part, model, (BASE, path), repeats, number * repeats)
    except (ArmError, KeyboardInterrupt) as error:
        failure = str(error) or "stopped before the end"
        print(f"error: {failure}", file=sys.stderr)
    about = environment(model) | {"minutes": round((time.monotonic() - began) / 60, 1)}
    page = table(done, about)
    print(f"\n{page}")
    if args.markdown and done:
        report.write_markdown(args.markdown, {"paths": page})
    if args.json:
        document = {
            "figures": figures(done),
            "repeats": [asdict(r) for r in done],
            "environment": about,
            "failure": failure,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failure or any(r.errors for r in done) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The same load on plain vLLM engines, on Ray's own P/D app and on Headrace, in one run.

    python -m benchmarks.serving [--quick] --json FILE [--markdown FILE] [--plot FILE]

docs/benchmarks.md says what is measured and how to read it. Ends with 1 if a request failed.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from benchmarks.client import run_first
from benchmarks.serving import report, workloads
from benchmarks.serving.arms import Arm, ArmError
from benchmarks.serving.environment import environment
from benchmarks.serving.runner import Run, say

PLAIN_ENGINES = {"vllm": 1, "vllm_x2": 2}
"""Engines of the arms without Ray; an arm with Ray has a prefill engine and its decode engines."""
ENGINE_GB, NODE_GB = 3.4, 1.0  # with its replica, measured with SmolLM2-135M and 1 GiB of KV
QUICK_MIN, FULL_MIN = 11.0, 38.0
QUICK_REPEATS, FULL_REPEATS = 3, 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the files; the exit status."""
    args = _arguments(argv)
    from headrace.model import resolve

    run_first()
    model = resolve(args.model)
    began = time.monotonic()
    run = Run(
        cells=workloads.cells(args.workloads, args.concurrency, quick=args.quick),
        repeats=args.repeats or (QUICK_REPEATS if args.quick else FULL_REPEATS),
        exact=args.repeats is not None,
        deadline=began + 60 * (args.minutes or (QUICK_MIN if args.quick else FULL_MIN)) - 30.0,
        seed=args.seed,
        explain=args.plans,
    )
    about = environment(model)
    together = not args.one_at_a_time and _room_for(args.arms, args.decode)
    order = "arms up together and interleaved" if together else "one arm up at a time, in rotation"
    say(f"{len(run.cells)} cells, {order}")
    signal.signal(signal.SIGTERM, _stop)
    failure: str | None = None
    try:
        makers = [partial(Arm, name, name, model, decodes=args.decode) for name in args.arms]
        if together:
            run.together([make() for make in makers])
        else:
            run.one_at_a_time(makers)
    except ArmError as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure = "stopped before the end"
    about |= {
        "decodes": args.decode,
        "order": order,
        "idle_cores": run.idle_cores,
        "rss_gb": run.rss_gb,
    }
    about["minutes"] = round((time.monotonic() - began) / 60, 1)
    document = {
        "figures": report.figures(run.done),
        "ratios": report.ratios(run.done),
        "cells": report.cells(run.done),
        "environment": about,
        "failure": failure,
    }
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr)
    _write(document, args)
    errors = sum(len(repeat.errors) for repeat in run.done)
    return 1 if failure is not None or errors or not run.done else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=(__doc__ or "").splitlines()[0]
    )
    listed = partial(_listed, str)
    parser.add_argument("--quick", action="store_true", help="fewer requests, under 12 minutes")
    parser.add_argument(
        "--arms", type=partial(listed, workloads.ARMS), default=list(workloads.ARMS), metavar="A,B"
    )
    parser.add_argument(
        "--workloads",
        type=partial(listed, tuple(workloads.WORKLOADS)),
        default=list(workloads.WORKLOADS),
        metavar="W,W",
    )
    parser.add_argument(
        "--concurrency", type=partial(_listed, int, None), default=[1, 8], metavar="C,C"
    )
    parser.add_argument(
        "--decode",
        type=int,
        choices=range(1, 5),
        default=1,
        metavar="N",
        help="decode engines of Ray's app (with its prefix-aware router if N > 1) and of Headrace",
    )
    parser.add_argument("--repeats", type=int, help="exactly so many, however long that lasts")
    parser.add_argument("--minutes", type=float, help="time to aim at, instead of the form's own")
    parser.add_argument("--model", help="a model folder, a known name or a hub id")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="never two arms at once (the default where memory does not hold them)",
    )
    parser.add_argument(
        "--plans", action="store_true", help="keep the plan of each of Headrace's requests"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures, cells, environment")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="a new file, or one with markers to fill; may be given again",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG")
    return parser.parse_args(argv)


def _listed(kind: type, allowed: Sequence[str] | None, text: str) -> list[Any]:
    try:
        values = [kind(part.strip()) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None
    for value in values:
        if allowed is not None and value not in allowed:
            raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(allowed)}")
        if kind is int and value < 1:
            raise argparse.ArgumentTypeError(f"{value} is not a number of clients")
    return values


def _room_for(arms: Sequence[str], decodes: int) -> bool:
    """Return whether memory holds all arms at once, with a tenth of it left."""
    engines = sum(PLAIN_ENGINES.get(arm, 1 + decodes) for arm in arms)
    nodes = sum(arm not in PLAIN_ENGINES for arm in arms)
    needed = ENGINE_GB * engines + NODE_GB * nodes
    memory = psutil.virtual_memory()
    return needed * 1e9 < memory.available - 0.1 * memory.total


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _write(document: dict[str, Any], args: argparse.Namespace) -> None:
    table = report.markdown(document)
    print(f"\n{table}")
    if args.json:
        args.json.write_text(json.dumps(_no_nan(document), indent=1) + "\n")
    if not document["cells"]:
        return  # keep an earlier run's table instead of writing an empty one
    for page in args.markdown:
        try:
            name = "serving-decodes" if args.decode > 1 else "serving"
            report.write_markdown(page, {name: table})
        except ValueError as error:
            print(f"error: {page} is left as it was: {error}", file=sys.stderr)
    if args.plot:
        report.plot(document, args.plot)


def _no_nan(value: Any) -> Any:
    """NaN is no JSON: null stands for what could not be measured."""
    if isinstance(value, dict):
        return {k: _no_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_no_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    sys.exit(main())

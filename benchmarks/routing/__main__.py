"""Cost of a routing decision, on one core.

    python -m benchmarks.routing [--parts known plans] [--json FILE]

Parts, each described in its module:
    known: the index of which engine holds which blocks: learning from events, memory, look-ups
    plans: placing a prompt

If Dynamo is installed (``DYNAMO_TARGET=DIR`` or on the path), it gets the same calls.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = [
    part
    for part in ("known", "plans")
    if importlib.util.find_spec(f"benchmarks.routing.{part}") is not None
]
TARGETS = {
    "events.per_s": (">=", 500_000),
    "index.bytes_per_entry": ("<=", 64),
    "match_vs_dynamo": ("<=", 1.0),
    "plan.p50_us": ("<=", 300),
    "plan.p99_us": ("<=", 1000),
    "plan_vs_dynamo": ("<=", 0.5),
}


def flat(report: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return the figures by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in report.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name}.")
        else:
            found[before + name] = value
    return found


def table(report: dict[str, Any]) -> str:
    """Return a line for each figure, with what is asked of it."""
    lines = []
    for name, value in flat(report).items():
        asked = ""
        if name in TARGETS:
            sign, target = TARGETS[name]
            kept = value >= target if sign == ">=" else value <= target
            asked = f"{sign} {target:g}" + ("" if kept else " missed")
        shown = f"{value:14,.3f}" if isinstance(value, float) else f"{value:>14}"
        lines.append(f"{name:34} {shown}  {asked}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the file; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args(argv)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    report: dict[str, Any] = {}
    try:
        for part in args.parts:
            importlib.import_module(f"benchmarks.routing.{part}").measure(report)
    finally:
        os.sched_setaffinity(0, cores)
    print(table(report))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Effect of admission at loads below and above the engines' capacity, in the simulator.

    python -m benchmarks.admission --trace FILE --json FILE

`--trace` is a file in Mooncake's form. There are 8 prefill and 8 decode engines. A request is good
if it has its first token within 4 s and then a token each 50 ms on average. Load 1.0 is defined as
in `headrace lab simulate`.

    load_L.goodput_with, _without        good requests a second
    load_L.goodput_with_vs_peak          over the maximum at any load up to this one
    load_L.refused_share, expired_share  refused at once; given up after they had waited
    load_L.late_share                    admitted, first token after 1.1 times the target
    share.NAME.heavy_vs_light            engine seconds of a tenant that sends 10 times as much
    cost.*_us                            microseconds a request costs the gateway
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.admission import cost
from benchmarks.admission.sweep import LOADS, Sweep
from headrace_lab.simulate.trace import read_trace

PARTS = ["loads", "share", "ablations", "cost"]


def flat(report: dict[str, Any], before: str = "") -> dict[str, float]:
    """Return the figures by their dotted names."""
    found: dict[str, float] = {}
    for name, value in report.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name}.")
        else:
            found[before + name] = value
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.admission", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--trace", type=Path, required=True, help="in Mooncake's form")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", "invalid value", RuntimeWarning)  # requests without an end
    report: dict[str, Any] = {}
    if set(args.parts) - {"cost"}:
        sweep = Sweep(read_trace(args.trace), args.seeds)
        if "loads" in args.parts:
            sweep.loads(tuple(args.loads), report)
        if "share" in args.parts:
            sweep.shares(report.setdefault("share", {}))
        if "ablations" in args.parts:
            sweep.ablations(report.setdefault("without", {}))
    if "cost" in args.parts:
        cost.measure(report.setdefault("cost", {}))
    for name, value in flat(report).items():
        print(f"{name:48} {value:12,.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

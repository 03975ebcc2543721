"""What the order of waiting prompts gives: simulated engines, a production trace, loads about what
the engines can take.

    python -m benchmarks.prefill_admission.order [--trace FILE] [--json FILE]

Two prefill and two decode engines of an 8B model on the simulator's H100, placed by Headrace.
Arms: `arrival`, prompts are computed as they come, as vLLM does; `due`, in the order of
`headrace_engine.prefill_admission`. Figures, RATE being the trace's request rate times so many:

    RATE.ARM.good           share of the requests with TTFT <= 2 s and 50 ms a token
    RATE.ARM.ttft_mean      seconds; likewise p50, p90 and p99
    RATE.good_vs_arrival    `due` over `arrival`; likewise for ttft_mean and ttft_p99
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.figures import report
from benchmarks.serving.environment import machine
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.headrace_policy import HeadracePolicy
from headrace_lab.simulate.run import simulate
from headrace_lab.simulate.trace import Trace, read_trace, scale_trace

RATES = (0.6, 1.0, 1.3, 1.6)
SECONDS = 600.0
FIGURES = ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99")


def measure(trace: Trace, rate: float) -> dict[str, float]:
    """Return the figures at one rate."""
    figures, work = {}, scale_trace(trace, rate, SECONDS, 1)
    for arm in ("arrival", "due"):
        plain, admits = Hardware(), arm == "due"
        hardware = replace(
            plain,
            prefill=replace(plain.prefill, has_prefill_admission=admits),
            decode=replace(plain.decode, has_prefill_admission=admits),
        )
        outcome = simulate(work, hardware, 2, 2, HeadracePolicy()).outcome
        figures[f"{arm}.good"] = outcome.goodput
        figures |= {f"{arm}.{name}": float(getattr(outcome, name)) for name in FIGURES}
    for name in ("good", "ttft_mean", "ttft_p99"):
        figures[f"{name}_vs_arrival"] = figures[f"due.{name}"] / figures[f"arrival.{name}"]
    return {f"{rate:g}.{name}": value for name, value in figures.items()}


def main() -> None:
    """Run, print a table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill_admission.order")
    parser.add_argument(
        "--trace", type=Path, default=Path("../shared/traces/mooncake_conversation.jsonl")
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    trace, figures = read_trace(args.trace), dict[str, float]()
    for rate in RATES:
        figures |= measure(trace, rate)
    report(figures, {}, machine(), args.json)


if __name__ == "__main__":
    main()

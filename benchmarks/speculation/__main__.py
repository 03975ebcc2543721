"""Gain and cost of drafting: ``python -m benchmarks.speculation --json FILE``.

Real engines (SmolLM2-135M, one thread each, a process each) decode a draftable and an undraftable
workload at several concurrencies. All arms take turns, those of one engine by switching the
planner's mode, those of other engines by waiting in their processes, so that a slower minute
affects all of them. All arms get the same requests in the same order, none twice, and draft from
their own answers, never from another arm's. Steps that compute prompts do not count.

- ``plain``: vLLM without a speculative configuration. ``ngram``, ``suffix``: vLLM with its own
  proposers, the second with Arctic Inference's cache.
- one engine with our proposer: ``off`` (never drafts), ``auto`` (the planner), ``staticK``
  (always as many draft tokens as there are, up to K a row).

``W.cC.tok_s_vs_none`` compares ``auto`` with ``plain``, ``..._none_same_engine`` with ``off``: a
custom proposer forces synchronous scheduling, which the first contains and the second does not.
``..._best_static_k`` is the best of all static arms and ``off``, chosen afterwards.

``W_noisy.cC.*`` are the arms ``plain``, ``off`` and ``auto`` beside two busy processes of lowest
priority on the same cores (``neighbours``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.kvstore.child import Child
from benchmarks.serving.environment import environment
from benchmarks.speculation.arms import ENGINES, MODEL, arms_of, engines
from benchmarks.speculation.neighbours import neighbours
from benchmarks.speculation.report import NOISY, figures, table

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
WORKLOADS = ("draftable", "undraftable")
NEIGHBOURS = 2
WARM_UP_STEPS, STEADY_STEPS, STEPS_MAX = 8, 40, 400
"""Steps that warm up, and maximum steps of a turn: if each step yields about the same number of
tokens, and if the number varies with the text."""
UNDRAFTABLE_TOKENS = 240
"""Minimum number of tokens of a turn if no draft is accepted: 40 steps of a single request would
not represent the others."""


def cell(
    nodes: Mapping[str, Child], workload: str, concurrency: int, rounds: int, *, noisy: bool
) -> dict[str, list[dict[str, float]]]:
    """Run the turns of every arm in one cell, after a round that does not count."""
    turns = [
        (node, arm, mode)
        for name, node in nodes.items()
        for arm, mode in arms_of(name, workload, concurrency).items()
        if not noisy or arm in ("plain", "off", "auto")
    ]
    requests = requests_of(concurrency)
    taken: dict[str, list[dict[str, float]]] = {arm: [] for _, arm, _ in turns}
    for number in range(-1, rounds):
        first = number % len(turns)
        for node, arm, mode in turns[first:] + turns[:first]:
            if mode is not None:
                node.do("mode", mode=mode)
            most = WARM_UP_STEPS if number < 0 else steps_of(arm, workload, concurrency)
            measured = node.do(
                "turn",
                arm=arm,
                workload=workload,
                concurrency=concurrency,
                requests=requests if number >= 0 else concurrency,
                first=max(number, 0) * requests,
                steps_max=most,
            )
            if number >= 0:
                taken[arm].append(measured)
    return taken


def steps_of(arm: str, workload: str, concurrency: int) -> int:
    """Return the maximum number of steps of a turn."""
    if workload == "undraftable":
        return max(STEADY_STEPS, UNDRAFTABLE_TOKENS // concurrency)
    return STEADY_STEPS if arm in ("plain", "off") else STEPS_MAX


def requests_of(concurrency: int) -> int:
    """Return the number of requests of a turn: enough to include all kinds, and to continue when
    the first ones end."""
    return max(6, 2 * concurrency if concurrency <= 16 else concurrency * 3 // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="What drafting brings, and whether it costs.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--merge", action="store_true", help="keep what FILE holds of other cells")
    parser.add_argument("--quick", action="store_true", help="1, 8 and 64 at once, one round")
    parser.add_argument("--concurrency", type=_numbers, help="instead of 1,2,4,8,16,32,64")
    parser.add_argument("--workloads", type=_words, default=list(WORKLOADS))
    parser.add_argument(
        "--noise",
        choices=("both", "quiet", "noisy"),
        default="both",
        help="cells without neighbours, with them, or both",
    )
    parser.add_argument("--engines", type=_words, default=list(ENGINES))
    parser.add_argument("--rounds", type=int, help="turns of each arm")
    parser.add_argument("--dtype", default="float32", help="of the engines")
    args = parser.parse_args()
    concurrencies = args.concurrency or ((1, 8, 64) if args.quick else CONCURRENCIES)
    rounds = args.rounds or (1 if args.quick else 2)
    start = time.perf_counter()
    document: dict[str, Any] = {"figures": {}, "turns": {}, "reports": {}}
    if args.merge and args.json is not None and args.json.exists():
        document = json.loads(args.json.read_text())
    document["environment"] = environment(MODEL)
    with engines(args.engines, args.dtype) as nodes:
        print(f"engines ready after {time.perf_counter() - start:.0f} s", flush=True)
        kinds = {"both": (False, True), "quiet": (False,), "noisy": (True,)}[args.noise]
        for noisy, workload in itertools.product(kinds, args.workloads):
            for concurrency in concurrencies:
                with neighbours(NEIGHBOURS * noisy):
                    taken = cell(nodes, workload, concurrency, rounds, noisy=noisy)
                told = workload + NOISY * noisy
                name = f"{told}.c{concurrency}"
                document["turns"][name] = taken
                document["figures"] |= figures(told, concurrency, taken)
                if "headrace" in nodes:
                    document["reports"][name] = nodes["headrace"].do("mode", mode="auto")
                if args.json is not None:
                    args.json.write_text(json.dumps(document, indent=2) + "\n")
                print(f"{name} after {time.perf_counter() - start:.0f} s", flush=True)
    print(f"\n{table(document['figures'])}")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()

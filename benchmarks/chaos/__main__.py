"""Effects on clients when processes are killed and stopped under steady streams.

    python -m benchmarks.chaos [--rounds 3] [--json FILE]
    python -m benchmarks.chaos --cluster
    python -m benchmarks.chaos --products --rounds 20 [--json FILE]

Starts the laptop's app, or a cluster of two gateways, two prefill and three decode replicas of a
tiny model, and streams greedy answers without pause, by clients that resume their streams. Every
fault of `faults` happens `--rounds` times, in an order drawn by `--seed`. The next fault happens
when all processes run again. Each answer is compared with that of the undisturbed app.

    lost                        answers that ended with an error, or not at all
    wrong_or_repeated_tokens    answers whose tokens are not those of the undisturbed app
    hung                        of the lost ones: those that took longer than four minutes
    replay.streams              streams that were cut and resumed
    replay.gap_ms_p50, _max     the longest silence that the client of such a stream saw
    FAULT.gap_ms_p50, _max      the same by fault; for faults that cut no stream, over all streams
                                during the fault
    throughput_vs_before        events a second over ten seconds, 30 s after all processes run
                                again, over those before the fault; the median over the first three
                                rounds. Later rounds do not wait for it

With --products each round breaks several things at once (`products`): the engine of a decode
replica is killed or stopped, or the replica is drained past its grace; KV comes late, pulls fail,
or the prefill replicas are dead; some clients do not read, and some leave. --rounds counts all
rounds, and --faults chooses among killed, hung, drained and kv_late, pull_failed, prefill_dead.
Further figures:

    answers                     by kind of client
    left                        answers whose clients left on purpose; their tokens count
    held                        requests that gateways or engines still have 10 s after the last
    streams_cut, pulls_hit      streams and pulls that the faults hit; a round without any proves
                                nothing
    round_s_p50                 seconds from the fault until all replicas run again

The figures are written after every fault, so a run that is interrupted keeps its figures.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos.apps import App, cluster, laptop, products
from benchmarks.chaos.faults import BY_REPLICA, FAULTS, OF_CLUSTERS
from benchmarks.chaos.kv_faults import KV_FAULTS
from benchmarks.chaos.products import LOST, run_products
from benchmarks.chaos.streams import Load, Seen, ask, tokens_per_s
from benchmarks.client import run_first
from benchmarks.serving.environment import machine

BEFORE_S, BETWEEN_S = 10.0, 3.0
MEASURED = 3
"""Rounds after which throughput is taken."""
SETTLED_S, WINDOW_S = 20.0, 10.0
TEXT = "The river runs through the old town, past the mill and under the stone bridge. "


def main() -> int:
    """Break, measure, print, write; 1 if anything was lost or wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--rounds", type=int, default=3, help="of each fault; of all products")
    parser.add_argument("--clients", type=int, default=6, help="streams at once")
    parser.add_argument(
        "--tokens", type=int, help="of each answer (default: 300, with --products 1000)"
    )
    parser.add_argument("--faults", help="which ones; all that the app can have by default")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cluster", action="store_true", help="see above")
    which.add_argument("--products", action="store_true", help="see above")
    parser.add_argument("--model", help="of the laptop's app: a folder, a known name or a hub id")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    options.tokens = options.tokens or (1000 if options.products else 300)
    possible = [fault for fault in FAULTS if options.cluster or fault not in OF_CLUSTERS]
    if options.products:
        possible = [*LOST, *KV_FAULTS]
    chosen = options.faults.split(",") if options.faults else possible
    if unknown := set(chosen) - set(possible):
        parser.error(f"--faults: {', '.join(sorted(unknown))}; there are {', '.join(possible)}")
    if options.products and not all(set(chosen) & set(one) for one in (LOST, KV_FAULTS)):
        parser.error(f"--faults: at least one of {', '.join(LOST)}, and of {', '.join(KV_FAULTS)}")
    if not run_first():
        print("the clients may stand still by themselves: benchmarks/client.py", file=sys.stderr)
    if options.products:
        with products() as (app, kv):
            figures = run_products(app, kv, prompts_of(options.clients), chosen, options)
    else:
        with broken_app(options) as app:
            figures = run(app, chosen, options)
    print(json.dumps(figures, indent=2))
    failed = "lost", "wrong_or_repeated_tokens", "held"
    return 1 if any(figures.get(name) for name in failed) else 0


def prompts_of(clients: int) -> list[str]:
    """One for each client."""
    return [f"Chapter {n}, page {7 * n}. {TEXT * 8}" for n in range(clients)]


def broken_app(options: argparse.Namespace) -> AbstractContextManager[App]:
    """Return the app that the command line names."""
    return cluster() if options.cluster else laptop(options.model)


def run(app: App, faults: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; the figures."""
    rng = random.Random(options.seed)
    asked = app.url, app.model, prompts_of(options.clients)
    truth = [ask(*asked, n, options.tokens) for n in range(options.clients)]
    drawn = faults * options.rounds
    rng.shuffle(drawn)
    load = Load(*asked, options.clients, options.tokens)
    recovered: list[float] = []
    hit: list[Hit] = []
    about, told = machine(), 0
    for number, fault in enumerate(drawn, 1):
        measured = Counter(each.fault for each in hit)[fault] < MEASURED
        time.sleep(BEFORE_S if measured else BETWEEN_S)
        broken_s = time.monotonic()
        before = tokens_per_s(load.seen, broken_s - BEFORE_S, broken_s)
        victim = FAULTS[fault](app, rng.randrange(100))
        back_s = app.wait_whole(victim if fault.startswith("kill") else "")
        hit.append(Hit(fault, victim, broken_s, time.monotonic()))
        longest_s = max(gaps_by_fault(list(load.seen), hit[-1:])[fault], default=0.0)
        said = f"{number}/{len(drawn)} {fault}: all there again after {back_s:.0f} s"
        said += f", longest silence {longest_s:.1f} s"
        if measured:
            time.sleep(SETTLED_S + WINDOW_S)
            now = time.monotonic()
            after = tokens_per_s(load.seen, now - WINDOW_S, now)
            recovered.append(after / max(before, 1e-9))
            said += f", {after:.0f} events/s of {before:.0f}"
        print(said, file=sys.stderr, flush=True)
        over = [one for one in list(load.seen) if one.over]
        told = tell_lost(over, told)
        if options.json:
            figures = summary(over, truth, hit, recovered)
            Path(options.json).write_text(json.dumps({"machine": about, "figures": figures}))
    seen = load.stop()
    tell_lost(seen, told)
    figures = summary(seen, truth, hit, recovered)
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": about, "figures": figures}))
    return figures


def tell_lost(seen: list[Seen], told: int) -> int:
    """Print why answers were lost, but for so many that were told; how many were lost."""
    lost = [one for one in seen if one.why]
    for one in lost[told:]:
        age_s = time.monotonic() - one.began_s
        print(f"lost, begun {age_s:.0f} s ago: {one.why[:300]}", file=sys.stderr, flush=True)
    return len(lost)


class Hit(NamedTuple):
    """One fault: the replica that it hit, if any; its time, and the time when all ran again."""

    fault: str
    victim: str
    broken_s: float
    whole_s: float


def gaps_by_fault(seen: list[Seen], hit: list[Hit]) -> dict[str, list[float]]:
    """Return the longest silence of each stream that a fault met."""
    gaps: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    for fault, victim, broken_s, whole_s in hit:
        by_replica = fault in BY_REPLICA
        gaps[fault] += [
            one.silence_s(broken_s, whole_s)
            for one in seen
            if (one.around(broken_s) and one.replica in (victim, ""))
            or (not by_replica and one.during(broken_s, whole_s))
        ]
    return gaps


def summary(
    seen: list[Seen], truth: list[Seen], hit: list[Hit], recovered: list[float]
) -> dict[str, Any]:
    """Return the figures that the module's head lists."""
    gaps = gaps_by_fault(seen, hit)
    lost = [one for one in seen if one.why]
    cut = [gap for fault, all_of in gaps.items() if fault in BY_REPLICA for gap in all_of]
    return {
        "faults": dict(Counter(each.fault for each in hit)),
        "answers": len(seen),
        "lost": len(lost),
        "wrong_or_repeated_tokens": sum(
            not one.why and one.tokens != truth[one.prompt].tokens for one in seen
        ),
        "hung": sum(one.why == "hung" for one in lost),
        "replay.streams": len(cut),
        "replay.gap_ms_p50": 1e3 * statistics.median(cut) if cut else None,
        "replay.gap_ms_max": 1e3 * max(cut) if cut else None,
        **{
            f"{fault}.gap_ms_{name}": 1e3 * pick(all_of)
            for fault, all_of in gaps.items()
            if all_of
            for name, pick in (("p50", statistics.median), ("max", max))
        },
        "throughput_vs_before": statistics.median(recovered) if recovered else None,
    }


if __name__ == "__main__":
    sys.exit(main())

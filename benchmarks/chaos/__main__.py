"""Processes are killed and stopped under steady streams: what clients see.

    python -m benchmarks.chaos [--rounds 3] [--json FILE]
    python -m benchmarks.chaos --gateways 2 --prefill 2 --decode 3 --model tiny

Starts the app and streams greedy answers without pause, by clients that resume their streams. Every
fault of `faults` happens `--rounds` times, in an order drawn by `--seed`; the next one when all
processes are there again. Each answer is compared with that of the undisturbed app.

    lost                        answers that ended with an error, or not at all
    wrong_or_repeated_tokens    answers whose tokens are not those of the undisturbed app
    hung                        of the lost ones: those that took longer than four minutes
    replay.streams              streams that were cut and went on
    replay.gap_ms_p50, _max     the longest silence that the client of such a stream saw
    FAULT.gap_ms_p50            the same by fault
    throughput_vs_before        events a second over ten seconds, 30 s after all are there again, to
                                those before the fault; the median over all faults
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos.faults import BY_REPLICA, FAULTS
from benchmarks.chaos.streams import Load, Seen, ask, tokens_per_s
from benchmarks.instance import headrace
from benchmarks.serving.environment import machine
from headrace.cli import state
from tests.support.tiny import tiny_llama

BEFORE_S = 10.0
SETTLED_S, WINDOW_S = 20.0, 10.0
BACK_S = 240.0
TEXT = "The river runs through the old town, past the mill and under the stone bridge. "


def main() -> int:
    """Break, measure, print, write; 1 if anything was lost or wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--rounds", type=int, default=3, help="of each fault")
    parser.add_argument("--clients", type=int, default=6, help="streams at once")
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument(
        "--faults",
        help="which ones; kill_gateway by default only where there are several gateways",
    )
    parser.add_argument("--prefill", type=int, default=1, help="prefill replicas")
    parser.add_argument("--decode", type=int, default=1, help="decode replicas")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument(
        "--model", help="a model folder, a known name, a hub id, or tiny: a random one"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    if options.faults is None:
        spared = {"kill_gateway"} if options.gateways < 2 else set()
        options.faults = ",".join(fault for fault in FAULTS if fault not in spared)
    name = f"chaos-{uuid.uuid4().hex[:6]}"
    sets = [f"{role}.replicas={count}" for role, count in wanted(options).items()]
    sets += [f"gateway.replicas={options.gateways}", "gateway.port=0"]
    if options.model:
        sets += [f"model.source={tiny_llama() if options.model == 'tiny' else options.model}"]
    try:
        headrace("up", "--detach", "--name", name, *(f"--set={one}" for one in sets))
        instance = state.load(name)
        if instance is None:
            raise RuntimeError("headrace up left no state file")
        figures = run(instance.endpoint, instance.model, options)
    finally:
        headrace("down", "--name", name, check=False)
    print(json.dumps(figures, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": machine(), "figures": figures}))
    return 1 if figures["lost"] or figures["wrong_or_repeated_tokens"] else 0


def wanted(options: argparse.Namespace) -> dict[str, int]:
    """Replicas by role."""
    return {"prefill": options.prefill, "decode": options.decode}


def run(url: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; the figures."""
    rng = random.Random(options.seed)
    prompts = [f"Chapter {n}, page {7 * n}. {TEXT * 8}" for n in range(options.clients)]
    truth = [ask(url, model, prompts, n, options.tokens) for n in range(options.clients)]
    drawn = options.faults.split(",") * options.rounds
    rng.shuffle(drawn)
    load = Load(url, model, prompts, options.clients, options.tokens)
    gaps: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    recovered = []
    hit: list[tuple[str, str, float]] = []
    for number, fault in enumerate(drawn, 1):
        time.sleep(BEFORE_S)
        now = time.monotonic()
        before = tokens_per_s(load.seen, now - BEFORE_S, now)
        victim = FAULTS[fault](status(url), rng.randrange(100))
        broken_s = time.monotonic()
        hit.append((fault, victim, broken_s))
        back_s = wait_whole(url, options, victim if "stop" not in fault else "")
        time.sleep(SETTLED_S + WINDOW_S)
        now = time.monotonic()
        after = tokens_per_s(load.seen, now - WINDOW_S, now)
        recovered.append(after / max(before, 1e-9))
        print(
            f"{number}/{len(drawn)} {fault}: all there again after {back_s:.0f} s, "
            f"{after:.0f} events/s of {before:.0f}",
            file=sys.stderr,
            flush=True,
        )
    seen = load.stop()
    for fault, victim, broken_s in hit:
        gaps[fault] += [
            one.silence_s()
            for one in seen
            if one.around(broken_s) and (one.replica == victim or fault not in BY_REPLICA)
        ]
    return summary(seen, truth, gaps, recovered)


def summary(
    seen: list[Seen], truth: list[Seen], gaps: dict[str, list[float]], recovered: list[float]
) -> dict[str, Any]:
    """The figures that the module's head lists."""
    lost = [one for one in seen if one.why]
    for one in lost[:5]:
        print(f"lost: {one.why[:300]}", file=sys.stderr)
    cut = [gap for fault, all_of in gaps.items() if fault in BY_REPLICA for gap in all_of]
    return {
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
            f"{fault}.gap_ms_p50": 1e3 * statistics.median(all_of)
            for fault, all_of in gaps.items()
            if all_of
        },
        "throughput_vs_before": statistics.median(recovered) if recovered else None,
    }


def status(url: str) -> dict[str, Any]:
    """The status document; asked again while replicas come and go."""
    deadline = time.monotonic() + 30
    while True:
        try:
            answer = httpx.get(f"{url}/headrace/v1/status", timeout=20)
            return dict(answer.raise_for_status().json())
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def wait_whole(url: str, options: argparse.Namespace, gone: str) -> float:
    """Until as many replicas of each role, gateways and StoreNodes answer as there should be,
    without that replica; seconds."""
    roles = wanted(options)
    began = time.monotonic()
    while time.monotonic() - began < BACK_S:
        time.sleep(1.0)
        told = [status(url) for _ in range(8 * options.gateways if options.gateways > 1 else 1)]
        gateways = {each["gateway"]["pid"] for each in told}
        replicas = [each for each in told[-1]["replicas"] if each["replica_id"] != gone]
        counts = {role: sum(each["role"] == role for each in replicas) for role in roles}
        ready = all(each.get("url") for each in replicas if each["role"] == "decode")
        if (counts, len(gateways)) == (roles, options.gateways) and ready and told[-1]["store"]:
            return time.monotonic() - began
    raise RuntimeError(f"not all came back within {BACK_S:g} s")


if __name__ == "__main__":
    sys.exit(main())

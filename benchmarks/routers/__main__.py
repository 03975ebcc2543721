"""Routers compared on a production trace, with real processes: ``python -m benchmarks.routers``.

Eight emulated engines (`engine`: vLLM's scheduler and prefix cache, step times of a calibrated
model, no computing) serve our gateway and then, one after the other, the routers that are installed
in the folder that HEADRACE_ROUTER_PEERS names. The same requests come at the same times, whatever
the outcome of earlier ones.

    python -m benchmarks.routers [--quick] [--trace FILE] [--json FILE] [--routers NAME ...]

A part of the trace's conversations is used (`--keep`), each whole, so that a few minutes have the
hits of many. The trace is played so fast that the engines are at `--load` of their capacity: the
rate at which they complete such requests when a queue never ends (`work.capacity`).

Engines are `--slow` times as slow as a GPU of the H100 kind with an 8B model, and so are the
targets: a first token within 2 s plus 0.1 ms a token of the prompt, 50 ms a token after it on
average.

Figures, of each router: TTFT mean and percentiles, ITL, goodput (share of requests that keep both
targets), share of prompt tokens that were hits, errors, busiest engine, CPU seconds of the router.
``conversation.ttft_p90_vs_best_peer``, ``conversation.goodput_vs_best_peer``: ours over the best.
``NAME.added_ms_cN``: median TTFT at N streams minus that without a router, with engines that answer
at once; ``added_ms_c64``: ours minus the minimum of the Rust routers.
``long.*``: the same with 1,200 streams of 220 KB at once (`long_prompts`); ``--only long``.
``client.*``: figures of guidellm, another project's client, for our gateway, and those of our own
client for the same requests (`other_client`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import uvloop

from benchmarks.routers import long_prompts, other_client
from benchmarks.routers.arms import ARMS, DIRECT, OURS_NAME, PEERS_VARIABLE, Arm, Cluster
from benchmarks.routers.engines import Settings
from benchmarks.routers.figures import Outcome, Targets, against, outcome, table
from benchmarks.routers.load import Answer, closed_loop, open_loop
from benchmarks.routers.processes import NotStartedError
from benchmarks.routers.words import VOCABULARY, text_of, write_tokenizer
from benchmarks.routers.work import Work, capacity, cut, reachable, trace_of
from benchmarks.serving.environment import machine

Told = TypeVar("Told")
ENGINES = 8
STREAMS = (1, 64)
GAP_S = 0.02


@dataclass(frozen=True, slots=True)
class Size:
    """How long it takes.

    Attributes:
        seconds: of the open loop, about; `warm` of it only fills caches.
        turns, tokens: of each stream where the added latency is measured.
    """

    seconds: float
    warm: float
    turns: int
    tokens: int = 50


FULL, QUICK = Size(180.0, 0.4, 4), Size(24.0, 0.4, 2)


class _Look(NamedTuple):
    """The engines' counts, and CPU seconds so far, at a moment."""

    stats: list[dict[str, float]]
    router_cpu_s: float
    engine_cpu_s: float
    at_s: float


def conversation(arm: Arm, settings: Settings, place: tuple[Path, Path], work: Work) -> Outcome:
    """Play the requests through one router."""
    folder, logs = place
    texts, targets = work.texts(), Targets().times(settings.slow)
    with arm.start(settings, folder, logs) as cluster:
        return uvloop.run(_played(cluster, work, texts, targets))


async def _played(
    cluster: Cluster, work: Work, texts: list[list[bytes]], targets: Targets
) -> Outcome:
    """Play the requests; return the outcome, which counts from the first measured request on."""

    async def look(at_s: float) -> _Look:
        await asyncio.sleep(at_s)
        stats = await asyncio.to_thread(cluster.stats)
        router_cpu_s = sum(one.cpu_s() for one in cluster.router)
        return _Look(stats, router_cpu_s, cluster.engine_cpu_s(), time.perf_counter())

    await _warm_up(cluster.url)
    first = asyncio.create_task(look(work.at_s[work.measured]))
    answers = await open_loop(cluster.url, work.at_s, texts, work.answers)
    before, after = await first, await look(0.0)
    for error in sorted({one.error for one in answers if one.error})[:5]:
        print(f"  {error}", file=sys.stderr)
    return outcome(
        answers[work.measured :],
        targets,
        before=before.stats,
        after=after.stats,
        seconds=after.at_s - before.at_s,
        router_cpu_s=after.router_cpu_s - before.router_cpu_s,
        engine_cpu_s=after.engine_cpu_s - before.engine_cpu_s,
    )


async def _warm_up(url: str) -> None:
    """A few short requests, so that no router opens its first connections on the clock."""
    rng = np.random.default_rng(1)
    prompts = [text_of(rng.integers(0, VOCABULARY, 100)) for _ in range(64)]
    for error in {one.error for one in await closed_loop(url, 16, 4, 4, prompts, 0.2)} - {""}:
        print(f"  at the beginning: {error}", file=sys.stderr)


def added(arm: Arm, settings: Settings, place: tuple[Path, Path], size: Size) -> dict[int, float]:
    """Return the median TTFT in ms, by the number of streams, with engines that answer at once."""
    folder, logs = place
    settings = replace(settings, gap_s=GAP_S)
    rng = np.random.default_rng(0)
    prompts = [text_of(rng.integers(0, VOCABULARY, 1000)) for _ in range(64)]
    with arm.start(settings, folder, logs) as cluster:
        found = {}
        for streams in STREAMS:
            turns = size.turns * (4 if streams == 1 else 1)
            took = GAP_S * size.tokens
            uvloop.run(_warm_up(cluster.url))
            answers = uvloop.run(
                closed_loop(cluster.url, streams, turns + 1, size.tokens, prompts, took)
            )
            found[streams] = 1e3 * _median_ttft(answers[streams:])
        return found


def _median_ttft(answers: list[Answer]) -> float:
    good = [one.ttft_s for one in answers if not one.error]
    if not good:
        raise NotStartedError(f"no request was answered: {answers[0].error}")
    return statistics.median(good)


def main() -> None:
    """Run, print a table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routers")
    parser.add_argument("--quick", action="store_true", help="ours and one peer, a few minutes")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's form; else made up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--routers", nargs="+", choices=[name for name in ARMS if name != DIRECT])
    parser.add_argument("--load", type=float, default=0.7, help="share of the engines' capacity")
    parser.add_argument("--keep", type=float, default=0.25, help="share of the conversations")
    parser.add_argument("--slow", type=float, default=1.0, help="times an H100's step times")
    parser.add_argument("--seconds", type=float, help="of the open loop of each router")
    parser.add_argument("--logs", type=Path, help="keep what the programs write here")
    parts = ("conversation", "added", "client", "long")
    parser.add_argument("--only", choices=parts, help="one part; `long` runs only so")
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    size = replace(size, seconds=args.seconds or size.seconds)
    found, figures = run(args, size)
    if found:
        print(table(found))
    for name, value in figures.items():
        if "vs_best" in name or "added_ms" in name or name.startswith(("client.", "long.")):
            print(f"{name} {value:.3f}")
    if args.json:
        told = {"figures": figures, "environment": machine()}
        args.json.write_text(json.dumps(told, indent=2) + "\n")


def run(args: argparse.Namespace, size: Size) -> tuple[dict[str, Outcome], dict[str, float]]:
    """All routers that are there, one after the other."""
    peers = os.environ.get(PEERS_VARIABLE)
    figures: dict[str, float] = {}
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-routers-") as scratch:
        logs = args.logs or Path(scratch) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / "emu"
        write_tokenizer(model, 200_000)
        settings = Settings(str(model), ENGINES, args.slow)
        arms = _installed(args.routers, None if peers is None else Path(peers))
        if args.quick and not args.routers:
            arms = [one for one in arms if one[0].name in (OURS_NAME, "sglang-router")]
        if args.only in (None, "conversation"):
            work = _work(args, size, settings, figures)
            for arm, folder in arms:
                told = _tried(arm, partial(conversation, arm, settings, (folder, logs), work))
                if told is not None:
                    found[arm.name] = told
                    figures |= told.figures(arm.name)
                    print(table({arm.name: told}).splitlines()[-1], file=sys.stderr, flush=True)
            ours = found.get(OURS_NAME)
            if ours is not None:
                figures |= against(ours, _peers(found))
        if args.only in (None, "client"):
            figures |= _clients(settings, logs, None if peers is None else Path(peers))
        if args.only in (None, "added"):
            arms = [one for one in arms if not one[0].name.startswith(f"{OURS_NAME}.")]
            figures |= _added(arms, settings, logs, size)
        if args.only == "long":
            figures |= _long(arms, settings, logs)
    return found, figures


def _clients(settings: Settings, logs: Path, peers: Path | None) -> dict[str, float]:
    """Our own client against one of others; nothing where that is not installed."""
    folder = None if peers is None else peers / other_client.NAME
    if folder is None or not folder.is_dir():
        print(f"guidellm is left out; to get it: {other_client.INSTALL_HINT}", file=sys.stderr)
        return {}
    try:
        return other_client.compared(ARMS[OURS_NAME], settings, logs, folder)
    except NotStartedError as error:
        print(f"guidellm is left out: {error}", file=sys.stderr)
        return {}


def _peers(found: dict[str, Outcome]) -> dict[str, Outcome]:
    return {name: one for name, one in found.items() if not name.startswith(OURS_NAME)}


def _installed(names: list[str] | None, peers: Path | None) -> list[tuple[Arm, Path]]:
    arms = []
    for arm in ARMS.values():
        if arm.name == DIRECT or (names and arm.name not in names):
            continue
        folder = arm.folder(peers)
        if folder is None:
            print(f"{arm.name} is left out; to get it: {arm.install_hint()}", file=sys.stderr)
        else:
            arms.append((arm, folder))
    return arms


def _work(
    args: argparse.Namespace, size: Size, settings: Settings, figures: dict[str, float]
) -> Work:
    """Return as many requests as arrive in the run's time at the wanted load."""
    trace, engine = trace_of(args.trace), settings.machine()
    known = round(0.9 * args.keep * len(trace))  # about so many there are
    probe = cut(trace, min(known - 300, 1200), 300, keep=args.keep)
    rate = capacity(probe, engine, settings.engines) * args.load
    total = min(known, max(20, round(rate * size.seconds)))
    warm = round(size.warm * total)
    work = cut(trace, total - warm, warm, keep=args.keep)
    figures["trace_speed"] = rate * work.at_s[-1] / (len(work) - 1)
    work = work.at_rate(figures["trace_speed"])
    figures["capacity_per_s"] = rate / args.load
    figures["rate_per_s"] = rate
    figures["requests"] = len(work) - work.measured
    figures["seconds_each"] = work.at_s[-1]
    figures["reachable_hit_rate"] = reachable(work, settings.block_tokens)
    print(
        f"{len(work)} requests in {work.at_s[-1]:.0f} s, {rate:.2f} a second; "
        f"{sum(work.answers) / work.at_s[-1]:.0f} tokens a second; "
        f"{figures['reachable_hit_rate']:.3f} of the prompts' tokens can be hit",
        file=sys.stderr,
        flush=True,
    )
    return work


def _tried(arm: Arm, play: Callable[[], Told]) -> Told | None:
    """Return the result of a router's run; if it did not start, print that and return None."""
    try:
        return play()
    except NotStartedError as error:
        print(f"{arm.name} is left out: {error}", file=sys.stderr, flush=True)
        return None


def _long(arms: list[tuple[Arm, Path]], settings: Settings, logs: Path) -> dict[str, float]:
    """Return the figures of many long prompts."""
    direct = long_prompts.measure(ARMS[DIRECT], settings, (Path(), logs))
    found: dict[str, long_prompts.Waits] = {}
    for arm, folder in arms:
        told = _tried(arm, partial(long_prompts.measure, arm, settings, (folder, logs)))
        if told is not None:
            found[arm.name] = told
            print(f"{arm.name}: {told}", file=sys.stderr, flush=True)
    return long_prompts.figures(found, direct)


def _added(
    arms: list[tuple[Arm, Path]], settings: Settings, logs: Path, size: Size
) -> dict[str, float]:
    """Return the time that each router adds to the time to a first token."""
    direct = added(ARMS[DIRECT], settings, (Path(), logs), size)
    figures = {f"direct.ttft_ms_c{streams}": ms for streams, ms in direct.items()}
    for arm, folder in arms:
        told = _tried(arm, partial(added, arm, settings, (folder, logs), size))
        if told is not None:
            for streams, ms in told.items():
                figures[f"{arm.name}.added_ms_c{streams}"] = ms - direct[streams]
    rust = [arm.name for arm, _ in arms if arm.rust]
    for streams in STREAMS:
        least = [figures.get(f"{name}.added_ms_c{streams}") for name in rust]
        known = [ms for ms in least if ms is not None]
        ours = figures.get(f"{OURS_NAME}.added_ms_c{streams}")
        if known and ours is not None:
            figures[f"added_ms_c{streams}"] = ours - min(known)
    return figures


if __name__ == "__main__":
    main()

"""Faults that come together: a replica is lost, its streams' KV does not come, clients do not read.

One round is one product of `LOST` and `KV_FAULTS`, under clients of three kinds at once: patient
ones, slow ones, which stop to read shortly before the fault, and ones that leave during it. Every
answer has a cache salt of its own, so a resumed stream finds no KV at its new replica, and the
router sends all prompts to prefill replicas, so its KV has to come from one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos.apps import App
from benchmarks.chaos.faults import STOPPED_S, drain, kill_engine, stop_engine
from benchmarks.chaos.kv_faults import KV_FAULTS, KvFaults
from benchmarks.chaos.streams import LIMIT_S, Seen, ask, body_of, headers_of
from benchmarks.serving.environment import machine
from headrace.gateway.ingress.connection import SEND_TIMEOUT_S

LOST: dict[str, Callable[[App, int], str]] = {
    "killed": kill_engine,
    "hung": stop_engine,
    "drained": drain,
}
"""Ways in which a decode replica is lost: its engine is killed or stopped for a while, or the
replica is drained while it has streams that take longer than its grace period."""
CLIENTS = ("patient", "slow", "gone")
STREAMS_S, FULL_S, KV_S = 5.0, 3.0, 12.0
"""Seconds from the time that all replicas run until slow clients stop reading; from then until the
faults, while the buffers for those clients fill up; minimum duration of KV faults. KV faults last
at least as long as an engine is stopped, since a stopped engine is found late."""
UNREAD_S = SEND_TIMEOUT_S - 5.0
"""Maximum seconds for which a slow client does not read; a gateway would then close the
connection."""
LEAVES_S = 4.0
"""Clients that leave do so within this many seconds after the fault."""
HELD_S = 10.0
"""Seconds after the last answer after which no request may be held any more."""


LEFT = "left"
"""Why the stream of a client that leaves ended."""


@dataclass
class Answer(Seen):
    """One stream, and what its client is like (`CLIENTS`)."""

    client: str = "patient"


class ProductLoad:
    """Clients of all kinds, each asking again as soon as it is answered, until `stop`."""

    def __init__(
        self, app: App, prompts: Sequence[str], clients: int, tokens: int, seed: int
    ) -> None:
        self.seen: list[Answer] = []
        self.broken = threading.Event()
        """Set while a fault is on: slow clients do not read, and others leave."""
        self._app, self._prompts, self._tokens = app, prompts, tokens
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(number, seed), daemon=True)
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _client(self, number: int, seed: int) -> None:
        kind, rng = CLIENTS[number % len(CLIENTS)], random.Random(seed * 1000 + number)
        while not self._over.is_set():
            seen = Answer(number % len(self._prompts), time.monotonic(), client=kind)
            self.seen.append(seen)
            self._ask(seen, rng)
            seen.over = True

    def _ask(self, seen: Answer, rng: random.Random) -> None:
        body = body_of(self._app.model, self._prompts[seen.prompt], self._tokens, own_kv=True)
        options: list[Any] = []
        if seen.client == "slow":  # little is kept for it on the way, so that the gateway waits
            body["logprobs"] = 5
            options = [
                (socket.SOL_SOCKET, socket.SO_RCVBUF, 4096),
                (socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536),
            ]
        patience_s = rng.uniform(1.0, LEAVES_S) if seen.client == "gone" else LIMIT_S
        transport = httpx.HTTPTransport(socket_options=options)
        url = f"{self._app.url}/v1/completions"
        seen.why = "no end"
        try:
            with (
                httpx.Client(transport=transport, timeout=patience_s) as client,
                client.stream("POST", url, json=body, headers=headers_of()) as answer,
            ):
                seen.replica = answer.headers.get("x-headrace-replica", "")
                if answer.status_code != 200:
                    seen.why = f"{answer.status_code}: {answer.read()[:300]!r}"
                    return
                self._read(seen, answer.iter_lines(), patience_s)
        except httpx.TimeoutException:
            seen.why = LEFT if seen.client == "gone" else "hung"
        except httpx.HTTPError as error:
            seen.why = repr(error)

    def _read(self, seen: Answer, lines: Iterator[str], patience_s: float) -> None:
        leaves_s, reads_s = math.inf, 0.0
        for line in lines:
            if seen.read(line):
                return
            if not self.broken.is_set():
                reads_s = 0.0
            elif seen.client == "slow":
                reads_s = reads_s or time.monotonic() + UNREAD_S
                while self.broken.is_set() and time.monotonic() < reads_s:
                    time.sleep(0.05)
            if seen.client == "gone" and self.broken.is_set():
                leaves_s = min(leaves_s, time.monotonic() + patience_s)
                if time.monotonic() > leaves_s:
                    seen.why = LEFT
                    return

    def stop(self) -> list[Answer]:
        """Let each finish its answer; all that was seen."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        return self.seen


@dataclass
class Round:
    """Effects of one product of faults.

    Attributes:
        cut: number of streams that its replica was answering.
        hit: number of pulls that were late or failed.
        seconds: seconds until all replicas ran again.
    """

    lost: str
    kv: str
    broken_s: float
    cut: int = 0
    hit: int = 0
    seconds: float = 0.0


def run_products(
    app: App,
    kv: KvFaults,
    prompts: Sequence[str],
    chosen: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All rounds of the products of the faults chosen; the figures."""
    rng = random.Random(options.seed)
    truth = [ask(app.url, app.model, prompts, n, options.tokens) for n in range(len(prompts))]
    load = ProductLoad(app, prompts, options.clients, options.tokens, options.seed)
    rounds: list[Round] = []
    about = machine()
    for number, (lost, fault) in enumerate(_drawn(options.rounds, chosen, rng), 1):
        rounds.append(_round(app, kv, load, lost, fault))
        one = rounds[-1]
        print(
            f"{number}/{options.rounds} {lost} x {fault}: {one.cut} streams cut, {one.hit} pulls "
            f"hit, all there again after {one.seconds:.0f} s",
            *(f"\n  {each.client}: {each.why[:300]}" for each in _lost(load.seen, one.broken_s)),
            file=sys.stderr,
            flush=True,
        )
        _write(options.json, about, figures(list(load.seen), truth, rounds, None))
    seen = load.stop()
    time.sleep(HELD_S)
    found = figures(seen, truth, rounds, held(app))
    _write(options.json, about, found)
    return found


def _drawn(rounds: int, chosen: Sequence[str], rng: random.Random) -> list[tuple[str, str]]:
    """So many products of the faults chosen, each as often as any other, but for one."""
    factors = [[name for name in all_of if name in chosen] for all_of in (LOST, KV_FAULTS)]
    drawn: list[tuple[str, str]] = []
    while len(drawn) < rounds:
        products = [(lost, kv) for lost in factors[0] for kv in factors[1]]
        rng.shuffle(products)
        drawn += products
    return drawn[:rounds]


def _round(app: App, kv: KvFaults, load: ProductLoad, lost: str, fault: str) -> Round:
    time.sleep(STREAMS_S)
    load.broken.set()
    try:
        time.sleep(FULL_S)
        before, hit = _decode_replicas(app), kv.hit
        one = Round(lost, fault, time.monotonic())
        streaming = [each for each in list(load.seen) if not each.over and each.came_s]
        busiest = _busiest(before, streaming)
        with kv.breaking(app, fault):
            victim = LOST[lost](app, busiest)
            lasts_s = STOPPED_S + 1.0 if lost == "hung" else KV_S
            time.sleep(max(0.0, one.broken_s + lasts_s - time.monotonic()))
    finally:
        load.broken.clear()
    gone = {victim} if victim else before - _decode_replicas(app)
    one.cut, one.hit = sum(each.replica in gone for each in streaming), kv.hit - hit
    app.wait_whole(victim if lost == "killed" else "")
    one.seconds = time.monotonic() - one.broken_s
    return one


def _busiest(replicas: set[str], streaming: Sequence[Answer]) -> int:
    """The number, in their order, of the replica with the most streams; Serve drains whom it likes.

    A fault of a replica without any would show nothing.
    """
    answering = Counter(each.replica for each in streaming)
    names = sorted(replicas)
    return max(range(len(names)), key=lambda number: answering[names[number]])


def _decode_replicas(app: App) -> set[str]:
    replicas = app.status()["replicas"]
    return {str(each["replica_id"]) for each in replicas if each["role"] == "decode"}


def _lost(seen: Sequence[Answer], since_s: float = -math.inf) -> list[Answer]:
    """Answers that ended, or not, otherwise than their clients wanted."""
    return [
        one
        for one in list(seen)
        if one.over and one.why not in ("", LEFT) and (one.came_s or [one.began_s])[-1] >= since_s
    ]


def held(app: App) -> int:
    """Return the requests that gateways or engines still have."""
    told = [app.status() for _ in range(8 * app.gateways)]  # any gateway answers
    gateways = {each["gateway"]["pid"]: int(each["gateway"]["relaying"]) for each in told}
    engines = [
        int(each.get(name) or 0) for each in told[-1]["replicas"] for name in ("running", "waiting")
    ]
    return sum(engines) + sum(gateways.values())


def figures(
    seen: Sequence[Answer], truth: Sequence[Seen], rounds: Sequence[Round], left: int | None
) -> dict[str, Any]:
    """Return the figures that `benchmarks.chaos` lists."""
    over = [one for one in seen if one.over]
    lost = _lost(over)
    return {
        "rounds": dict(Counter(f"{one.lost} x {one.kv}" for one in rounds)),
        "answers": dict(Counter(one.client for one in over)),
        "left": sum(one.why == LEFT for one in over),
        "lost": len(lost),
        "wrong_or_repeated_tokens": sum(is_wrong(one, truth[one.prompt]) for one in over),
        "hung": sum(one.why == "hung" for one in lost),
        "held": left,
        "streams_cut": sum(one.cut for one in rounds),
        "pulls_hit": sum(one.hit for one in rounds),
        "round_s_p50": statistics.median(one.seconds for one in rounds) if rounds else None,
    }


def is_wrong(one: Seen, truth: Seen) -> bool:
    """Whether the tokens that came are not those of the undisturbed app, from the first one on."""
    whole = truth.tokens if not one.why else truth.tokens[: len(one.tokens)]
    return one.tokens != whole


def _write(file: str | None, about: Any, found: dict[str, Any]) -> None:
    if file:
        Path(file).write_text(json.dumps({"machine": about, "figures": found}))

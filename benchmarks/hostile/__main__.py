"""Effects of a hostile tenant on another one: stalls, late tokens, memory, wrong KV.

    python -m benchmarks.hostile [--model MODEL] [--only KIND,KIND] [--json FILE]

Starts the laptop's app with API keys for two tenants. One tenant streams answers, first alone, then
while the other sends all of `attacks` and guesses keys and salts.

    stall_ms_max                the longest time that the gateway's or the decode replica's event
                                loop was held while the attacks ran
    stall_ms_held               the longest for which code of the loop's process was the cause; the
                                rest is waiting for a processor
    stall_ms_quiet              the same as `stall_ms_max`, without attacks
    neighbour.itl_p50_ms        median time between two tokens of the neighbour's
    neighbour.itl_p99_ms        99th percentile of it
    neighbour.itl_p99_vs_quiet  the same, as a multiple of that without attacks
    neighbour.itl_p99_vs_busy   the same, as a multiple of that beside a process which asks nothing
                                of the app, and only makes and drops small objects at the lowest
                                priority (SCHED_IDLE), as trials of grammars and the client do: what
                                sharing this machine's memory costs without any attack
    neighbour.failures          answers to the neighbour that were not complete
    rss_growth_mb               growth of memory of the gateway and the decode replica, with its
                                engine and its worker for grammars, after the attacks
    rss_growth_again_mb         their further growth after all attacks a second time
    wrong_tenant_hits           prompts whose KV was found with another tenant's salt or a wrong key
    wrong_answers               attacks that were answered with status 500 or higher, not in time,
                                or with an error of more than 64 KiB
    held.requests               requests, bytes of bodies and connections that the gateway holds
    held.body_bytes             10 s after the last attack of the first round
    held.sockets
    attack_s, attack_mb         how long the attacks took, and the bodies that they sent
    cpu_s.PART                  processor seconds of each part during the attacks
    rss_growth_mb.PART          `rss_growth_mb` by part

The neighbour's latest tokens are printed with the attacks that ran at the same time.

The neighbour is a separate process. The hostile client has niceness 19, as a thread and as a
session: in reality it would be on another machine. Linux shares processors among sessions first
(`sched_autogroup_enabled`), so a client whose threads alone are nice takes as much of a busy core
as the whole app. `--client-niceness 0` measures that.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPException
from pathlib import Path

import httpx

from benchmarks.figures import report
from benchmarks.hostile.attacks import (
    COMPLETE,
    KINDS,
    Request,
    SlowHeads,
    Unread,
    requests,
    send,
    too_long,
    wires,
    wrong_answer,
)
from benchmarks.hostile.neighbour import NeighbourProcess, percentile
from benchmarks.hostile.target import Target
from benchmarks.hostile.timeline import Attacks, StallWatch
from benchmarks.instance import running_instance
from benchmarks.serving.environment import environment
from headrace.config.key_file import KeyEntry, KeyFile, hash_of, write_keys

SETTLE_S, QUIET_S, BUSY_S = 65.0, 60.0, 30.0
"""A gauge of stalls remembers a minute: what starting cost has to be forgotten first."""
ATTACKS = (*KINDS, "connections", "unread")
AT_ONCE = 4
SLOW_HEADS = 200
UNREAD = 60
HELD_AFTER_S = 10.0
GUESSES = 500
BLOCKS = 3
TARGETS = {
    "stall_ms_max": "<= 50",
    "neighbour.itl_p99_vs_quiet": "<= 1.3",
    "rss_growth_mb": "<= 200",
    "wrong_tenant_hits": "0",
    "held.requests": "0",
    "held.body_bytes": "0",
    "held.sockets": "0",
}


def main() -> int:
    """Measure, print, write; 1 if the app did not start."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile")
    parser.add_argument("--model", help="a model folder, a known name or a hub id")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as in headrace up"
    )
    parser.add_argument(
        "--client-niceness",
        type=int,
        default=19,
        help="of the hostile client",
    )
    parser.add_argument(
        "--only", metavar="KIND,KIND", help=f"attacks of these kinds: {', '.join(ATTACKS)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    kinds = args.only.split(",") if args.only else ATTACKS
    if unknown := set(kinds) - set(ATTACKS):
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
    from headrace.model import resolve

    model = resolve(args.model)
    try:
        with running(str(model), args.set) as target:
            figures = measure(target, kinds, args.client_niceness)
    except (RuntimeError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(figures, TARGETS, environment(model), args.json)
    return 0


def measure(target: Target, kinds: Sequence[str], client_niceness: int) -> dict[str, float]:
    """Return all figures."""
    sent, parts = list(requests(target.model, kinds)), target.parts()
    time.sleep(SETTLE_S)
    with neighbour_of(target) as quiet:
        time.sleep(QUIET_S)
        quiet_stall = target.stall_s()
    with busy_processor(), neighbour_of(target) as beside:
        time.sleep(BUSY_S)
    held, used, began = parts.resident_bytes(), parts.cpu_s(), time.monotonic()
    under_way = Attacks()
    with StallWatch(target) as stalls, neighbour_of(target) as neighbour:
        wrong = attack(target, sent, kinds, client_niceness, under_way)
    took_s = time.monotonic() - began
    time.sleep(HELD_AFTER_S)
    kept = target.held()
    cpu_s = {part: after - used[part] for part, after in parts.cpu_s().items()}
    grown = {part: after - held[part] for part, after in parts.resident_bytes().items()}
    once_bytes = sum(parts.resident_bytes().values())
    wrong += attack(target, sent, kinds, client_niceness, Attacks())
    again_bytes = sum(parts.resident_bytes().values()) - once_bytes
    itl_s, quiet_s, busy_s = (percentile(each.itl_s, 0.99) for each in (neighbour, quiet, beside))
    tokens, held_loops = under_way.beside(neighbour), under_way.around(stalls)
    for each in [*wrong, *neighbour.failures, *tokens, *held_loops]:
        print(each, file=sys.stderr)
    return {
        "stall_ms_max": round(stalls.longest.stall * 1e3, 1),
        "stall_ms_held": round(stalls.longest.held * 1e3, 1),
        "stall_ms_quiet": round(quiet_stall.stall * 1e3, 1),
        "neighbour.itl_p50_ms": round(percentile(neighbour.itl_s, 0.5) * 1e3, 2),
        "neighbour.itl_p50_quiet_ms": round(percentile(quiet.itl_s, 0.5) * 1e3, 2),
        "neighbour.itl_p99_ms": round(itl_s * 1e3, 2),
        "neighbour.itl_p99_quiet_ms": round(quiet_s * 1e3, 2),
        "neighbour.itl_p99_busy_ms": round(busy_s * 1e3, 2),
        "neighbour.itl_p99_vs_quiet": round(itl_s / quiet_s, 3),
        "neighbour.itl_p99_vs_busy": round(itl_s / busy_s, 3),
        "neighbour.failures": len(neighbour.failures),
        "rss_growth_mb": round(sum(grown.values()) / 1e6, 1),
        "rss_growth_again_mb": round(again_bytes / 1e6, 1),
        "wrong_tenant_hits": wrong_tenant_hits(target),
        **kept,
        "wrong_answers": len(wrong),
        "attack_s": round(took_s, 1),
        "attack_mb": round(sum(len(each.body) for each in sent) / 1e6, 1),
        **{f"cpu_s.{part}": round(seconds, 2) for part, seconds in cpu_s.items()},
        **{f"rss_growth_mb.{part}": round(size / 1e6, 1) for part, size in grown.items()},
    }


def neighbour_of(target: Target) -> NeighbourProcess:
    """Return the well-behaved client."""
    return NeighbourProcess(target.url, target.model, target.bearer("good"))


@contextmanager
def busy_processor() -> Iterator[None]:
    """A process that allocates, whenever nothing else wants a processor."""
    allocating = (
        "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "while True: [{str(n): n} for n in range(1_000_000)]"
    )
    process = subprocess.Popen([sys.executable, "-c", allocating])
    try:
        with nice_session(19):
            yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def nice_session(niceness: int) -> Iterator[None]:
    """Set this program's session to this niceness among the machine's sessions for the `with`
    block."""
    file = Path("/proc/self/autogroup")
    if not file.exists():  # a kernel without them
        yield
        return
    file.write_text(str(niceness))
    try:
        yield
    finally:
        time.sleep(0.2)  # the kernel refuses two changes within a tenth of a second
        file.write_text("0")


def attack(
    target: Target,
    sent: Sequence[Request],
    kinds: Sequence[str],
    niceness: int,
    under_way: Attacks,
) -> list[str]:
    """Send everything, from threads of this niceness; what was answered wrongly, in words."""

    def begin() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)

    # A thread that this one starts has its niceness.
    with nice_session(niceness), ThreadPoolExecutor(1, initializer=begin) as client:
        return client.submit(_attack, target, sent, kinds, under_way).result()


def _attack(
    target: Target, sent: Sequence[Request], kinds: Sequence[str], under_way: Attacks
) -> list[str]:
    slow = SlowHeads(target.connect, SLOW_HEADS if "connections" in kinds else 0)
    with under_way.during("clients begin and do not read"):
        count = UNREAD if "unread" in kinds else 0
        unread = Unread(target.connect, count, target.model, target.keys["bad"])
    wrong: list[str] = []
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(lambda each: _ask(target, each, under_way), sent)
            wrong += [each for each in found if each]
        slow.drip()
        misuses = wires(target.model, target.keys["bad"]) if "connections" in kinds else []
        for wire in misuses:
            with under_way.during(wire.name), closing(target.connect()) as sock:
                try:
                    why = wrong_answer(wire.act(sock))
                except OSError as error:
                    why = repr(error)
                if why:
                    wrong.append(f"{wire.name}: {why}")
    finally:
        slow.close()
        unread.close()
    return wrong


def _ask(target: Target, request: Request, under_way: Attacks) -> str | None:
    try:
        with under_way.during(request.name):
            found = send(target.url, request, target.bearer("bad"))
    except (OSError, HTTPException) as error:
        return f"{request.name}: {error!r}"
    if found is None:
        return None
    why = str(found[0]) if found[0] >= 500 else too_long(*found)
    return None if why is None else f"{request.name}: {why}"


def wrong_tenant_hits(target: Target) -> int:
    """Return how often one tenant found another's KV, or a guessed key was let in."""
    prompt = [1000 + n % 3000 for n in range(BLOCKS * 128 + 1)]
    hits = 0

    def computed(who: str, salt: str) -> int:
        """Return how many tokens of the prompt are computed; all, if the salt is refused."""
        before = _idle(target)
        asked = {"model": target.model, "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        client = httpx.Client(base_url=target.url, headers=target.bearer(who), timeout=60)
        answer = client.post(COMPLETE, json=asked)
        if answer.status_code == 400 and "cache_salt" in answer.text:
            return len(prompt)  # no salt can have this character
        answer.raise_for_status()
        return _idle(target) - before

    # A prompt that is prefilled remotely is computed elsewhere.
    target.change("/headrace/v1/router", {"policy": "local"})
    computed("good", "own")
    if computed("good", "own") == len(prompt):
        raise RuntimeError("a tenant's own KV is not found, so this cannot see another's")
    for salt in ("own", "tenant:good:own", "good", "good:own", "\0own"):
        hits += computed("bad", salt) < len(prompt)
    guesses = (secrets.token_urlsafe(24) for _ in range(GUESSES))
    with httpx.Client(base_url=target.url, timeout=60) as client:
        for guess in guesses:
            answer = client.get("/v1/models", headers={"authorization": f"Bearer {guess}"})
            hits += answer.status_code != 401
    return hits


def _idle(target: Target) -> int:
    """Return the prompt tokens that the decode replica has computed, once nothing runs there."""
    while (state := target.decode())["running"] or state["waiting"]:
        time.sleep(0.2)
    return int(state["prompt_tokens_computed"])


@contextmanager
def running(model: str, settings: list[str]) -> Iterator[Target]:
    """The app with three keys."""
    keys = {who: secrets.token_urlsafe(32) for who in ("good", "bad", "admin")}
    with tempfile.TemporaryDirectory(prefix="hrh-", dir="/tmp") as folder:
        file = Path(folder, "keys.yaml")
        write_keys(file, _keyfile(keys))
        chosen = [f"gateway.api_keys_file={file}", *settings]
        with running_instance("hostile", chosen, model) as instance:
            yield Target(instance.endpoint, instance.model, keys)


def _keyfile(keys: dict[str, str]) -> KeyFile:
    return KeyFile(
        keys=[
            KeyEntry(
                name=who,
                hash=hash_of(key.encode()),
                tenant=who,
                role="admin" if who == "admin" else "user",
            )
            for who, key in keys.items()
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

"""Conversation state: bytes and processor time of a turn beside sending all again, and kills.

    python -m benchmarks.conversations [--turns N] [--tokens N] [--rounds N] [--kills N]
                                       [--kinds KIND,KIND] [--model MODEL] [--json FILE]

Starts the laptop's app. A conversation begins with a text of `--tokens` tokens and has `--turns`
turns: in one arm each turn names the response before it, in the other the client sends all items
again (`store: false`). The arms alternate, and each round has a text of its own.

    turn.bytes_up              bytes of requests, heads included, of the first arm as a part of the
                               second's
    turn.cpu                   processor seconds of gateway and decode replica, without the engine,
                               likewise
    turn.cpu_gateway           of the gateway alone
    turn.cpu_replica           of the replica alone
    turn.s_p50                 median seconds of a turn, likewise
    turn.same                  part of the turns with the same prompt tokens and text in both arms

Then processes of each kind are killed (SIGKILL), `--kills` times each, one at a time: before, a
response is made that continues one; after the next process is up, it is read and continued.

    found.KIND                 part of the kills after which both was possible
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figures import report
from benchmarks.hostile.machine import Parts
from benchmarks.instance import running_instance
from benchmarks.serving.environment import environment

PATH = "/v1/responses"
KINDS = ("gateway", "decode", "prefill", "store")
TARGETS = {"turn.bytes_up": "<= 0.05", "turn.cpu": "<= 0.5", "turn.same": "1"} | {
    f"found.{kind}": "1" for kind in KINDS
}
BACK_S = 300.0
"""Seconds for a killed process's successor."""
WORDS = ("river", "stone", "cloud", "lamp", "road", "tree", "glass", "bread", "wheel", "paper")


@dataclass
class Endpoint:
    """The running app, and the bytes that were sent to it.

    Attributes:
        sent_bytes: of requests, heads included.
    """

    url: str
    model: str
    sent_bytes: int = 0
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        hooks: Any = {"request": [self._count]}
        self.client = httpx.Client(base_url=self.url, timeout=600, event_hooks=hooks)

    def _count(self, request: httpx.Request) -> None:
        head = sum(len(name) + len(value) + 4 for name, value in request.headers.raw)
        self.sent_bytes += head + len(request.method) + len(request.url.raw_path) + 14
        self.sent_bytes += len(request.content)

    def respond(self, **fields: Any) -> dict[str, Any]:
        """Return a response."""
        body = {"model": self.model, "temperature": 0, "max_output_tokens": 4, **fields}
        return dict(self.client.post(PATH, json=body).raise_for_status().json())

    def status(self) -> dict[str, Any]:
        """Return the status document."""
        return dict(self.client.get("/headrace/v1/status").raise_for_status().json())

    def pids(self) -> dict[str, int]:
        """Return the process of each kind."""
        found = self.status()
        pids = {each["role"]: int(each["pid"]) for each in found["replicas"]}
        pids["gateway"] = int(found["gateway"]["pid"])
        if found["store"]:
            pids["store"] = int(found["store"][0]["pid"])
        return pids

    def text(self, tokens: int) -> str:
        """Return a new text of about this many tokens."""
        words = [secrets.choice(WORDS) for _ in range(tokens)]
        count = {"model": self.model, "prompt": " ".join(words)}
        reply = self.client.post("/tokenize", json=count).raise_for_status().json()
        return " ".join(words[: tokens * tokens // max(tokens, int(reply["count"]))])


@dataclass
class Arm:
    """What one way of sending the turns cost, and what was answered."""

    bytes_up: int = 0
    gateway_s: float = 0.0
    replica_s: float = 0.0
    turns_s: list[float] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)


def main() -> int:
    """Measure, print, write; 1 if the app did not start."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversations")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=7000, help="of the text at the beginning")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20, help="of each kind of process")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--model", help="a model folder, a known name or a hub id")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    kinds = [kind for kind in args.kinds.split(",") if kind]
    if min(args.turns, args.rounds) < 1:
        parser.error("--turns and --rounds: must be at least 1")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    from headrace.model import resolve

    model = resolve(args.model)
    try:
        with running(str(model), args.set) as endpoint:
            figures = compare(endpoint, args.rounds, args.turns, args.tokens)
            figures |= kills(endpoint, kinds, args.kills)
    except (RuntimeError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(figures, TARGETS, environment(model), args.json)
    return 0


def compare(endpoint: Endpoint, rounds: int, turns: int, tokens: int) -> dict[str, float]:
    """Return the figures of the turns."""
    kept, whole = Arm(), Arm()
    for number in range(rounds):
        text = endpoint.text(tokens)
        order = [(kept, turns_kept), (whole, turns_whole)]
        for arm, run in order if number % 2 == 0 else order[::-1]:
            measure(endpoint, arm, partial(run, endpoint, arm, text, turns))
    return ratios(kept, whole)


def ratios(kept: Arm, whole: Arm) -> dict[str, float]:
    """Return the first arm's costs as parts of the second's, and how many answers are the same."""
    same = [one == other for one, other in zip(kept.answers, whole.answers, strict=True)]
    cpu = (kept.gateway_s + kept.replica_s) / (whole.gateway_s + whole.replica_s)
    return {
        "turn.bytes_up": kept.bytes_up / whole.bytes_up,
        "turn.cpu": cpu,
        "turn.cpu_gateway": kept.gateway_s / whole.gateway_s,
        "turn.cpu_replica": kept.replica_s / whole.replica_s,
        "turn.s_p50": statistics.median(kept.turns_s) / statistics.median(whole.turns_s),
        "turn.same": sum(same) / len(same),
    }


def measure(endpoint: Endpoint, arm: Arm, run: Callable[[], None]) -> None:
    """Run the turns of one arm, and add their costs to it."""
    parts, sent = Parts(endpoint.pids()), endpoint.sent_bytes
    used = parts.cpu_s()
    run()
    arm.bytes_up += endpoint.sent_bytes - sent
    after = parts.cpu_s()
    arm.gateway_s += after["gateway"] - used["gateway"]
    arm.replica_s += after["decode"] - used["decode"]


def turns_kept(endpoint: Endpoint, arm: Arm, text: str, turns: int) -> None:
    """Each turn names the response before it."""
    previous: dict[str, Any] = {}
    for number in range(turns):
        began = time.monotonic()
        made = endpoint.respond(input=question(text, number), **previous)
        record(arm, made, began)
        previous = {"previous_response_id": made["id"]}


def turns_whole(endpoint: Endpoint, arm: Arm, text: str, turns: int) -> None:
    """Each turn sends all items again."""
    items: list[Any] = []
    for number in range(turns):
        items.append({"role": "user", "content": question(text, number)})
        began = time.monotonic()
        made = endpoint.respond(input=items, store=False)
        record(arm, made, began)
        items += made["output"]


def question(text: str, number: int) -> str:
    """Return a turn's input; the first one has the text."""
    return f"{text}\nAnswer." if number == 0 else f"And {number}?"


def record(arm: Arm, made: dict[str, Any], began: float) -> None:
    """Add an answer to its arm."""
    arm.turns_s.append(time.monotonic() - began)
    text = "".join(part["text"] for item in made["output"] for part in item.get("content") or ())
    arm.answers.append((made["usage"]["input_tokens"], text))


def kills(endpoint: Endpoint, kinds: Sequence[str], count: int) -> dict[str, float]:
    """Kill processes; return the parts of the kills after which the state was found."""
    found: dict[str, float] = {}
    for kind in kinds if count else ():
        good = sum(is_found_after_kill(endpoint, kind) for _ in range(count))
        found[f"found.{kind}"] = good / count
        print(f"{kind}: found after {good} of {count} kills", flush=True)
    return found


def is_found_after_kill(endpoint: Endpoint, kind: str) -> bool:
    """Kill the process of a kind; return whether a response from before is read and continued."""
    first = endpoint.respond(input="Name a river.")
    second = endpoint.respond(input="And another?", previous_response_id=first["id"])
    victim = endpoint.pids()[kind]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: endpoint.pids().get(kind, victim) != victim)
    try:
        read = endpoint.client.get(f"{PATH}/{second['id']}").raise_for_status().json()
        third = endpoint.respond(input="And one more?", previous_response_id=second["id"])
    except httpx.HTTPStatusError as error:
        print(f"{kind}: {error.response.text[:300]}", file=sys.stderr)
        return False
    longer = third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    return bool(read["output"] == second["output"] and longer)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; HTTP errors count as not yet.

    Raises:
        RuntimeError: it does not hold in `BACK_S`.
    """
    until = time.monotonic() + BACK_S
    while time.monotonic() < until:
        try:
            if condition():
                return
        except (httpx.HTTPError, KeyError):
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the killed process has no successor after {BACK_S:g} s")


@contextmanager
def running(model: str, settings: Sequence[str]) -> Iterator[Endpoint]:
    """The app, which ends with the block."""
    with running_instance("turns", settings, model) as instance:
        yield Endpoint(instance.endpoint, instance.model)


if __name__ == "__main__":
    sys.exit(main())

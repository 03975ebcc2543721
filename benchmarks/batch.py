"""A batch beside an interactive stream, and gateways that are killed while they run one.

    python -m benchmarks.batch [--lines N] [--rounds N] [--seconds S] [--pause S] [--kills N]
                               [--model MODEL] [--set KEY=VALUE] [--json FILE]

Starts the laptop's app. One client streams chats of 48 tokens one after another, with a pause
between. In each round it does so for `--seconds` alone and for `--seconds` beside an unfinished
batch of `--lines` lines; the order alternates.

    itl.p99                    99th percentile of the time from token to token beside the batch, as
                               a part of that without it
    itl.p50, ttft.p50          likewise, medians; time to the first token
    itl.alone_p99_s            the percentile without the batch, in seconds
    lines.beside_s             lines a second beside the stream
    lines.idle_s               lines a second of a whole batch without the stream

Then a batch runs while its gateway is killed (SIGKILL) `--kills` times.

    killed.lost                lines that are in no output file
    killed.twice               lines that are there more than once
    killed.kills               kills while the batch ran
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figures import report
from benchmarks.instance import running_instance
from benchmarks.serving.environment import environment

CHAT = "/v1/chat/completions"
TOKENS, LINE_TOKENS = 48, 8
TARGETS = {"itl.p99": "<= 1.1", "killed.lost": "0", "killed.twice": "0"}
ENDED = ("completed", "failed", "expired", "cancelled")
LIMIT_S = 1800.0
WARM_CHATS = 3


@dataclass
class Times:
    """Seconds that a client of streams saw: from token to token, and to the first one."""

    itl_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)


class Endpoint:
    """The running app."""

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        self.client = httpx.Client(base_url=url, timeout=600)

    def chat(self, number: int, times: Times) -> None:
        """Stream one chat, and record its times."""
        content = f"Write about the number {number} and what one can count with it."
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        began = last = time.monotonic()
        with self.client.stream("POST", CHAT, json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {") or '"content":"' not in line.replace(" ", ""):
                    continue
                now = time.monotonic()
                (times.itl_s if last > began else times.ttft_s).append(now - last)
                last = now

    def start(self, lines: int) -> str:
        """Start a batch; return its id."""
        requests = (
            {
                "custom_id": str(number),
                "method": "POST",
                "url": CHAT,
                "body": {
                    "model": self.model,
                    "messages": [{"role": "user", "content": f"Name number {number}."}],
                    "max_tokens": LINE_TOKENS,
                    "ignore_eos": True,
                },
            }
            for number in range(lines)
        )
        data = "\n".join(map(json.dumps, requests)).encode()
        form = {"file": ("in.jsonl", data)}
        file = self.client.post("/v1/files", files=form, data={"purpose": "batch"})
        wanted = {
            "input_file_id": file.raise_for_status().json()["id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        made = self.client.post("/v1/batches", json=wanted).raise_for_status()
        return str(made.json()["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        """Return a batch."""
        return dict(self.client.get(f"/v1/batches/{batch_id}").raise_for_status().json())

    def done(self, batch_id: str) -> int:
        """Return how many lines of a batch are done."""
        counts = self.batch(batch_id)["request_counts"]
        return int(counts["completed"] + counts["failed"])

    def cancel(self, batch_id: str) -> None:
        """Cancel a batch, unless it has ended, and wait for its end."""
        self.client.post(f"/v1/batches/{batch_id}/cancel")
        self.wait(batch_id)

    def wait(self, batch_id: str) -> dict[str, Any]:
        """Return a batch when it has ended, also if its gateway is away for a while.

        Raises:
            RuntimeError: it does not end.
        """
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            try:
                found = self.batch(batch_id)
                if found["status"] in ENDED:
                    return found
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"the batch {batch_id} did not end within {LIMIT_S:g} s")

    def ids(self, file_id: str | None) -> list[str]:
        """Return the ids of the lines in an output file."""
        if file_id is None:
            return []
        content = self.client.get(f"/v1/files/{file_id}/content").raise_for_status().content
        return [json.loads(line)["custom_id"] for line in content.splitlines()]

    def gateway_pid(self) -> int:
        """Return the process of the gateway."""
        status = self.client.get("/headrace/v1/status").raise_for_status().json()
        return int(status["gateway"]["pid"])


def main() -> int:
    """Measure, print, write; 1 if the app did not start or a batch did not end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=45, help="of each part of a round")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two chats")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--model", help="a model folder, a known name or a hub id")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    from headrace.model import resolve

    model = resolve(args.model)
    try:
        with running_instance("batch", args.set, str(model)) as instance:
            endpoint = Endpoint(instance.endpoint, instance.model)
            figures = beside(endpoint, args.lines, args.rounds, args.seconds, args.pause)
            figures |= idle(endpoint, args.lines)
            figures |= killed(endpoint, args.lines, args.kills)
    except (RuntimeError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(figures, TARGETS, environment(model), args.json)
    return 0


def beside(
    endpoint: Endpoint, lines: int, rounds: int, seconds: float, pause_s: float
) -> dict[str, float]:
    """Return the figures of the stream alone and beside a batch."""
    alone, with_batch, warm = Times(), Times(), Times()
    for number in range(WARM_CHATS):
        endpoint.chat(number, warm)
    done = 0
    for number in range(rounds):
        for has_batch in (False, True) if number % 2 == 0 else (True, False):
            batch_id = endpoint.start(lines) if has_batch else None
            stream(endpoint, with_batch if has_batch else alone, seconds, pause_s)
            if batch_id is not None:
                done += endpoint.done(batch_id)
                endpoint.cancel(batch_id)
    return {
        "itl.p99": quantile(with_batch.itl_s, 0.99) / quantile(alone.itl_s, 0.99),
        "itl.p50": quantile(with_batch.itl_s, 0.5) / quantile(alone.itl_s, 0.5),
        "ttft.p50": quantile(with_batch.ttft_s, 0.5) / quantile(alone.ttft_s, 0.5),
        "itl.alone_p99_s": quantile(alone.itl_s, 0.99),
        "lines.beside_s": done / (rounds * seconds),
    }


def stream(endpoint: Endpoint, times: Times, seconds: float, pause_s: float) -> None:
    """Stream chats one after another for a time."""
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        endpoint.chat(1000 + number, times)
        number += 1
        time.sleep(pause_s)


def quantile(values: list[float], part: float) -> float:
    """Return a quantile of some values."""
    return statistics.quantiles(values, n=1000)[round(1000 * part) - 1]


def idle(endpoint: Endpoint, lines: int) -> dict[str, float]:
    """Return the rate of a batch beside nothing."""
    began = time.monotonic()
    endpoint.wait(endpoint.start(lines))
    return {"lines.idle_s": lines / (time.monotonic() - began)}


def killed(endpoint: Endpoint, lines: int, kills: int) -> dict[str, float]:
    """Return what became of the lines of a batch whose gateway is killed some times."""
    batch_id, made = endpoint.start(lines), 0
    for number in range(kills):
        goal = lines * (number + 1) // (kills + 2)
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until and endpoint.done(batch_id) < goal:
            time.sleep(0.1)
        if endpoint.batch(batch_id)["status"] in ENDED:
            break
        before = endpoint.gateway_pid()
        os.kill(before, signal.SIGKILL)
        made += 1
        while time.monotonic() < until:
            try:
                if endpoint.gateway_pid() != before:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
    found = endpoint.wait(batch_id)
    ids = endpoint.ids(found["output_file_id"]) + endpoint.ids(found["error_file_id"])
    counted = Counter(ids)
    return {
        "killed.lost": float(lines - len(counted)),
        "killed.twice": float(sum(count > 1 for count in counted.values())),
        "killed.kills": float(made),
    }


if __name__ == "__main__":
    sys.exit(main())

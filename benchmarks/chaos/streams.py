"""Steady streams of greedy answers, and what each client saw."""

from __future__ import annotations

import itertools
import json
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from headrace.client import ResumingTransport

LIMIT_S = 240.0
"""An answer that takes longer hangs."""


@dataclass
class Seen:
    """One stream.

    Attributes:
        came_s: when each event came, `monotonic`.
        replica: that began to answer.
        why: what ended it other than its end.
        over: whether it has ended.
    """

    prompt: int
    began_s: float
    tokens: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    replica: str = ""
    why: str = ""
    over: bool = False

    def silence_s(self, from_s: float, to_s: float) -> float:
        """Return the longest time without an event, after the first event, that overlaps the time
        from `from_s` to `to_s`."""
        pairs = itertools.pairwise(self.came_s)
        return max((b - a for a, b in pairs if from_s < b and a < to_s), default=0.0)

    def read(self, line: str) -> bool:
        """Take a line of the stream; return whether it is the last one."""
        if line == "data: [DONE]":
            self.why = ""
            return True
        if not line.startswith("data: "):
            return False
        self.came_s.append(time.monotonic())
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.why = str(event["error"])
            return True
        for choice in event["choices"]:
            self.tokens += choice["token_ids"] or ()
        return False

    def around(self, moment_s: float) -> bool:
        """Return whether it was streaming at this time."""
        return self.during(moment_s, moment_s)

    def during(self, from_s: float, to_s: float) -> bool:
        """Return whether it was streaming at some time between these."""
        return bool(self.came_s) and self.came_s[0] < to_s and from_s < self.came_s[-1]


def ask(
    url: str,
    model: str,
    prompts: Sequence[str],
    which: int,
    tokens: int,
    into: list[Seen] | None = None,
) -> Seen:
    """Stream one answer to its end, over as many gateways as it takes.

    Args:
        into: gets it at once.
    """
    seen = Seen(which, time.monotonic())
    if into is not None:
        into.append(seen)
    _stream(seen, f"{url}/v1/completions", body_of(model, prompts[which], tokens), headers_of())
    seen.over = True
    return seen


def body_of(model: str, prompt: str, tokens: int, *, own_kv: bool = False) -> dict[str, Any]:
    """Return a request for a stream of so many tokens, greedy.

    Args:
        own_kv: share no KV with other requests.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return body | ({"cache_salt": uuid.uuid4().hex} if own_kv else {})


def headers_of() -> dict[str, str]:
    """Return headers for a request with its own id and its own connection."""
    return {"x-request-id": f"chaos-{uuid.uuid4().hex}", "connection": "close"}


def _stream(seen: Seen, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    seen.why = "no end"
    try:
        with (
            httpx.Client(transport=ResumingTransport(), timeout=LIMIT_S) as client,
            client.stream("POST", url, json=body, headers=headers) as answer,
        ):
            seen.replica = answer.headers.get("x-headrace-replica", "")
            if answer.status_code != 200:
                seen.why = f"{answer.status_code}: {answer.read()[:300]!r}"
                return
            for line in answer.iter_lines():
                if seen.read(line):
                    break
    except httpx.TimeoutException:
        seen.why = "hung"
    except httpx.HTTPError as error:
        seen.why = repr(error)


class Load:
    """So many clients, each asking again as soon as it is answered, until `stop`."""

    def __init__(
        self,
        url: str,
        model: str,
        prompts: Sequence[str],
        clients: int,
        tokens: int,
    ) -> None:
        self.seen: list[Seen] = []
        self._ask = lambda which: ask(url, model, prompts, which, tokens, self.seen)
        self._prompts, self._over = len(prompts), threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(number,), daemon=True)
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _client(self, number: int) -> None:
        while not self._over.is_set():
            self._ask(number % self._prompts)
            number += len(self._threads)

    def stop(self) -> list[Seen]:
        """Let each finish its answer; all that was seen."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        return self.seen


def tokens_per_s(seen: Sequence[Seen], from_s: float, to_s: float) -> float:
    """Events in a time, by all streams: tokens, but for those that came together."""
    count = sum(from_s <= came < to_s for one in list(seen) for came in list(one.came_s))
    return count / (to_s - from_s)

"""Clients that keep asking while a test breaks something, and an account of every answer."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.app import MODEL


@dataclass
class Answer:
    """One streamed request, as its client saw it."""

    request_id: str
    began_s: float
    prompt: int
    status: int = 0
    ttft_s: float | None = None
    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    error: dict[str, Any] | None = None
    broken: str | None = None

    @property
    def whole(self) -> bool:
        """Whether it ended as it should."""
        return self.done and self.status == 200 and self.error is None and self.broken is None


def separate_connections(
    url: str, timeout_s: float, headers: Mapping[str, str] | None = None
) -> httpx.Client:
    """A client for many requests, also of several threads, each over a connection of its own. A
    client for each request would cost 30 ms of a core: it reads all certificates of the machine."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.Client(base_url=url, timeout=timeout_s, limits=limits, headers=headers)


def ask(
    client: httpx.Client,
    prompts: Sequence[Any],
    which: int,
    max_tokens: int,
    model: str = MODEL,
    began: Callable[[Answer], None] = lambda answer: None,
) -> Answer:
    """Stream one completion to its end; `began` gets the answer before it is asked for."""
    answer = Answer(f"load-{uuid.uuid4().hex}", time.monotonic(), which)
    began(answer)
    body = {
        "model": model,
        "prompt": prompts[which],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": answer.request_id,
    }
    try:
        with client.stream(
            "POST",
            "/v1/completions",
            json=body,
            headers={"X-Request-Id": answer.request_id},
        ) as response:
            answer.status = response.status_code
            if answer.status != 200:
                answer.error = _error(response.read())
            else:
                _read(response, answer)
    except httpx.HTTPError as error:
        answer.broken = repr(error)
    answer.seconds = time.monotonic() - answer.began_s
    return answer


def _error(body: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return {"message": f"no error in OpenAI's shape: {body[:500]!r}"}


def _read(response: httpx.Response, answer: Answer) -> None:
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            answer.done = True
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            answer.error = event["error"]
            continue
        if answer.ttft_s is None:
            answer.ttft_s = time.monotonic() - answer.began_s
        for choice in event["choices"]:
            answer.tokens += choice.get("token_ids") or []


class Load:
    """So many clients, each asking again as soon as it is answered, until `stop`.

    Args:
        headers: of each request.
    """

    def __init__(
        self,
        url: str,
        prompts: Sequence[Any],
        *,
        clients: int,
        max_tokens: int,
        timeout_s: float = 240.0,
        model: str = MODEL,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.answers: list[Answer] = []
        self._in_flight: dict[int, Answer] = {}
        self._prompts = prompts
        self._max_tokens, self._timeout_s, self._model = max_tokens, timeout_s, model
        self._client = separate_connections(url, timeout_s, headers)
        self._stopped = threading.Event()
        self._busy = threading.Event()
        self._busy.set()
        self._pause_s = 0.0
        self._threads = [
            threading.Thread(target=self._ask_on, args=(n,), daemon=True) for n in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def streaming(self) -> int:
        """How many answers have a first token and not yet half of them all."""
        flying = list(self._in_flight.values())
        return sum(1 <= len(one.tokens) < self._max_tokens // 2 for one in flying)

    def pause(self) -> None:
        """Send nothing new; requests in flight go on."""
        self._stopped.set()
        self._busy.set()

    @contextlib.contextmanager
    def eased(self, pause_s: float) -> Iterator[None]:
        """In here each client waits so long before it asks again. At the end all ask at once."""
        self._pause_s = pause_s
        self._busy.clear()
        try:
            yield
        finally:
            self._busy.set()

    def __str__(self) -> str:
        lost = [answer for answer in self.answers if not answer.whole]
        return f"{len(self.answers)} answers, {len(lost)} of them not whole: {lost[-3:]}"

    def stop(self) -> list[Answer]:
        """Let the requests in flight end; all answers."""
        self.pause()
        for thread in self._threads:
            thread.join(self._timeout_s + 10)
            assert not thread.is_alive(), "a request hangs"
        self._client.close()
        return self.answers

    def _ask_on(self, number: int) -> None:
        turn = number
        while not self._stopped.is_set():
            which = turn % len(self._prompts)
            answer = ask(
                self._client,
                self._prompts,
                which,
                self._max_tokens,
                self._model,
                began=lambda answer: self._in_flight.update({number: answer}),
            )
            del self._in_flight[number]
            self.answers.append(answer)
            turn += len(self._threads)
            self._busy.wait(self._pause_s)

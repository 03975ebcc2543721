"""The client: asks for completions at given times, or with a given number of streams, and notes
when each token came. Raw HTTP over asyncio, since it shares two cores with what it measures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from benchmarks.routers.replica import MODEL
from benchmarks.routers.words import ANSWER

_ANSWER = ANSWER.encode()
_DONE = b"[DONE]"
_END = b"0\r\n\r\n"
DEAD_S = 300.0
"""Without an answer a request has failed by then."""


@dataclass(slots=True)
class Answer:
    """A client's measurements of one request. Times are on `time.perf_counter`.

    Attributes:
        due_s: time at which it should be sent; a delay of sending is part of its TTFT.
        sent_s: time at which it was sent.
        tokens: number of received tokens.
        gaps_s: seconds between two of them.
        error: the error; empty if there was none.
    """

    due_s: float
    prompt: int = 0
    wanted: int = 0
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""
    status: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first."""
        return (self.last_s - self.first_s) / max(1, self.tokens - 1)


class _Connection(asyncio.Protocol):
    """One kept connection, with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._over: asyncio.Future[None] | None = None
        self._head = b""
        self._tail = b""
        self._done = False

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end("" if self._done else f"the connection broke: {exc}")

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        now_s = time.perf_counter()
        if not answer.status:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            head, _, data = self._head.partition(b"\r\n\r\n")
            answer.status = int(head.split(b" ", 2)[1])
            if answer.status != 200:
                answer.error = f"status {answer.status}"
                self.close()
                self._end(answer.error)
                return
        count = data.count(_ANSWER)
        if count:
            if answer.tokens:
                answer.gaps_s.append(now_s - answer.last_s)
                answer.gaps_s.extend([0.0] * (count - 1))
            else:
                answer.first_s = now_s
                answer.gaps_s.extend([0.0] * (count - 1))
            answer.tokens += count
            answer.last_s = now_s
        tail = self._tail + data
        if not self._done and _DONE in tail:
            self._done = True
        self._tail = tail[-16:]
        if self._done and tail.endswith(_END):
            self._end("")

    async def ask(self, data: Sequence[bytes], answer: Answer) -> None:
        """Send a request and wait for the end of its answer."""
        assert self._transport is not None
        self._answer, self._head, self._tail, self._done = answer, b"", b"", False
        self._over = asyncio.get_running_loop().create_future()
        answer.sent_s = time.perf_counter()
        self._transport.writelines(data)
        await self._over

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _end(self, error: str) -> None:
        if self._answer is not None:
            self._answer.error = self._answer.error or error
            self._answer = None
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


class Client:
    """Connections to one server, as many as there are requests at once.

    Args:
        url: `http://address:port` of it.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._idle: list[_Connection] = []

    async def complete(self, prompt: bytes, tokens: int, answer: Answer) -> None:
        """Ask for a completion of a text without quotes; never raises."""
        body = (
            b'{"model":"%b","prompt":"' % MODEL.encode(),
            prompt,
            b'","max_tokens":%d,"temperature":0,"ignore_eos":true,"stream":true}' % tokens,
        )
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: emulated\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % sum(map(len, body))
        )
        try:
            async with asyncio.timeout(DEAD_S):
                connection = await self._connection()
                await connection.ask((head, *body), answer)
            if connection.open and not answer.error:
                self._idle.append(connection)
        except (OSError, TimeoutError) as error:
            answer.error = answer.error or repr(error)
        if not answer.error and answer.tokens != tokens:
            answer.error = f"{answer.tokens} tokens in place of {tokens}"

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()


async def _due(times_s: Sequence[float]) -> AsyncIterator[tuple[int, float]]:
    """Yield each time's number when the time is reached, with that time on `time.perf_counter`."""
    began_s = time.perf_counter()
    for number, at_s in enumerate(times_s):
        wait_s = began_s + at_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        yield number, began_s + at_s


async def open_loop(
    url: str, times_s: Sequence[float], prompts: Sequence[Sequence[bytes]], tokens: Sequence[int]
) -> list[Answer]:
    """Send each request at its time, whatever became of those before.

    Args:
        times_s: seconds from the begin. prompts: in parts. tokens: of each answer.
    """
    client, tasks, answers = Client(url), [], []
    async for number, due_s in _due(times_s):
        text = b"".join(prompts[number])
        answer = Answer(due_s, len(text) // 4, tokens[number])
        answers.append(answer)
        tasks.append(asyncio.create_task(client.complete(text, tokens[number], answer)))
    await asyncio.gather(*tasks)
    client.close()
    return answers


async def closed_loop(
    url: str, streams: int, requests: int, tokens: int, prompts: Sequence[bytes], seconds: float
) -> list[Answer]:
    """So many clients, each of which asks again when it was answered.

    Args:
        requests: of each client. tokens: of each answer. prompts: by turns.
        seconds: over which the clients begin; a burst would measure the queue for the cores.
    """
    client, answers = Client(url), list[Answer]()

    async def one(number: int) -> None:
        await asyncio.sleep(seconds * number / streams)
        for turn in range(requests):
            answer = Answer(time.perf_counter(), 0, tokens)
            answers.append(answer)
            prompt = prompts[(number * requests + turn) % len(prompts)]
            await client.complete(prompt, tokens, answer)

    await asyncio.gather(*map(one, range(streams)))
    client.close()
    return answers

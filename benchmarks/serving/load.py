"""The load generator: closed-loop clients that talk to one endpoint and note when tokens arrive.

One asyncio process, apart from what it measures. Times are taken as a chunk comes off the socket.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from benchmarks.serving.workloads import OUTPUT_TOKENS, Conversation

REQUEST_TIMEOUT_S = 300.0


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    """A choice of a chunk: a chat has `delta`, a completion `text`. `text` may be empty if a token
    is half a character."""

    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass
class Sample:
    """One request as its client saw it, times in seconds from when it was sent.

    `arrivals_s` holds one time for each chunk with content, so `arrivals_s[0]` is the TTFT. Several
    tokens may share a chunk. `error` is None if the answer was whole.
    """

    arrivals_s: list[float] = field(default_factory=list)
    e2e_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    request_id: str | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first content; None if there was none."""
        return self.arrivals_s[0] if self.arrivals_s else None


@dataclass
class Load:
    """Measurements of one repeat of a cell. `client_cpu_s`: CPU seconds of this process in it."""

    samples: list[Sample]
    wall_s: float
    client_cpu_s: float


async def run(
    url: str,
    model: str,
    conversations: Sequence[Conversation],
    concurrency: int,
    *,
    output_tokens: int = OUTPUT_TOKENS,
    ramp_s: float = 0.0,
) -> Load:
    """`concurrency` clients take conversations until all are done; none waits between turns.

    Args:
        url: the endpoint's root.
        model: the name it serves.
        conversations: what is said. A failed turn ends its conversation.
        concurrency: clients.
        output_tokens: of every answer; another number counts as an error.
        ramp_s: seconds over which the clients start, so that they do not ask in step.
    """
    waiting = deque(conversations)
    samples: list[Sample] = []
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def client(number: int) -> None:
            await asyncio.sleep(ramp_s * number / concurrency)
            while waiting:
                talk = waiting.popleft()
                messages: list[dict[str, str]] = []
                if talk.system is not None:
                    messages.append({"role": "system", "content": talk.system})
                for user in talk.users:
                    messages.append({"role": "user", "content": user})
                    sample = await ask(session, model, messages, output_tokens)
                    samples.append(sample)
                    if sample.error is not None:
                        break
                    messages.append({"role": "assistant", "content": sample.text})

        cpu, began = time.process_time(), time.perf_counter()
        await asyncio.gather(*(client(number) for number in range(concurrency)))
        return Load(samples, time.perf_counter() - began, time.process_time() - cpu)


async def ask(
    session: aiohttp.ClientSession,
    model: str,
    messages: Sequence[dict[str, str]],
    output_tokens: int,
) -> Sample:
    """One streamed chat request. Never raises for what the endpoint does: see `Sample.error`."""
    body = {"model": model, "messages": messages}
    return await _stream(session, "/v1/chat/completions", body, output_tokens)


async def complete(
    session: aiohttp.ClientSession, model: str, token_ids: Sequence[int], output_tokens: int
) -> Sample:
    """Measure a completion of a prompt of token ids, like `ask`."""
    body = {"model": model, "prompt": token_ids}
    return await _stream(session, "/v1/completions", body, output_tokens)


async def _stream(
    session: aiohttp.ClientSession, path: str, asked: Mapping[str, Any], output_tokens: int
) -> Sample:
    body = msgspec.json.encode(
        {
            **asked,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    sample = Sample()
    headers = {"content-type": "application/json"}
    began = time.perf_counter()
    try:
        async with session.post(path, data=body, headers=headers) as response:
            sample.request_id = response.headers.get("x-request-id")
            if response.status != 200:
                sample.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                await _read(response.content, sample, began)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.e2e_s = time.perf_counter() - began
    if sample.error is None and sample.output_tokens != output_tokens:
        sample.error = f"{sample.output_tokens} tokens came instead of {output_tokens}"
    if sample.error is None and not sample.arrivals_s:
        sample.error = "no content came"
    return sample


async def _read(stream: aiohttp.StreamReader, sample: Sample, began: float) -> None:
    decode = msgspec.json.Decoder(_Event).decode
    parts: list[str] = []
    rest = b""
    async for chunk in stream.iter_any():
        now = time.perf_counter() - began
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = decode(line[6:])
            if event.error is not None:
                sample.error = f"in the stream: {str(event.error)[:200]}"
            if event.usage is not None:
                sample.prompt_tokens = event.usage.prompt_tokens
                sample.output_tokens = event.usage.completion_tokens
            for choice in event.choices[:1]:
                if choice.text is not None or choice.delta.content:
                    parts.append(choice.text or choice.delta.content or "")
                    sample.arrivals_s.append(now)
    sample.text = "".join(parts)

"""The requests of a run: a part of a production trace, played faster, as text; and how many of them
the engines can take.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.routers.engine import Engine, Machine, Request
from benchmarks.routers.words import VOCABULARY, text_of
from headrace_kvstore.identity.prompt_hash import hash_prompt, root_hash
from headrace_lab.simulate.trace import BLOCK_TOKENS, Trace, parse_trace, read_trace

ROOT = root_hash("vllm-none-hash")
"""Root of the engines' block hashes."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests in order of arrival.

    Attributes:
        at_s: when each comes, [requests].
        prompts: tokens of each, u32; requests that begin alike have equal first blocks.
        answers: tokens of each answer.
        measured: the first of them that counts; those before fill the caches.
    """

    at_s: list[float]
    prompts: list[NDArray[np.uint32]]
    answers: list[int]
    measured: int

    def __len__(self) -> int:
        return len(self.at_s)

    def texts(self) -> list[list[bytes]]:
        """Return the prompts, each in parts that requests share."""
        known: dict[bytes, bytes] = {}
        texts = []
        for prompt in self.prompts:
            parts = [prompt[at : at + BLOCK_TOKENS] for at in range(0, len(prompt), BLOCK_TOKENS)]
            texts.append([known.setdefault(one.tobytes(), text_of(one)) for one in parts])
        return texts

    def at_rate(self, factor: float) -> Work:
        """Return the same requests, so many times as often."""
        return replace(self, at_s=[at_s / factor for at_s in self.at_s])


def cut(trace: Trace, requests: int, warm: int, seed: int = 0, keep: float = 1.0) -> Work:
    """Return the trace's first requests, of which the first `warm` only fill caches, at its speed.

    Requests of one tick of the trace's clock arrive at random times within it.

    Args:
        keep: share of the conversations that are used, each with all of its requests. Requests
            belong to one conversation if their second block is the same (nearly all requests have
            the same first block).

    Raises:
        ValueError: the trace has fewer requests.
    """
    count, rng = requests + warm, np.random.default_rng(seed)
    at = trace.arrival_s + rng.uniform(0.0, trace.tick_s, len(trace))
    rows = np.flatnonzero(_taken(trace, rng) < keep)
    if count > len(rows):
        raise ValueError(f"the trace has {len(rows)} such requests, {count} are wanted")
    rows = rows[np.argsort(at[rows], kind="stable")][:count]
    blocks: dict[int, NDArray[np.uint32]] = {}
    prompts = []
    for row in rows.tolist():
        keys = trace.keys[trace.starts[row] : trace.starts[row + 1]].tolist()
        for key in keys:
            if key not in blocks:
                blocks[key] = _block(np.random.default_rng((seed, 0, key)), BLOCK_TOKENS)
        tail = int(trace.prompt[row]) - len(keys) * BLOCK_TOKENS
        last = _block(np.random.default_rng((seed, 1, row)), tail)
        prompts.append(np.concatenate([*(blocks[key] for key in keys), last]))
    answers = trace.output[rows].tolist()
    return Work((at[rows] - at[rows[0]]).tolist(), prompts, answers, warm)


def _taken(trace: Trace, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return a random number from 0 to 1 for each request, the same within a conversation."""
    drawn, alone = rng.random(trace.distinct), rng.random(len(trace))
    long = np.diff(trace.starts) > 1
    second = trace.keys[np.where(long, trace.starts[:-1] + 1, 0)]
    return np.where(long, drawn[second], alone)


def _block(rng: np.random.Generator, tokens: int) -> NDArray[np.uint32]:
    return rng.integers(0, VOCABULARY, tokens, dtype=np.uint32)


def trace_of(path: Path | None) -> Trace:
    """Return the trace of a file; without one, conversations that are made up in its likeness."""
    return made_up() if path is None else read_trace(path)


def made_up(requests: int = 3000, seed: int = 0) -> Trace:
    """Conversations of several turns over one beginning: prompts of about 12,000 tokens, answers of
    about 340, and somewhat more than a third of the blocks seen before, as in the conversation
    trace of Mooncake."""
    rng = random.Random(seed)
    lines: list[tuple[float, str]] = []
    number = 1
    now_ms = 0.0
    while len(lines) < requests:
        now_ms += rng.expovariate(1.0 / 600.0)
        ids, tokens, at_ms = [0], BLOCK_TOKENS, now_ms
        for turn in range(1 + min(9, int(rng.expovariate(1.0 / 1.2)))):
            size = rng.lognormvariate(8.6, 1.1) if turn == 0 else rng.lognormvariate(7.6, 1.0)
            tokens = min(100_000, tokens + int(size))
            answer = max(1, min(2000, int(rng.lognormvariate(5.5, 0.9))))
            while len(ids) * BLOCK_TOKENS < tokens:
                ids.append(number)
                number += 1
            told = ids[: -(-tokens // BLOCK_TOKENS)]
            line = (
                f'{{"timestamp": {int(at_ms)}, "input_length": {tokens}, '
                f'"output_length": {answer}, "hash_ids": {told}}}'
            )
            lines.append((at_ms, line))
            tokens += answer
            at_ms += 1e3 * rng.lognormvariate(3.5, 1.0)
    lines.sort()
    return parse_trace([line for _, line in lines[:requests]], "made up")


def capacity(work: Work, machine: Machine, engines: int) -> float:
    """Requests a second that the engines complete, all of them busy all the time: in virtual time,
    each request goes where the fewest prompt tokens are computed before its own are, its own
    included. Requests before `work.measured` fill the caches and do not count.
    """
    all_engines = [Engine(machine) for _ in range(engines)]
    ends = [(0.0, number) for number in range(engines)]
    ended = [0]
    requests = _requests(work, machine, ended)
    most_ahead = 4 * machine.step_tokens
    sent, began_s, began = 0, 0.0, 0
    now_s = 0.0
    while True:
        while sent < len(requests):
            one = requests[sent]
            ahead = [engine.queue()[0] for engine in all_engines]
            if min(ahead) > most_ahead:
                break
            best = min(
                range(engines),
                key=lambda e: (
                    ahead[e] - machine.block_tokens * all_engines[e].cache.match(one.keys)
                ),
            )
            all_engines[best].submit(one)
            sent += 1
            if sent == work.measured:
                began_s, began = now_s, ended[0]
        if sent == len(requests):
            return (ended[0] - began) / max(now_s - began_s, 1e-9)
        now_s, number = heapq.heappop(ends)
        engine = all_engines[number]
        engine.end()
        heapq.heappush(ends, (now_s + (engine.begin() or 0.005), number))


def _requests(work: Work, machine: Machine, ended: list[int]) -> list[Request]:
    def request(prompt: NDArray[np.uint32], answer: int) -> Request:
        def emit(emitted: int) -> None:
            ended[0] += emitted == answer

        return Request(len(prompt), hash_prompt(prompt, machine.block_tokens, ROOT), answer, emit)

    return [request(*one) for one in zip(work.prompts, work.answers, strict=True)]


def reachable(work: Work, block_tokens: int) -> float:
    """Return the share of the measured prompts' tokens that an endless cache would have had."""
    seen: set[bytes] = set()
    cached = total = 0
    for number, (prompt, keys) in enumerate(_keyed(work, block_tokens)):
        held = 0
        while held < min(len(keys), (prompt - 1) // block_tokens) and keys[held] in seen:
            held += 1
        seen.update(keys)
        if number >= work.measured:
            cached += held * block_tokens
            total += prompt
    return cached / max(total, 1)


def _keyed(work: Work, block_tokens: int) -> Sequence[tuple[int, list[bytes]]]:
    return [(len(one), hash_prompt(one, block_tokens, ROOT)) for one in work.prompts]

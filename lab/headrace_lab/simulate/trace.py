"""Traces of requests: reading them, stretching them in time, and multiplying them.

A trace is a file in Mooncake's format, one JSON object per line: `timestamp` (ms), `input_length`
and `output_length` (tokens), and `hash_ids`, the prompt's chain of blocks of 512 tokens. Equal ids
at equal positions are equal prefixes.

A `Trace` is a file. A `Workload` is the input of one simulated run: as many copies of the trace as
the load needs. Each copy has its own blocks and begins at a random time, so sessions interleave and
no copy shares a block with another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 512
MAX_REQUESTS = 5_000_000
MAX_BLOCKS = 50_000_000
MAX_TOKENS = 10_000_000
"""Maximum requests and blocks of a trace, and maximum tokens of one prompt or answer."""
MAX_KEYS = 2**31 - 1


class TraceError(ValueError):
    """A trace that cannot be used. The text says which line, and why."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        arrival_s: seconds since the first, float64 [requests].
        prompt, output: tokens, int32 [requests].
        starts: where each prompt's chain begins in `keys`, int64 [requests + 1].
        keys: numbers of the prompts' full blocks, from 0, int32 [blocks].
        distinct: number of different blocks.
        tick_s: the clock's step. Requests of one tick arrived at some time within it.
        block_tokens: tokens of a block.
    """

    arrival_s: NDArray[np.float64]
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    starts: NDArray[np.int64]
    keys: NDArray[np.int32]
    distinct: int
    tick_s: float
    block_tokens: int = BLOCK_TOKENS

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the end of the last tick."""
        return float(self.arrival_s[-1]) + max(self.tick_s, 1e-3)


def sample_trace() -> Path:
    """Return the trace that comes with Headrace: 370 requests of a production chat service."""
    return Path(str(files("headrace_lab.simulate") / "traces" / "sample.jsonl"))


def read_trace(path: Path) -> Trace:
    """Read a file and check each line.

    Only full blocks are kept: vLLM caches no others.

    Raises:
        TraceError: there is no such file, a line is invalid, or the file is too large.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_trace(lines, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None


def parse_trace(lines: Iterable[str], name: str = "trace") -> Trace:
    """Read a trace from lines, as `read_trace` does from a file.

    Raises:
        TraceError: a line is invalid, there is no request, or there are too many.
    """
    arrival, prompt, output, lengths = [], [], [], []
    numbers: dict[int, int] = {}
    keys: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            at_ms, tokens, answer, ids = _request(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from None
        full = tokens // BLOCK_TOKENS
        keys.extend(numbers.setdefault(i, len(numbers)) for i in ids[:full])
        arrival.append(at_ms / 1e3)
        prompt.append(tokens)
        output.append(answer)
        lengths.append(full)
        if len(arrival) > MAX_REQUESTS or len(keys) > MAX_BLOCKS:
            raise TraceError(
                f"{name}, line {number}: more than {MAX_REQUESTS:,} requests or "
                f"{MAX_BLOCKS:,} blocks"
            )
    if not arrival:
        raise TraceError(f"{name}: no requests")
    order = np.argsort(arrival, kind="stable")
    times = np.asarray(arrival, np.float64)[order]
    chains, starts = _gather(np.asarray(keys, np.int32), np.asarray(lengths, np.int64), order)
    gaps = np.diff(np.unique(times))
    tick_s = float(np.median(gaps)) if len(gaps) and len(gaps) + 1 < len(times) / 2 else 0.0
    return Trace(
        arrival_s=times - times[0],
        prompt=np.asarray(prompt, np.int32)[order],
        output=np.asarray(output, np.int32)[order],
        starts=starts,
        keys=chains,
        distinct=len(numbers),
        tick_s=tick_s,
    )


def _request(line: str) -> tuple[float, int, int, list[int]]:
    try:
        line_fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(line_fields, dict):
        raise ValueError("not a JSON object")
    at_ms = line_fields.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < 1e12:
        raise ValueError("timestamp must be milliseconds, 0 or more")
    tokens = _tokens(line_fields, "input_length")
    answer = _tokens(line_fields, "output_length")
    ids = line_fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and abs(i) < 2**63 for i in ids):
        raise ValueError("hash_ids must be a list of integers")
    if len(ids) < tokens // BLOCK_TOKENS:
        raise ValueError(
            f"{len(ids)} hash_ids for {tokens} tokens: each stands for {BLOCK_TOKENS} of them"
        )
    return float(at_ms), tokens, answer, ids


def _tokens(line_fields: dict[str, Any], name: str) -> int:
    value = line_fields.get(name)
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} must be an integer from 1 to {MAX_TOKENS:,}")
    return value


def with_block_size(trace: Trace, tokens: int) -> Trace:
    """Return the same requests with keys of smaller full blocks, of `tokens` tokens.

    Blocks after the last full block of the trace's size are unique to their prompt.

    Raises:
        TraceError: the trace's block size is no multiple of `tokens`, or there are too many blocks.
    """
    parts, rest = divmod(trace.block_tokens, tokens)
    if rest:
        raise TraceError(f"blocks of {trace.block_tokens} tokens do not divide into {tokens}")
    lengths = trace.prompt.astype(np.int64) // tokens
    starts = np.concatenate([[0], np.cumsum(lengths)])
    if starts[-1] > MAX_BLOCKS:
        raise TraceError(f"{starts[-1]:,} blocks of {tokens} tokens are too many")
    row = np.repeat(np.arange(len(trace)), lengths)
    at = np.arange(starts[-1]) - starts[row]
    shared = at < parts * np.diff(trace.starts)[row]
    keys = np.empty(len(row), np.int64)
    from_trace = trace.keys[trace.starts[row[shared]] + at[shared] // parts].astype(np.int64)
    keys[shared] = parts * from_trace + at[shared] % parts
    own = len(row) - int(shared.sum())
    keys[~shared] = parts * trace.distinct + np.arange(own)
    return replace(
        trace,
        starts=starts,
        keys=keys.astype(np.int32),
        distinct=parts * trace.distinct + own,
        block_tokens=tokens,
    )


def _gather(
    keys: NDArray[np.int32], lengths: NDArray[np.int64], order: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the chains in another order, and the start of each."""
    old = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
    shift = np.repeat(old[order] - starts[:-1], lengths[order])
    return keys[np.arange(len(keys)) + shift], starts


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one run, in order of arrival.

    Attributes:
        arrival_s: float64 [requests].
        row: index of the request in the trace, int32 [requests].
        offset: number added to the keys of its blocks, int64 [requests].
        seconds: how long requests arrive.
        keys: upper bound of all blocks' numbers, exclusive.
    """

    trace: Trace
    arrival_s: NDArray[np.float64]
    row: NDArray[np.int32]
    offset: NDArray[np.int64]
    seconds: float
    keys: int

    def __len__(self) -> int:
        return len(self.arrival_s)


def scale_trace(trace: Trace, rate: float, seconds: float, seed: int) -> Workload:
    """Return a workload of `seconds` with `rate` times the request rate of the trace.

    `ceil(rate)` copies run at the trace's own speed or slower. Each begins at a random position of
    the trace, and at the trace's end continues from its beginning with new blocks. The requests of
    one tick of the trace's clock arrive at random times within it.

    Raises:
        TraceError: the rate or the time is not above 0, or the run would be too large.
    """
    if not (0 < rate < 1e6 and 0 < seconds < 1e7):
        raise TraceError(f"rate and seconds must be above 0, not {rate} and {seconds}")
    copies = int(np.ceil(rate))
    speed = rate / copies
    rounds = int(np.ceil(seconds * speed / trace.seconds)) + 1
    expected = len(trace) * rate * seconds / trace.seconds
    if expected > 4 * MAX_REQUESTS or copies * rounds * trace.distinct > MAX_KEYS:
        raise TraceError(
            f"{rate:.0f} times the trace for {seconds:.0f} s are too many requests or blocks"
        )
    rng = np.random.default_rng(seed)
    times, rows, offsets = [], [], []
    for copy in range(copies):
        begin = rng.uniform(0.0, trace.seconds)
        for turn in range(rounds):
            at = trace.arrival_s + rng.uniform(0.0, trace.tick_s, len(trace))
            at = (at - begin + turn * trace.seconds) / speed
            inside = np.flatnonzero((at >= 0.0) & (at < seconds))
            times.append(at[inside])
            rows.append(inside.astype(np.int32))
            offsets.append(np.full(len(inside), (copy * rounds + turn) * trace.distinct))
    at = np.concatenate(times)
    order = np.argsort(at, kind="stable")
    return Workload(
        trace=trace,
        arrival_s=at[order],
        row=np.concatenate(rows)[order],
        offset=np.concatenate(offsets).astype(np.int64)[order],
        seconds=seconds,
        keys=copies * rounds * trace.distinct,
    )

"""Encoding of a plan as the bytes of an internal header. Decoding checks every value."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec

from headrace.router.plan import MAX_REASON_CHARS, MAX_REASONS, MAX_RUNS, Plan, Run

MAX_BYTES = 8_192
"""Maximum size of an encoded plan; proxies and servers accept headers of at least this size."""
_DECODER = msgspec.json.Decoder(Plan)


def encode(plan: Plan) -> bytes:
    """Return a plan as compact JSON in ASCII, at most `MAX_BYTES` long.

    Reasons are shortened. If there are more than 32 runs, the plan computes all from the 32nd on.

    Raises:
        ValueError: a name in the plan is longer than 128 characters.
    """
    reasons = [_short(reason) for reason in plan.reasons[:MAX_REASONS]]
    shorter = replace(
        plan,
        plan_id="",
        predicted={part: float(f"{seconds:.6g}") for part, seconds in plan.predicted.items()},
        reasons=tuple(reasons),
        runs=_few(plan.runs),
        fallback=_few(plan.fallback),
    )
    data = _bytes(shorter)
    if len(data) > MAX_BYTES:
        data = _bytes(replace(shorter, reasons=tuple(reasons[:1])))
    decode(data)
    return data


def decode(data: bytes) -> Plan:
    """Return the plan in a header.

    Raises:
        ValueError: the data is no plan, or a value is out of bounds.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"a plan has at most {MAX_BYTES} bytes, not {len(data)}")
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a plan: {error}") from error


def _bytes(plan: Plan) -> bytes:
    return json.dumps(msgspec.to_builtins(plan), separators=(",", ":")).encode()


def _few(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    kept, rest = runs[: MAX_RUNS - 1], runs[MAX_RUNS - 1 :]
    return (*kept, Run("compute", sum(run.tokens for run in rest))) if len(rest) > 1 else runs


def _short(reason: str) -> str:
    if len(reason) <= MAX_REASON_CHARS:
        return reason
    return reason[: MAX_REASON_CHARS - 3] + "..."

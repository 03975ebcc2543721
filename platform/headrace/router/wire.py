"""Encoding of a plan as the bytes of an internal header. Decoding checks every value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from headrace.router.pairs import LOCAL_PARTS, REMOTE_PARTS
from headrace.router.plan import RUNNERS_UP, Plan, Run, RunnerUp
from headrace_kvstore.supply import MEDIA

MAX_BYTES = 8_192
"""Maximum size of an encoded plan; proxies and servers accept headers of at least this size."""
_NAME_CHARS, _REASON_CHARS, _REASONS, _RUNS = 128, 400, 4, 32
_TOKENS_MAX, _SECONDS_MAX = 1 << 40, 1e9
_SOURCES = {"hbm", "compute", *MEDIA}
_PARTS = {
    f"{kind}.{part}"
    for kind, parts in (("local", LOCAL_PARTS), ("remote", REMOTE_PARTS))
    for part in (*parts, "total")
}


def encode(plan: Plan) -> bytes:
    """Return a plan as compact JSON in ASCII, at most `MAX_BYTES` long.

    Reasons are shortened. If there are more than 32 runs, the plan computes all from the 32nd on.

    Raises:
        ValueError: a name in the plan is longer than 128 characters.
    """
    told = plan.to_dict()
    for left_out in ("kind", "loaded_tokens", "loaded_from", "plan_id", "made_by"):
        del told[left_out]
    told["predicted"] = {part: float(f"{s:.6g}") for part, s in plan.predicted.items()}
    told["reasons"] = [_short(reason) for reason in plan.reasons[:_REASONS]]
    told["runs"], told["fallback"] = _few(plan.runs), _few(plan.fallback)
    told["runners_up"] = [list(other) for other in plan.runners_up]
    data = json.dumps(told, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        told["runners_up"], told["reasons"] = [], told["reasons"][:1]
        data = json.dumps(told, separators=(",", ":")).encode()
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
        told = json.loads(data)
        return _plan(told)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a plan: {error!r}") from error


def _plan(told: Mapping[str, Any]) -> Plan:
    prefill = told["prefill"]
    predicted = {str(part): _seconds(s) for part, s in told["predicted"].items()}
    if not predicted.keys() <= _PARTS or len(told["runners_up"]) > RUNNERS_UP:
        raise ValueError("not a plan: it has parts that there are not, or too many runners-up")
    return Plan(
        request_id=_name(told["request_id"]),
        prefill=None if prefill is None else _name(prefill),
        prompt_tokens=_count(told["prompt_tokens"]),
        cached_decode_tokens=_count(told["cached_decode_tokens"]),
        cached_prefill_tokens=_count(told["cached_prefill_tokens"]),
        reachable_tokens=_count(told["reachable_tokens"]),
        decode=_name(told["decode"]),
        replica=_name(told["replica"]),
        runs=_runs(told["runs"]),
        fallback=_runs(told["fallback"]),
        predicted=predicted,
        timeout_s=_seconds(told["timeout_s"]),
        reasons=_reasons(told["reasons"]),
        runners_up=tuple(
            RunnerUp(_name(d), _name(p), _seconds(s)) for d, p, s in told["runners_up"]
        ),
        broken=_reasons(told["broken"]),
        explores=told["explores"] is True,
    )


def _few(runs: tuple[Run, ...]) -> list[tuple[str, int]]:
    kept, rest = runs[: _RUNS - 1], runs[_RUNS - 1 :]
    if len(rest) > 1:
        rest = (Run("compute", sum(run.tokens for run in rest)),)
    return [(run.source, run.tokens) for run in (*kept, *rest)]


def _runs(told: Any) -> tuple[Run, ...]:
    runs = tuple(Run(source, _count(tokens)) for source, tokens in told)
    if len(runs) > _RUNS or not {run.source for run in runs} <= _SOURCES:
        raise ValueError("not a plan: it has too many runs, or sources that there are not")
    return runs


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARS else reason[: _REASON_CHARS - 3] + "..."


def _name(told: Any) -> str:
    if not isinstance(told, str) or len(told) > _NAME_CHARS:
        raise ValueError(f"not a plan: a name is a text of at most {_NAME_CHARS} characters")
    return told


def _reasons(told: Any) -> tuple[str, ...]:
    reasons = tuple(told)
    if len(reasons) > _REASONS or not all(
        isinstance(reason, str) and len(reason) <= _REASON_CHARS for reason in reasons
    ):
        raise ValueError(f"not a plan: at most {_REASONS} reasons of {_REASON_CHARS} characters")
    return reasons


def _count(told: Any) -> int:
    if type(told) is not int or not 0 <= told <= _TOKENS_MAX:
        raise ValueError("not a plan: a number of tokens is out of bounds")
    return told


def _seconds(told: Any) -> float:
    if type(told) not in (int, float) or not math.isfinite(told) or abs(told) > _SECONDS_MAX:
        raise ValueError("not a plan: seconds out of bounds")
    return float(told)

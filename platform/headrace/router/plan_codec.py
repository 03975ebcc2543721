"""Encoding of a plan as the bytes of an internal header. Decoding checks every value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from headrace.router.placement.pair_search import LOCAL_PARTS, REMOTE_PARTS
from headrace.router.plan import Plan, Run
from headrace_kvstore.lookup.availability import MEDIA

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
    fields = plan.to_dict()
    for left_out in ("kind", "loaded_tokens", "loaded_from", "plan_id", "made_by"):
        del fields[left_out]
    fields["predicted"] = {part: float(f"{s:.6g}") for part, s in plan.predicted.items()}
    fields["reasons"] = [_short(reason) for reason in plan.reasons[:_REASONS]]
    fields["runs"], fields["fallback"] = _few(plan.runs), _few(plan.fallback)
    data = json.dumps(fields, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        fields["reasons"] = fields["reasons"][:1]
        data = json.dumps(fields, separators=(",", ":")).encode()
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
        fields = json.loads(data)
        return _plan(fields)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a plan: {error!r}") from error


def _plan(fields: Mapping[str, Any]) -> Plan:
    prefill = fields["prefill"]
    predicted = {str(part): _seconds(s) for part, s in fields["predicted"].items()}
    if not predicted.keys() <= _PARTS:
        raise ValueError("not a plan: it has parts that there are not")
    return Plan(
        request_id=_name(fields["request_id"]),
        prefill=None if prefill is None else _name(prefill),
        prompt_tokens=_count(fields["prompt_tokens"]),
        cached_decode_tokens=_count(fields["cached_decode_tokens"]),
        cached_prefill_tokens=_count(fields["cached_prefill_tokens"]),
        reachable_tokens=_count(fields["reachable_tokens"]),
        decode=_name(fields["decode"]),
        replica=_name(fields["replica"]),
        runs=_runs(fields["runs"]),
        fallback=_runs(fields["fallback"]),
        predicted=predicted,
        timeout_s=_seconds(fields["timeout_s"]),
        reasons=_reasons(fields["reasons"]),
        broken=_reasons(fields["broken"]),
        explores=fields["explores"] is True,
    )


def _few(runs: tuple[Run, ...]) -> list[tuple[str, int]]:
    kept, rest = runs[: _RUNS - 1], runs[_RUNS - 1 :]
    if len(rest) > 1:
        rest = (Run("compute", sum(run.tokens for run in rest)),)
    return [(run.source, run.tokens) for run in (*kept, *rest)]


def _runs(value: Any) -> tuple[Run, ...]:
    runs = tuple(Run(source, _count(tokens)) for source, tokens in value)
    if len(runs) > _RUNS or not {run.source for run in runs} <= _SOURCES:
        raise ValueError("not a plan: it has too many runs, or sources that there are not")
    return runs


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARS else reason[: _REASON_CHARS - 3] + "..."


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _NAME_CHARS:
        raise ValueError(f"not a plan: a name is a text of at most {_NAME_CHARS} characters")
    return value


def _reasons(value: Any) -> tuple[str, ...]:
    reasons = tuple(value)
    if len(reasons) > _REASONS or not all(
        isinstance(reason, str) and len(reason) <= _REASON_CHARS for reason in reasons
    ):
        raise ValueError(f"not a plan: at most {_REASONS} reasons of {_REASON_CHARS} characters")
    return reasons


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _TOKENS_MAX:
        raise ValueError("not a plan: a number of tokens is out of bounds")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > _SECONDS_MAX:
        raise ValueError("not a plan: seconds out of bounds")
    return float(value)

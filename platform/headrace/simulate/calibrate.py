"""Takes the fits of a running app over into the simulated machines.

Two forms are read. The answer of `GET /headrace/v1/status`, where each decode replica tells its
router's fits as straight lines; their mean over the replicas is taken. And a file with
whole step-time models::

    {"prefill": {...}, "decode": {...}, "kv_blocks": 805, "kv_bytes_per_token": 131072}

`prefill` and `decode` are of `StepTime.to_dict`; each field may be left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.simulate.hardware import Engine, Hardware
from headrace_engine.steptime import KNOTS, StepTime

_SIDES = "prefill", "decode"


class CalibrationError(ValueError):
    """Fits that cannot be used. The text says which, and why."""


def calibrated(hardware: Hardware, told: Any) -> Hardware:
    """The hardware with what was measured.

    Raises:
        CalibrationError: this is neither of the forms, or a number is out of bounds.
    """
    if not isinstance(told, dict):
        raise CalibrationError("not a JSON object")
    found = _from_status(told) if "replicas" in told else told
    sides: dict[str, Any] = {}
    for name in _SIDES:
        side: Engine = getattr(hardware, name)
        if name in found:
            try:
                side = replace(side, steps=StepTime.from_dict(found[name]))
            except ValueError as error:
                raise CalibrationError(f"{name}: {error}") from None
        if "kv_blocks" in found:
            side = replace(side, kv_blocks=_whole(found, "kv_blocks"))
        if "step_tokens" in found:
            tokens = _whole(found, "step_tokens")
            most = min(side.max_requests, max(1, tokens - 1))
            side = replace(side, step_tokens=tokens, max_requests=most)
        sides[name] = side
    whole = replace(hardware, **sides)
    if "kv_bytes_per_token" in found:
        whole = replace(whole, kv_bytes_per_token=_whole(found, "kv_bytes_per_token"))
    transfer = found.get("transfer")
    if isinstance(transfer, Mapping):
        fixed_s, each_s = (_number(transfer, name) for name in ("fixed_s", "each_s"))
        speed = 1.0 / max(each_s, 1e-15)
        whole = replace(whole, transfer_fixed_s=fixed_s, link_bytes_s=speed, inside_bytes_s=speed)
    return whole


def _from_status(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a status document says of the engines, in the other form."""
    replicas = told["replicas"] if isinstance(told["replicas"], list) else []
    routers = [one.get("router") for one in replicas if isinstance(one, dict)]
    costs = [
        router["fits"]
        for router in routers
        if isinstance(router, dict) and isinstance(router.get("fits"), dict)
    ]
    if not costs:
        raise CalibrationError("the status has no decode replica with fits")
    found: dict[str, Any] = {}
    for name in _SIDES:
        lines = [
            cost[f"{name}_step"] for cost in costs if isinstance(cost.get(f"{name}_step"), dict)
        ]
        if lines:
            found[name] = _line(lines)
    moves = [cost["transfer"] for cost in costs if isinstance(cost.get("transfer"), dict)]
    if moves:
        found["transfer"] = {
            name: _mean(moves, name) for name in ("fixed_s", "each_s") if name in moves[0]
        }
    return found


def _line(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A step-time model that is a straight line, as `StepTime.to_dict`."""
    base, token, context, pair = (
        _mean(lines, name)
        for name in ("base_s", "per_token_s", "per_context_token_s", "per_pair_s")
    )
    plain = np.log(np.maximum(base + token * np.asarray(KNOTS), 1e-9)).tolist()
    rates = [math.log(max(rate, 1e-15)) for rate in (1.0, 1.0, context, pair)]
    return {
        "state": [*plain, *plain, *rates],
        "square": 0.01,
        "samples": 1,
        "padded_sizes": [],
    }


def _mean(told: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(_number(one, name) for one in told) / len(told)


def _number(told: Mapping[str, Any], name: str) -> float:
    value = told.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise CalibrationError(f"{name} must be a number from 0 on, not {value!r}")
    return float(value)


def _whole(told: Mapping[str, Any], name: str) -> int:
    value = told.get(name)
    if type(value) is not int or not 1 <= value < 1 << 40:
        raise CalibrationError(f"{name} must be a whole number from 1 on, not {value!r}")
    return value

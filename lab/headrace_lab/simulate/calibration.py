"""Sets the simulated machines to the fits of a running app.

Two formats are accepted. One is the answer of `GET /headrace/v1/status`, which contains each decode
replica's router fits and the sizes of its engines; the mean of the fits over the replicas is used.
The other is a file::

    {"prefill": {...}, "decode": {...}, "kv_blocks": 805, "kv_bytes_per_token": 131072}

`prefill` and `decode` are results of `StepTime.to_dict`; each field may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace_engine.step_time import StepTime
from headrace_lab.simulate.hardware import Engine, Hardware

_SIDES = "prefill", "decode"


class CalibrationError(ValueError):
    """Fits that cannot be used. The text names the fit and the reason."""


def calibrate_hardware(hardware: Hardware, document: Any) -> Hardware:
    """Return the hardware with the measured values.

    Raises:
        CalibrationError: the data has neither format, or a number is out of bounds.
    """
    if not isinstance(document, dict):
        raise CalibrationError("not a JSON object")
    found = _from_status(document) if "replicas" in document else document
    changes: dict[str, Any] = {}
    for name in _SIDES:
        side: Engine = getattr(hardware, name)
        if name in found:
            try:
                side = replace(side, steps=StepTime.from_dict(found[name]))
            except ValueError as error:
                raise CalibrationError(f"{name}: {error}") from None
        for field in ("kv_blocks", f"{name}_blocks"):
            if field in found:
                side = replace(side, kv_blocks=_whole(found, field))
        if "step_tokens" in found:
            tokens = _whole(found, "step_tokens")
            most = min(side.max_requests, max(1, tokens - 1))
            side = replace(side, step_tokens=tokens, max_requests=most)
        changes[name] = replace(
            side, has_prefill_admission=found.get("has_prefill_admission") is True
        )
    for field in ("kv_bytes_per_token", "block_tokens", "engines_per_node"):
        if field in found:
            changes[field] = _whole(found, field)
    for field in ("handoff_s", "store_bytes"):
        if field in found:
            changes[field] = _number(found, field)
    if isinstance(found.get("transfer"), Mapping):
        changes["transfer_fixed_s"], speed = _line_of(found["transfer"])
        changes["link_bytes_s"] = changes["inside_bytes_s"] = speed
    if isinstance(found.get("load"), Mapping):
        changes["store_fixed_s"], changes["store_bytes_s"] = _line_of(found["load"])
    if "mixed_nodes" in found:
        changes["mixed_nodes"] = found["mixed_nodes"] is True
    try:
        return replace(hardware, **changes)
    except ValueError as error:
        raise CalibrationError(str(error)) from None


def _line_of(document: Mapping[str, Any]) -> tuple[float, float]:
    """Return the fixed seconds, and the bytes a second."""
    return _number(document, "fixed_s"), 1.0 / max(_number(document, "each_s"), 1e-15)


def _from_status(document: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a status document to the file's format."""
    replicas = document["replicas"] if isinstance(document["replicas"], list) else []
    routers = [one.get("router") for one in replicas if isinstance(one, dict)]
    costs = [
        router["fits"]
        for router in routers
        if isinstance(router, dict) and isinstance(router.get("fits"), dict)
    ]
    if not costs:
        raise CalibrationError("the status has no decode replica with fits")
    served = {
        str(one.get("model")) for one in replicas if isinstance(one, dict) and "router" in one
    }
    if len(served) > 1:
        raise CalibrationError(
            f"the app serves {', '.join(sorted(served))}, whose engines differ: save its status to "
            "a file, and remove the replicas of all models but one"
        )
    found: dict[str, Any] = {}
    steps = [router.get("step_times") for router in routers if isinstance(router, dict)]
    for name in _SIDES:
        models = [one[name] for one in steps if isinstance(one, dict) and name in one]
        if models:
            try:
                found[name] = _mean_model(models)
            except (ValueError, TypeError) as error:
                raise CalibrationError(f"{name}: {error}") from None
    for name, field in (("transfer", "transfer"), ("load_dram", "load")):
        moves = [cost[name] for cost in costs if isinstance(cost.get(name), dict)]
        if moves:
            found[field] = {part: _mean(moves, part) for part in ("fixed_s", "each_s")}
    waits = [cost[name] for cost in costs for name in ("call", "handoff") if name in cost]
    if waits:
        found["handoff_s"] = _mean(waits, "seconds") * len(waits) / len(costs)
    for router in routers:
        if isinstance(router, dict) and isinstance(router.get("engines"), dict):
            found |= router["engines"]
            found["has_prefill_admission"] = True
            sides = router.get("prefill")
            found["mixed_nodes"] = isinstance(sides, dict) and any(
                isinstance(side, dict) and side.get("same_machine") is True
                for side in sides.values()
            )
            break
    if found.get("mixed_nodes"):
        found["engines_per_node"] = max(1, len(replicas))
    found["store_bytes"] = _store_bytes(document.get("store"))
    return found


def _store_bytes(nodes: Any) -> float:
    """Return the DRAM bytes of the first node's store that has DRAM; 0 without one."""
    for node in nodes if isinstance(nodes, list) else []:
        tiers = node.get("tiers") if isinstance(node, dict) else None
        dram = tiers.get("dram") if isinstance(tiers, dict) else None
        if isinstance(dram, dict):
            return _number(dram, "size_bytes")
    return 0.0


def _mean_model(models: Sequence[Any]) -> dict[str, Any]:
    """Return the geometric mean of step-time models, in the form of `StepTime.to_dict`."""
    first = StepTime.from_dict(models[0]).to_dict()
    states = [StepTime.from_dict(model).to_dict()["state"] for model in models]
    return {**first, "state": np.mean(states, axis=0).tolist()}


def _mean(models: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(_number(one, name) for one in models) / len(models)


def _number(document: Mapping[str, Any], name: str) -> float:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise CalibrationError(f"{name} must be a number from 0 on, not {value!r}")
    return float(value)


def _whole(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    if type(value) is not int or not 1 <= value < 1 << 40:
        raise CalibrationError(f"{name} must be a whole number from 1 on, not {value!r}")
    return value

"""Metrics that decode replicas publish for the policy, as Serve's custom metrics: numbers by name.

A replica publishes the number of its requests, the cost of its last requests, and its engine's step
times: the part of its router's snapshot that `disaggregation.load_of` reads. Serve transfers only
numbers, so the entries of lists get numbered names. Metrics are input from a peer, and are checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.disaggregation import kv_tokens
from headrace_engine.step_time import StepTime

REQUESTS = "headrace.requests"
"""Name of the metric: requests that the replica received since its start."""
AGE_S = "headrace.age_s"
"""Name of the metric: seconds since the replica's start."""
AT_S = "headrace.at_s"
"""Name of the time at which the replica took these numbers; the policy adds it to them."""
_TRAFFIC, _STEPS = "headrace.traffic.", "headrace.steps."
_MOST = 1e15


def encode_metrics(router: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics for a router's snapshot with `outcomes`; empty without traffic."""
    traffic = router["outcomes"]["traffic"]
    if not traffic.get("rate", 0.0) > 0.0:
        return {}
    steps = router["step_times"]["decode"]
    metrics = {f"{_TRAFFIC}{name}": float(value) for name, value in traffic.items()}
    metrics |= {f"{_STEPS}state.{n}": float(one) for n, one in enumerate(steps["state"])}
    metrics |= {f"{_STEPS}size.{n}": float(one) for n, one in enumerate(steps["padded_sizes"])}
    metrics |= {f"{_STEPS}{name}": float(steps[name]) for name in ("square", "samples")}
    length = traffic["prompt_tokens"] + traffic["answer_tokens"] / 2
    tokens = kv_tokens(router["engines"], length)
    return {**metrics, "headrace.kv_tokens": tokens}


def decode_metrics(metrics: Mapping[str, float]) -> dict[str, Any] | None:
    """Return the part of the snapshot in a replica's metrics; None if they are invalid."""
    if not all(isinstance(one, int | float) and abs(one) < _MOST for one in metrics.values()):
        return None
    try:
        router: dict[str, Any] = {
            "outcomes": {
                "traffic": {
                    name.removeprefix(_TRAFFIC): value
                    for name, value in metrics.items()
                    if name.startswith(_TRAFFIC)
                }
            },
            "step_times": {
                "decode": {
                    "state": _numbered(metrics, f"{_STEPS}state."),
                    "padded_sizes": _numbered(metrics, f"{_STEPS}size."),
                    "square": metrics[f"{_STEPS}square"],
                    "samples": metrics[f"{_STEPS}samples"],
                }
            },
            "engines": {"decode_blocks": metrics["headrace.kv_tokens"], "block_tokens": 1},
        }
        StepTime.from_dict(router["step_times"]["decode"])
    except (KeyError, ValueError):
        return None
    return router


def _numbered(metrics: Mapping[str, float], prefix: str) -> list[float]:
    found: list[float] = []
    while (value := metrics.get(f"{prefix}{len(found)}", math.nan)) == value:
        found.append(value)
    return found

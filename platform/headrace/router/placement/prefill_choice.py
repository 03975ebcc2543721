"""Choice between the best local and the best remote prefill.

Also the price limit for measuring an engine again, the timeout of a remote prefill, and the
comparison as text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.router.placement.pair_search import LOCAL_PARTS, REMOTE_PARTS
from headrace.router.plan import Kind, RouterSettings

TIMEOUT_FLOOR_S, TIMEOUT_FACTOR, TIMEOUT_ERRORS = 1.0, 4.0, 6.0
"""Timeout of a remote prefill: at least so many seconds, so many times its prediction, and the
prediction plus so many times its root mean square error."""


def cost_formula(p: Mapping[str, float]) -> str:
    """Return the whole comparison with its numbers, for one log line."""
    return "; ".join(
        f"{side} {p[f'{side}.total']:.3f} s = "
        + " + ".join(
            f"{part.replace('_', ' ')} {p[f'{side}.{part}']:.3f}"
            for part in parts
            if f"{side}.{part}" in p
        )
        for side, parts in (("local", LOCAL_PARTS), ("remote", REMOTE_PARTS))
        if f"{side}.total" in p
    )


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    kind: Kind
    why: str
    explores: bool = False


def choose_prefill(local: float, remote: float) -> PrefillChoice:
    """Return the kind with the smaller total in seconds; local if they are equal."""
    cheap: Kind = "remote" if remote < local else "local"
    return PrefillChoice(cheap, f"{cheap} saves {abs(local - remote):.3f} s")


def exploration_limit_s(best_s: float, age_s: float, remeasure_s: float) -> float:
    """Return the price limit in seconds for measuring an engine again; 0 for not at all.

    The engine has computed no prompt for `age_s`, and the best choice takes `best_s`. Without new
    measurements a model becomes stale, and an engine that seems expensive is never chosen, so it is
    never measured. From an age of `remeasure_s` on, the limit is
    ``best_s * (1 + age_s / remeasure_s)``: twice the best price at first, then growing with age, so
    that no error lasts for ever.
    """
    return best_s * (1.0 + age_s / remeasure_s) if age_s >= remeasure_s else 0.0


@dataclass(frozen=True, slots=True)
class ModelErrors:
    """Root mean square errors of the models.

    In seconds for the call and the hand-off, relative for prefill steps and the transfer.
    """

    call_s: float
    handoff_s: float
    steps: float
    transfer: float


def remote_timeout_s(
    p: Mapping[str, float], errors: ModelErrors, settings: RouterSettings, *, cold: bool
) -> float:
    """Return how long a remote prefill and its KV may take before decode stops waiting.

    This is ``max(floor, factor * t, t + errors * rms)``. ``t`` is the predicted number of seconds
    until the KV has arrived. ``rms`` adds the models' errors as independent ones (root of the sum
    of squares). The floor is higher while the prefill replica is cold, that is, until a first
    remote prefill has done the engines' handshake.
    """
    parts = ("call", "queue", "pull", "compute", "load", "transfer", "handoff")
    t = sum(p[f"remote.{part}"] for part in parts)
    rms = math.hypot(
        errors.call_s,
        errors.handoff_s,
        errors.steps * (p["remote.queue"] + p["remote.compute"]),
        errors.transfer * p["remote.transfer"],
    )
    floor = settings.timeout_cold_s if cold else TIMEOUT_FLOOR_S
    return max(floor, TIMEOUT_FACTOR * t, t + TIMEOUT_ERRORS * rms)

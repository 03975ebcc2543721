"""Local or remote, once the best of each kind is known; what measuring an engine again may cost;
how long remote may take; in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.router.pairs import LOCAL_PARTS, REMOTE_PARTS
from headrace.router.plan import Kind, RouterSettings


def formula(p: Mapping[str, float]) -> str:
    """The whole comparison with its numbers, for one log line."""
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
class Choice:
    kind: Kind
    why: str
    explores: bool = False


def choose(local: float, remote: float) -> Choice:
    """The kind with the least total, in seconds; ties go local."""
    cheap: Kind = "remote" if remote < local else "local"
    return Choice(cheap, f"{cheap} saves {abs(local - remote):.3f} s")


def most_for_measuring(best_s: float, age_s: float, remeasure_s: float) -> float:
    """Seconds below which a request goes to an engine that has computed no prompt for `age_s`,
    although another choice takes `best_s`.

    A model that is not fed goes stale, and an engine that looks dear is never chosen, so never
    measured. It may cost ``best_s * (1 + age_s / remeasure_s)`` once `age_s` is `remeasure_s`, that
    is, twice the price at first, and the longer it waits the more, so no error lasts for ever.
    """
    return best_s * (1.0 + age_s / remeasure_s) if age_s >= remeasure_s else 0.0


@dataclass(frozen=True, slots=True)
class Errors:
    """Root mean squares of the models' errors: seconds of call and hand-off, relative of prefill
    steps and of the transfer."""

    call_s: float
    handoff_s: float
    steps: float
    transfer: float


def remote_timeout_s(
    p: Mapping[str, float], errors: Errors, settings: RouterSettings, *, cold: bool
) -> float:
    """How long a remote prefill and its KV may take before decode stops waiting.

    ``max(floor, factor * t, t + errors * rms)`` with ``t`` the predicted seconds until the KV is
    there and ``rms`` the models' own errors, added as independent ones (root of the sum of
    squares). The floor is higher while the prefill side is cold, that is, until a first remote
    prefill has paid the engines' handshake.
    """
    parts = ("call", "queue", "pull", "compute", "load", "transfer", "handoff")
    t = sum(p[f"remote.{part}"] for part in parts)
    rms = math.hypot(
        errors.call_s,
        errors.handoff_s,
        errors.steps * (p["remote.queue"] + p["remote.compute"]),
        errors.transfer * p["remote.transfer"],
    )
    floor = settings.timeout_cold_s if cold else settings.timeout_floor_s
    return max(floor, settings.timeout_factor * t, t + settings.timeout_errors * rms)

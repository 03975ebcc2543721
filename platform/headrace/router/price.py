"""What making a prompt's KV costs here and there, and which of the two it shall be.

Both options are priced in seconds added to everybody: this request's time to its first token plus
what the streams that run on the decode engine lose meanwhile::

    local  = queue_d + pull_d + max(T_d(u_d, r), L(l_d))
             + w * r * (max(T_d(u_d, r), L(l_d)) - T_d(0, r))
    remote = call + queue_p + pull_p + max(T_p(u_p, 0), L(l_p)) + transfer(bytes) + handoff
             + queue_d' + T_d(1, r) + w * r * (T_d(1, r) - T_d(0, r) + share * T_p(u_p, 0))

``u`` are the prompt tokens that the engine must compute (at least one), ``l`` the bytes that the KV
store supplies, loaded layer by layer under the computation, each medium at its own speed,
``pull`` the wait for those that must come into DRAM first, ``r`` the running decodes,
``w`` the stall weight, ``T`` the engines' step times (a prompt above ``max_step_tokens`` takes
several steps; what its tokens and the running decodes attend to counts, too; a single token costs
what a running decode does), ``queue_d'`` what is left of the decode queue once the KV is there,
``share`` the part of its speed that the decode engine loses while the prefill engine computes
(``sharing``). The local ``T_d(u_d, r)`` is stretched likewise for as long as the prefill engine has
work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.router.cost import Costs
from headrace.router.plan import Kind, RouterSettings
from headrace_engine.steptime import pairs_of


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the price of one prompt depends on."""

    uncached_decode_tokens: int
    uncached_prefill_tokens: int
    transfer_bytes: int
    running: int
    decode_queue_s: float
    prefill_queue_s: float
    #: Bytes to load from the store, by the medium that is read, and the wait before that.
    load_decode_bytes: Mapping[str, int] = field(default_factory=dict)
    load_prefill_bytes: Mapping[str, int] = field(default_factory=dict)
    pull_decode_s: float = 0.0
    pull_prefill_s: float = 0.0
    #: Of the whole prompt; of all running decodes together.
    prompt_tokens: int = 0
    running_context: int = 0

    def pairs(self, uncached_tokens: int) -> int:
        """Tokens that the prompt's last so many tokens attend to."""
        last = max(self.prompt_tokens, uncached_tokens)
        return pairs_of(last - uncached_tokens, last)


def price(s: Situation, costs: Costs, settings: RouterSettings) -> dict[str, float]:
    """Seconds by part for both options; ``X.total`` is the sum of the other ``X.*``."""
    step, limit, r = costs.decode_step, settings.max_step_tokens, s.running
    stalled = settings.stall_weight * r
    idle_step = step.seconds(0, r, 0, s.running_context)
    uncached_d, uncached_p = s.uncached_decode_tokens, s.uncached_prefill_tokens

    local_begins = s.decode_queue_s + s.pull_decode_s
    alone_s = step.prefill_s(
        uncached_d, s.pairs(uncached_d), step_tokens=limit, rows=r, context=s.running_context
    )
    local_compute = costs.shared.beside_s(alone_s, s.prefill_queue_s)
    # What loading adds where it takes longer than the computation that it runs under.
    local_load = max(0.0, costs.load_s(s.load_decode_bytes) - local_compute)
    steps = math.ceil(uncached_d / limit)
    local_stall = stalled * max(0.0, local_compute + local_load - steps * idle_step)

    call, transfer = costs.call.seconds(), costs.transfer.seconds(s.transfer_bytes)
    remote_compute = costs.prefill_step.prefill_s(
        uncached_p, s.pairs(uncached_p), step_tokens=limit
    )
    remote_load = max(0.0, costs.load_s(s.load_prefill_bytes) - remote_compute)
    handoff = costs.handoff.seconds()
    arrival = call + s.prefill_queue_s + s.pull_prefill_s + remote_compute + remote_load
    arrival += transfer + handoff
    decode_queue = max(0.0, s.decode_queue_s - arrival)
    last_step = step.prefill_s(1, s.pairs(1), step_tokens=limit, rows=r, context=s.running_context)
    slowed = costs.shared.share * remote_compute
    remote_stall = stalled * (max(0.0, last_step - idle_step) + slowed)
    return {
        "local.queue": s.decode_queue_s,
        "local.pull": s.pull_decode_s,
        "local.compute": local_compute,
        "local.load": local_load,
        "local.stall": local_stall,
        "local.total": local_begins + local_compute + local_load + local_stall,
        "remote.call": call,
        "remote.queue": s.prefill_queue_s,
        "remote.pull": s.pull_prefill_s,
        "remote.compute": remote_compute,
        "remote.load": remote_load,
        "remote.transfer": transfer,
        "remote.handoff": handoff,
        "remote.decode_queue": decode_queue,
        "remote.decode": last_step,
        "remote.stall": remote_stall,
        "remote.total": arrival + decode_queue + last_step + remote_stall,
    }


def formula(p: Mapping[str, float]) -> str:
    """The whole comparison with its numbers, for one log line."""
    local = ("queue", "pull", "compute", "load", "stall")
    remote = ("call", "queue", "pull", "compute", "load", "transfer", "handoff", "decode_queue")
    sides = {"local": local, "remote": (*remote, "decode", "stall")}
    return "; ".join(
        f"{side} {p[f'{side}.total']:.3f} s = "
        + " + ".join(f"{part.replace('_', ' ')} {p[f'{side}.{part}']:.3f}" for part in parts)
        for side, parts in sides.items()
    )


@dataclass(frozen=True, slots=True)
class Steps:
    """The longest engine step that running streams would see under each option."""

    local_s: float
    remote_s: float
    running: int


def longest_steps(s: Situation, costs: Costs, settings: RouterSettings) -> Steps:
    limit = settings.max_step_tokens

    def seconds(tokens: int) -> float:
        return costs.decode_step.prefill_s(
            tokens, s.pairs(tokens), step_tokens=limit, rows=s.running, context=s.running_context
        )

    return Steps(seconds(min(s.uncached_decode_tokens, limit)), seconds(1), s.running)


@dataclass(frozen=True, slots=True)
class Ages:
    """Seconds since each side was last measured, or sent a request in order to measure it.

    None while a re-measurement makes no sense (nothing would be learned).
    """

    local_s: float | None
    remote_s: float | None


@dataclass(frozen=True, slots=True)
class Choice:
    kind: Kind
    why: str
    explores: bool = False


def choose(p: Mapping[str, float], steps: Steps, ages: Ages, settings: RouterSettings) -> Choice:
    """The option with the least total; ties go local.

    Above the price stands the ITL target: if streams are running and only the local step would
    break it, the request goes remote.

    Below it stands curiosity: a model that is not fed goes stale, and a side that looks dear is
    never chosen, so never measured. The dearer side is taken once if its age allows its price:
    ``dear < cheap * (1 + age / remeasure_s)`` with ``age >= remeasure_s``, that is, below twice
    the price at first, and the longer it waits the more it may cost, so no error lasts for ever.
    """
    local, remote = p["local.total"], p["remote.total"]
    target = settings.itl_target_s
    if target is not None and steps.running and steps.local_s > target >= steps.remote_s:
        return Choice(
            "remote",
            f"a local step of {steps.local_s:.3f} s would break the ITL target of {target:.3f} s "
            f"for {steps.running} running streams, a remote prefill would not "
            f"({steps.remote_s:.3f} s)",
        )
    cheap: Kind = "remote" if remote < local else "local"
    dear: Kind = "local" if cheap == "remote" else "remote"
    age = ages.local_s if dear == "local" else ages.remote_s
    if age is not None and age >= settings.remeasure_s:
        ratio = 1.0 + age / settings.remeasure_s
        if p[f"{dear}.total"] < ratio * p[f"{cheap}.total"]:
            return Choice(
                dear,
                f"measuring {dear} prefill again after {age:.0f} s: predicted "
                f"{p[f'{dear}.total']:.3f} s, below {ratio:.1f} times {cheap}'s "
                f"{p[f'{cheap}.total']:.3f} s",
                explores=True,
            )
    if cheap == "remote":
        return Choice("remote", f"remote saves {local - remote:.3f} s")
    return Choice("local", f"local saves {remote - local:.3f} s")


def remote_timeout_s(
    p: Mapping[str, float], costs: Costs, settings: RouterSettings, *, cold: bool
) -> float:
    """How long a remote prefill and its KV may take before decode stops waiting.

    ``max(floor, factor * t, t + errors * rms)`` with ``t`` the predicted seconds until the KV is
    there and ``rms`` the models' own errors, added as independent ones (root of the sum of
    squares; step and transfer errors are relative). The floor is higher while the prefill side is
    cold, that is, until a first remote prefill has paid the engines' handshake.
    """
    parts = ("call", "queue", "pull", "compute", "load", "transfer", "handoff")
    t = sum(p[f"remote.{part}"] for part in parts)
    rms = math.hypot(
        costs.call.rms_error,
        costs.handoff.rms_error,
        costs.prefill_step.relative_error * (p["remote.queue"] + p["remote.compute"]),
        costs.transfer.rms_error * p["remote.transfer"],
    )
    floor = settings.timeout_cold_s if cold else settings.timeout_floor_s
    return max(floor, settings.timeout_factor * t, t + settings.timeout_errors * rms)

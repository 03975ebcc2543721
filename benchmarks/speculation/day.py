"""The planner over a day of load, without an engine: ``python -m benchmarks.speculation.day``.

A simulated engine with a step time that has a knee and padding, a price of verifying anything,
noise, and a neighbour who takes a third of the machine for two hours. Between 1 and 64 requests
run, most in the afternoon; some are draftable, fewer at night. A memory promises survivals that are
right on average but know nothing of the single request, and for three hours in the morning promises
are wrong: a new release has changed what the documents say.

Every policy meets the same day. Figures are the seconds that it needs for the day's tokens, as
tokens per second:

- ``oracle``: knows the true step time, and of each request how likely its next tokens are right.
- ``best_static``: the best single draft length for the whole day, chosen afterwards.
- ``auto``: the planner as production runs it; ``no_ledger``: without random steps and the switch
  that they feed; ``no_trust``: promises are believed; ``prior_times``: step times are not learned.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculation.budget import best_budget
from headrace_decode.speculation.calibrate import ROWS
from headrace_decode.speculation.planner import Limits, Load, Mode, Planner, Step
from headrace_decode.speculation.request import CALIBRATION_LENGTHS
from headrace_decode.speculation.session import CALIBRATION_STEP_TOKENS
from headrace_decode.speculation.trust import Kept, Trust
from headrace_engine.steptime import StepTime

DRAFT_TOKENS = 16
SEGMENTS = 144  # of ten minutes
ANSWER_TOKENS = 200
PAD, KNEE = 8, 48
VERIFYING = 1.04
"""A step with drafts against one of as many tokens without; as measured at 16 and 64 requests."""
STATIC = (1, 2, 4, 8, 16)


@dataclass
class Request:
    """One sequence: the true chance of a draft token behind right ones, and what is promised."""

    chance: float
    promise: float
    left: int = ANSWER_TOKENS
    kept: Kept = field(default_factory=Kept)


def true_seconds(
    tokens: NDArray[np.int64] | int, hour: float, drafted: NDArray[np.bool_] | bool
) -> NDArray[np.float64]:
    """Seconds of a step: a knee, padding, a neighbour who makes it slower in the evening, and what
    verifying costs, however little is drafted."""
    n = np.ceil(np.asarray(tokens) / PAD) * PAD
    factor = (1.5 if 20.0 <= hour < 22.0 else 1.0) * np.where(drafted, VERIFYING, 1.0)
    return factor * (0.012 + 0.0001 * n + 0.0006 * np.maximum(n - KNEE, 0))


def running(hour: float) -> int:
    """Requests at once: 1 to 64, least at 4 o'clock, most at 16 o'clock."""
    return round(math.exp((0.5 - 0.5 * math.cos((hour - 4.0) / 24.0 * 2 * math.pi)) * math.log(64)))


def arrive(hour: float, rng: np.random.Generator) -> Request:
    """A request of this hour. Promises come in two classes, by what retrieval found."""
    draftable = rng.random() < (0.2 if hour < 7.0 else 0.6)
    right = rng.uniform(0.75, 0.97) if draftable else rng.uniform(0.0, 0.3)
    promise = 0.85 if draftable else 0.15
    if 9.0 <= hour < 12.0 and draftable and rng.random() < 0.7:
        right = rng.uniform(0.0, 0.3)
    return Request(float(right), promise)


class Policy:
    """Chooses draft lengths, and is told what came."""

    def __init__(
        self, *, auto: bool = True, controls: bool = True, trust: bool = True, learns: bool = True
    ) -> None:
        self.planner = Planner(controls=controls, padded_sizes=range(PAD, 513, PAD))
        if not auto:
            self.planner.mode = Mode("off")
        self._trusts, self._learns = trust, learns
        if learns:
            self._calibrate()
        self.trust = Trust()

    def _calibrate(self) -> None:
        """What a replica measures before it serves (`speculation.calibrate`)."""
        for rows in ROWS:
            for k in CALIBRATION_LENGTHS:
                tokens = min(rows * (1 + k), CALIBRATION_STEP_TOKENS)
                seconds = float(true_seconds(tokens, 0.0, k > 0))
                self.planner.times.observe(0, rows, tokens - rows, 0, 0, seconds)

    def choose(self, requests: list[Request], hour: float) -> NDArray[np.int32]:
        load, none = Load(len(requests)), np.zeros(len(requests), np.int32)
        if self.planner.looks(load, Limits(), DRAFT_TOKENS * len(requests)) != "verify":
            return none
        survival = _survival([request.promise for request in requests])
        if self._trusts:
            survival = self.trust.believed(survival, [request.kept for request in requests])
        return self.planner.choose(load, Limits(), survival, none + DRAFT_TOKENS)

    def came(
        self, requests: list[Request], take: NDArray[np.int32], right: NDArray[np.int64],
        seconds: float,
    ) -> None:  # fmt: skip
        for request, tested, good in zip(requests, take, right, strict=True):
            if tested:
                self.trust.learn(
                    request.kept, request.promise * min(int(good) + 1, int(tested)), float(good)
                )
        rows, drafted = len(requests), int(take.sum())
        promised = self.planner.promised
        emitted = rows + int(right.sum())
        step = Step(rows + drafted, drafted, rows, emitted, 0, seconds, promised=promised)
        if not self._learns:
            fixed = self.planner.times
            self.planner.times = StepTime()
            self.planner.observe(step)
            self.planner.times = fixed
        else:
            self.planner.observe(step)


class Static(Policy):
    """So many tokens of every row, always."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def choose(self, requests: list[Request], hour: float) -> NDArray[np.int32]:
        return np.full(len(requests), self._tokens, np.int32)


class Oracle(Policy):
    """Knows what nobody knows."""

    def choose(self, requests: list[Request], hour: float) -> NDArray[np.int32]:
        rows = len(requests)
        survival = _survival([request.chance for request in requests])
        drafted = np.arange(DRAFT_TOKENS * rows + 1)
        seconds = true_seconds(rows + drafted, hour, drafted > 0)
        return best_budget(survival, np.full(rows, DRAFT_TOKENS, np.int32), seconds).take


def _survival(chances: list[float]) -> NDArray[np.float32]:
    places = np.arange(1, DRAFT_TOKENS + 1)
    return (np.array(chances)[:, None] ** places).astype(np.float32)


def a_day(policy: Policy, steps: int, seed: int = 0) -> tuple[float, NDArray[np.float64]]:
    """Tokens per second over the day's demand, and of each segment."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    requests: list[Request] = []
    rates, demand = np.zeros(SEGMENTS), np.zeros(SEGMENTS)
    for segment in range(SEGMENTS):
        hour = 24.0 * segment / SEGMENTS
        demand[segment] = running(hour)
        tokens, spent = 0, 0.0
        for _ in range(steps):
            requests = [request for request in requests if request.left > 0][: running(hour)]
            while len(requests) < running(hour):
                requests.append(arrive(hour, rng))
            take = policy.choose(requests, hour)
            lucky = noise.random((len(requests), DRAFT_TOKENS))
            good = lucky < np.array([request.chance for request in requests])[:, None]
            right = np.minimum(np.cumprod(good, axis=1).sum(axis=1), take)
            drafted = int(take.sum())
            seconds = float(true_seconds(len(requests) + drafted, hour, drafted > 0))
            seconds *= noise.lognormal(0.0, 0.05)
            policy.came(requests, take, right, seconds)
            for request, count in zip(requests, right, strict=True):
                request.left -= 1 + int(count)
            tokens += len(requests) + int(right.sum())
            spent += seconds
        rates[segment] = tokens / spent
    return float(demand.sum() / (demand / rates).sum()), rates


def measure(steps: int) -> dict[str, float]:
    """Tokens per second of each policy over the day, and the regrets."""
    policies: dict[str, Callable[[], Policy]] = {
        "oracle": Oracle,
        "none": lambda: Policy(auto=False),
        "auto": Policy,
        "no_ledger": lambda: Policy(controls=False),
        "no_trust": lambda: Policy(trust=False),
        "no_trust_no_ledger": lambda: Policy(trust=False, controls=False),
        "prior_times": lambda: Policy(learns=False),
        **{f"static{k}": lambda k=k: Static(k) for k in STATIC},  # type: ignore[misc]
    }
    found: dict[str, float] = {}
    by_hour: dict[str, NDArray[np.float64]] = {}
    for name, make in policies.items():
        found[f"day.{name}.tok_s"], by_hour[name] = a_day(make(), steps)
    best = max(found[f"day.static{k}.tok_s"] for k in STATIC)
    found["day.regret_vs_oracle"] = 1.0 - found["day.auto.tok_s"] / found["day.oracle.tok_s"]
    found["day.auto_vs_best_static"] = found["day.auto.tok_s"] / best
    found["day.auto_vs_none"] = found["day.auto.tok_s"] / found["day.none.tok_s"]
    found["day.worst_hour_vs_none"] = float(
        (_hours(by_hour["auto"]) / _hours(by_hour["none"])).min()
    )
    found["day.worst_hour_vs_none_of_best_static"] = float(
        max(
            (_hours(by_hour[f"static{k}"]) / _hours(by_hour["none"])).min()
            for k in STATIC
            if found[f"day.static{k}.tok_s"] == best
        )
    )
    return found


def _hours(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Harmonic means by the hour."""
    return 1.0 / (1.0 / rates).reshape(24, -1).mean(axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="The planner over a day of load, simulated.")
    parser.add_argument("--steps", type=int, default=60, help="engine steps in ten minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    found = measure(args.steps)
    for name, value in found.items():
        print(f"{name:45} {value:10.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

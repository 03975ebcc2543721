"""The planner over a day of load, without an engine: ``python -m benchmarks.speculation.day``.

The simulated engine's step time has a knee, padding, a price of verifying anything, and noise. A
neighbour takes a third of the machine for two hours. Between 1 and 64 requests run, most in the
afternoon. Some are draftable, fewer at night. The drafter finds long matches for draftable requests
and short ones for others, and knows no more of the single request. For three hours in the morning
most long matches are wrong: a new release has changed what the documents say.

Every policy meets the same day. A figure is the day's tokens over the seconds that they took:

- ``oracle``: knows the true step time, and of each request how likely its next tokens are right.
- ``static K``: K draft tokens of every row, all day.
- ``auto``: the planner as production runs it. ``without_X`` lacks a part of it (``ABLATIONS``).
- ``noisy``: the same day beside two busy neighbours. A step takes half as long again, each draft
  token costs twice as much, and one step in ten takes up to three times as long.
- ``liar``: a day without draftable requests, and a drafter that promises every token at 0.9.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft_batch import DraftSource
from headrace_decode.speculative.jit import jit
from headrace_decode.speculative.planning import draft_guard, draft_planner
from headrace_decode.speculative.planning.draft_budget import best_draft_budget
from headrace_decode.speculative.planning.draft_planner import (
    DraftMode,
    DraftPlanner,
    StepLimits,
    StepLoad,
    StepRecord,
)
from headrace_decode.speculative.retrieval.acceptance import (
    EFFECT,
    MATCH_BUCKET,
    POSITION_BUCKET,
    Acceptance,
    acceptance_probability,
    encode_features,
    learn,
)
from headrace_engine.step_time import StepTime

DRAFT_TOKENS = 16
SEGMENTS = 144  # of ten minutes
ANSWER_TOKENS = 200
PAD, KNEE = 8, 48
VERIFYING = 1.04
"""A step with drafts against one of as many tokens without; as measured at 16 and 64 requests."""
STATIC = (1, 2, 4, 8, 16)
LONG, SHORT = 20, 2
"""Tokens of the context that a draftable request's drafts match, and another's."""


@dataclass
class Day:
    """Properties of the machine, and whether any request is draftable."""

    noisy: bool = False
    draftable: bool = True

    def seconds(
        self, rows: int, drafted: NDArray[np.int64] | int, hour: float
    ) -> NDArray[np.float64]:
        """Return the seconds of a step, with a knee, padding, a neighbour in the evening, and the
        cost of verification."""
        n = np.ceil((rows + np.asarray(drafted)) / PAD) * PAD
        factor = (1.5 if 20.0 <= hour < 22.0 else 1.0) * np.where(
            np.asarray(drafted) > 0, VERIFYING, 1.0
        )
        base = 0.012 + 0.0001 * n + 0.0006 * np.maximum(n - KNEE, 0)
        if self.noisy:
            base = 1.5 * base + 0.0006 * np.asarray(drafted)
        return np.asarray(factor * base)

    def noise(self, rng: np.random.Generator) -> float:
        """Factor of one step."""
        factor = float(rng.lognormal(0.0, 0.05))
        hiccup = rng.random() < 0.1, float(rng.uniform(1.0, 3.0))
        return factor * hiccup[1] if self.noisy and hiccup[0] else factor


@dataclass
class Request:
    """One sequence: the true chance of a draft token behind right ones, what its drafts look like
    (int32 [DRAFT_TOKENS]), and its effect."""

    right: float
    cells: NDArray[np.int32]
    effect: NDArray[np.float64]
    left: int = ANSWER_TOKENS


def running(hour: float) -> int:
    """Return the requests at once: 1 to 64, least at 4 o'clock, most at 16 o'clock."""
    return round(math.exp((0.5 - 0.5 * math.cos((hour - 4.0) / 24.0 * 2 * math.pi)) * math.log(64)))


def arrive(day: Day, hour: float, rng: np.random.Generator) -> Request:
    """Return a request of this hour."""
    draftable = rng.random() < (0.2 if hour < 7.0 else 0.6) and day.draftable
    right = rng.uniform(0.75, 0.97) if draftable else rng.uniform(0.0, 0.3)
    if 9.0 <= hour < 12.0 and draftable and rng.random() < 0.7:
        right = rng.uniform(0.0, 0.3)
    match = int(MATCH_BUCKET[LONG if draftable else SHORT])
    places = POSITION_BUCKET[:DRAFT_TOKENS].tolist()
    cells = [encode_features(int(DraftSource.PROMPT), match, 0, 0, place) for place in places]
    return Request(float(right), np.array(cells, np.int32), np.zeros(EFFECT))


class Policy:
    """Chooses draft lengths, and is told what came."""

    def __init__(
        self,
        day: Day,
        *,
        mode: str = "auto",
        controls: bool = True,
        effects: bool = True,
        learns: bool = True,
        promise: float | None = None,
    ) -> None:
        self.planner = DraftPlanner(controls=controls, padded_sizes=range(PAD, 513, PAD))
        self.planner.mode = DraftMode.parse(mode)
        self.acceptance = Acceptance()
        self._effects, self._learns, self._promise = effects, learns, promise

    def opened(self, request: Request) -> None:
        request.effect = self.acceptance.initial_effect()
        if not self._effects:
            request.effect[:] = 0.0

    def closed(self, request: Request) -> None:
        if self._effects:
            self.acceptance.on_request_end(request.effect)

    def choose(self, requests: list[Request], hour: float) -> NDArray[np.int32]:
        load, none = StepLoad(len(requests)), np.zeros(len(requests), np.int32)
        if self.planner.plan_lookup(load, StepLimits(), DRAFT_TOKENS * len(requests)) != "verify":
            return none
        cells = np.stack([request.cells for request in requests])
        effects = np.stack([request.effect for request in requests])
        survival = _survival(self.acceptance.parameters, effects, cells)
        if self._promise is not None:
            survival[:] = self._promise ** np.arange(1, DRAFT_TOKENS + 1)
        return self.planner.choose(load, StepLimits(), survival, none + DRAFT_TOKENS)

    def came(
        self, requests: list[Request], take: NDArray[np.int32], right: NDArray[np.int64],
        seconds: float,
    ) -> None:  # fmt: skip
        for request, tested, good in zip(requests, take.tolist(), right.tolist(), strict=True):
            if tested:
                tested = min(good + 1, tested)
                _learn(self.acceptance.parameters, request.effect, request.cells, tested, good)
        rows, drafted = len(requests), int(take.sum())
        control_draw, self.planner.control_draw = self.planner.control_draw, None
        step = StepRecord(
            rows + drafted,
            drafted,
            rows,
            rows + int(right.sum()),
            0,
            seconds,
            control_draw=control_draw,
        )
        if self._learns:
            self.planner.observe(step)
        else:
            fixed, self.planner.times = self.planner.times, StepTime()
            self.planner.observe(step)
            self.planner.times = fixed


class Oracle(Policy):
    """Policy that knows the true step times and acceptance, which no real policy does."""

    def __init__(self, day: Day) -> None:
        super().__init__(day)
        self._day = day

    def choose(self, requests: list[Request], hour: float) -> NDArray[np.int32]:
        rows = len(requests)
        chances = np.array([request.right for request in requests])
        survival = (chances[:, None] ** np.arange(1, DRAFT_TOKENS + 1)).astype(np.float32)
        seconds = self._day.seconds(rows, np.arange(DRAFT_TOKENS * rows + 1), hour)
        return best_draft_budget(survival, np.full(rows, DRAFT_TOKENS, np.int32), seconds).take


@jit
def _survival(known: Any, effects: Any, cells: Any) -> Any:
    survival = np.empty(cells.shape, np.float32)
    for row in range(len(cells)):
        survives = 1.0
        for place in range(cells.shape[1]):
            survives *= acceptance_probability(known, effects[row], cells[row, place])
            survival[row, place] = survives
    return survival


@jit
def _learn(known: Any, effect: Any, cells: Any, tested: int, right: int) -> None:
    for place in range(tested):
        learn(known, effect, cells[place], place < right)


def a_day(policy: Policy, day: Day, steps: int, seed: int = 0) -> tuple[float, NDArray[np.float64]]:
    """Tokens per second over the day's demand, and of each segment."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    requests: list[Request] = []
    rates, demand = np.zeros(SEGMENTS), np.zeros(SEGMENTS)
    for segment in range(SEGMENTS):
        hour = 24.0 * segment / SEGMENTS
        demand[segment] = running(hour)
        tokens, spent = 0, 0.0
        for _ in range(steps):
            going = [request for request in requests if request.left > 0][: running(hour)]
            for request in requests:
                if request.left <= 0:
                    policy.closed(request)
            requests = going
            while len(requests) < running(hour):
                requests.append(arrive(day, hour, rng))
                policy.opened(requests[-1])
            take = policy.choose(requests, hour)
            lucky = noise.random((len(requests), DRAFT_TOKENS))
            good = lucky < np.array([request.right for request in requests])[:, None]
            right = np.minimum(np.cumprod(good, axis=1).sum(axis=1), take)
            seconds = float(day.seconds(len(requests), int(take.sum()), hour)) * day.noise(noise)
            policy.came(requests, take, right, seconds)
            for request, count in zip(requests, right, strict=True):
                request.left -= 1 + int(count)
            tokens += len(requests) + int(right.sum())
            spent += seconds
        rates[segment] = tokens / spent
    return float(demand.sum() / (demand / rates).sum()), rates


ABLATIONS: Mapping[str, dict[str, Any]] = {
    "guard": {"controls": False},
    "effects": {"effects": False},
    "step_times": {"learns": False},
}
CONSTANTS: Mapping[str, tuple[Any, str, tuple[float, ...]]] = {
    "EXPLORE_EVERY": (draft_planner, "EXPLORE_EVERY", (4, 64)),
    "ALPHA": (draft_guard, "ALPHA", (0.01, 0.3)),
    "MIXTURE": (draft_guard, "MIXTURE", (0.1, 10.0)),
    "DECAY": (draft_guard, "DECAY", (0.99, 0.9995)),
    "CONTROL_WHILE_UNDECIDED": (draft_guard, "CONTROL_WHILE_UNDECIDED", (1 / 32, 1 / 3)),
    "CONTROL_WHILE_DECIDED": (draft_guard, "CONTROL_WHILE_DECIDED", (1 / 16, 1 / 256)),
}


@contextmanager
def changed(name: str, value: float) -> Iterator[None]:
    """One constant set to another value."""
    module, attribute, _ = CONSTANTS[name]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, attribute, value))
        yield


def measure(steps: int, seed: int = 0) -> dict[str, float]:
    """Tokens per second of each policy over the day, and the regrets."""
    plain, noisy, poor = Day(), Day(noisy=True), Day(draftable=False)
    policies: dict[str, tuple[Day, Callable[[Day], Policy]]] = {
        "oracle": (plain, Oracle),
        "none": (plain, lambda day: Policy(day, mode="off")),
        "auto": (plain, Policy),
        **{f"static{k}": (plain, lambda day, k=k: Policy(day, mode=f"static:{k}")) for k in STATIC},  # type: ignore[misc]
        **{f"without_{name}": (plain, lambda day, kw=kw: Policy(day, **kw))  # type: ignore[misc]
           for name, kw in ABLATIONS.items()},
        "noisy.none": (noisy, lambda day: Policy(day, mode="off")),
        "noisy.oracle": (noisy, Oracle),
        "noisy.auto": (noisy, Policy),
        "noisy.without_guard": (noisy, lambda day: Policy(day, controls=False)),
        "liar.none": (poor, lambda day: Policy(day, mode="off")),
        "liar.auto": (poor, lambda day: Policy(day, promise=0.9)),
        "liar.without_guard": (poor, lambda day: Policy(day, promise=0.9, controls=False)),
    }  # fmt: skip
    found: dict[str, float] = {}
    by_hour: dict[str, NDArray[np.float64]] = {}
    for name, (day, make) in policies.items():
        found[f"day.{name}.tok_s"], rates = a_day(make(day), day, steps, seed)
        by_hour[name] = _hours(rates)
    best = max(found[f"day.static{k}.tok_s"] for k in STATIC)
    found["day.regret_vs_oracle"] = 1.0 - found["day.auto.tok_s"] / found["day.oracle.tok_s"]
    found["day.auto_vs_best_static"] = found["day.auto.tok_s"] / best
    for name, none in (("", "none"), ("noisy.", "noisy.none"), ("liar.", "liar.none")):
        auto = f"{name}auto"
        ratio = found[f"day.{auto}.tok_s"] / found[f"day.{none}.tok_s"]
        found[f"day.{name}auto_vs_none"] = ratio
        worst = float((by_hour[auto] / by_hour[none]).min())
        found[f"day.{name}worst_hour_vs_none"] = worst
    found["day.worst_hour_vs_none_of_best_static"] = float(
        max(
            (by_hour[f"static{k}"] / by_hour["none"]).min()
            for k in STATIC
            if found[f"day.static{k}.tok_s"] == best
        )
    )
    return found


def ablate(steps: int, seeds: int = 3) -> dict[str, float]:
    """Tokens per second with each constant changed over those without, mean over the seeds, on the
    plain day and on the noisy one; ``spread`` is the standard deviation over the seeds of auto."""

    def rates() -> dict[str, NDArray[np.float64]]:
        days = {"day": Day(), "noisy": Day(noisy=True)}
        return {
            name: np.array([a_day(Policy(day), day, steps, seed)[0] for seed in range(seeds)])
            for name, day in days.items()
        }

    auto, found = rates(), {}
    for name, (_, _, values) in CONSTANTS.items():
        for value in values:
            with changed(name, value):
                for day, rate in rates().items():
                    found[f"{day}.{name}={value:g}"] = float((rate / auto[day]).mean())
    return found


def _hours(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the harmonic means by the hour."""
    return np.asarray(1.0 / (1.0 / rates).reshape(24, -1).mean(axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="The planner over a day of load, simulated.")
    parser.add_argument("--steps", type=int, default=60, help="engine steps in ten minutes")
    parser.add_argument("--seed", type=int, default=0, help="of requests and noise")
    parser.add_argument("--ablations", action="store_true", help="change one constant at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    found = ablate(args.steps) if args.ablations else measure(args.steps, args.seed)
    for name, value in found.items():
        print(f"{name:45} {value:10.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Goodput, shares and lateness with admission and without, on simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from headrace.gateway.admission import admission_controller as admission
from headrace.gateway.admission import capacity, queue_rates
from headrace.gateway.admission.slo_classes import SloClass
from headrace_lab.simulate.best_case import capacity_rate
from headrace_lab.simulate.hardware import Hardware, prefill_s
from headrace_lab.simulate.headrace_policy import HeadracePolicy
from headrace_lab.simulate.outcome import GoodputTargets
from headrace_lab.simulate.run import SimulationRun, SimulationSettings, simulate
from headrace_lab.simulate.scenarios.admission import Admitted, Tenancy, simulate_admitted
from headrace_lab.simulate.state import DONE
from headrace_lab.simulate.trace import Trace, Workload, scale_trace

ENGINES = 8
"""Number of engines of each role."""
SECONDS, WARM = 300.0, 0.3
TARGETS = GoodputTargets(ttft_s=4.0, itl_s=0.05)
SLO = SloClass("interactive", ttft_target_s=TARGETS.ttft_s, itl_target_s=TARGETS.itl_s)
LATE = 1.1
LOADS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
TIMES = 10
"""Number of requests of the heavy tenant for each request of the light one."""
BOTH_WANT_ALL = 16.0
"""Load at which the light tenant alone would want more than all engines."""

Bools = NDArray[np.bool_]


def _engines_for_rate() -> AbstractContextManager[Any]:
    """Return a context in which the admission assumes the prior rate of the engines' work.

    An engine then does a second of work a second, whatever was measured."""
    return mock.patch.object(queue_rates.QueueRates, "rate", property(lambda self: self.prior))


@contextmanager
def _dear(factor: float) -> Iterator[None]:
    """All work is predicted to take so much longer than it does."""
    planned, ended = (
        admission.AdmissionController.record_plan,
        admission.AdmissionController.record_end,
    )

    def dear_plan(
        self: admission.AdmissionController, ticket: admission.Ticket, seconds: float
    ) -> None:
        planned(self, ticket, factor * seconds)

    def dear_end(
        self: admission.AdmissionController,
        ticket: admission.Ticket,
        answer_s: float | None,
        rows: float,
    ) -> None:
        ended(self, ticket, None if answer_s is None else factor * answer_s, rows)

    with (
        mock.patch.object(admission.AdmissionController, "record_plan", dear_plan),
        mock.patch.object(admission.AdmissionController, "record_end", dear_end),
    ):
        yield


@contextmanager
def _dear_and_engines_for_rate() -> Iterator[None]:
    with _dear(3.0), _engines_for_rate():
        yield


class Sweep:
    """All runs over one trace."""

    def __init__(self, trace: Trace, seeds: int) -> None:
        self.trace, self.seeds, self.hardware = trace, range(seeds), Hardware()
        self.rate = capacity_rate(trace, self.hardware, ENGINES, SECONDS, WARM)
        self.settings = SimulationSettings(warm_share=WARM, drain_s=60.0, targets=TARGETS)

    def work(self, load: float, seed: int) -> Workload:
        return scale_trace(self.trace, self.rate * load, SECONDS, seed)

    def plain(self, work: Workload) -> SimulationRun:
        """Without admission."""
        return simulate(work, self.hardware, ENGINES, ENGINES, HeadracePolicy(), self.settings)

    def admitted(self, work: Workload, tenancy: Tenancy) -> tuple[SimulationRun, Admitted]:
        return simulate_admitted(
            work, self.hardware, ENGINES, ENGINES, HeadracePolicy(), tenancy, self.settings
        )

    # ---- goodput and lateness -------------------------------------------------------------

    def loads(self, loads: tuple[float, ...], report: dict[str, Any]) -> None:
        """Requests a second that keep their targets, at each load, and how late admitted ones are;
        means over the seeds."""
        best = {"with": 0.0, "without": 0.0}
        for load in loads:
            runs = [self._load(load, seed) for seed in self.seeds]
            told = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
            for arm in best:
                best[arm] = max(best[arm], told[f"goodput_{arm}"])
                told[f"goodput_{arm}_vs_peak"] = told[f"goodput_{arm}"] / best[arm]
            report[f"load_{load:g}"] = told

    def _load(self, load: float, seed: int) -> dict[str, float]:
        work = self.work(load, seed)
        plain = self.plain(work)
        run, told = self.admitted(work, Tenancy(np.zeros(len(work), np.int64), (SLO,)))
        seen = self._seen(work)
        ended = seen & (run.state.req["phase"] == DONE) & self._possible(work)
        ttft = (run.state.req["first_s"] - run.state.req["arrival_s"])[ended]
        queued = told.queued_s[seen]
        per_s = 1.0 / (SECONDS * (1.0 - WARM))
        return {
            "asked": float(seen.sum()) * per_s,
            "goodput_without": plain.outcome.goodput * plain.outcome.requests * per_s,
            "goodput_with": run.outcome.goodput * run.outcome.requests * per_s,
            "ttft_p50_without": plain.outcome.ttft_p50,
            "ttft_p50_with": float(np.median(ttft)),
            "ttft_p99_without": plain.outcome.ttft_p99,
            "ttft_p99_with": float(np.percentile(ttft, 99)),
            "refused_share": float(told.refused[seen].mean()),
            "expired_share": float(told.expired[seen].mean()),
            "queued_max_s": float(np.nanmax(queued)),
            "late_share": float((ttft > LATE * TARGETS.ttft_s).mean()),
        }

    def _seen(self, work: Workload) -> Bools:
        return np.asarray(work.arrival_s >= WARM * SECONDS)

    def _possible(self, work: Workload) -> Bools:
        """Return the requests whose prompt meets its target even if none of it is cached."""
        side, prompts = self.hardware.prefill, self.trace.prompt[work.row].tolist()
        alone = [prefill_s(side.curve, each, each, side.step_tokens) for each in prompts]
        return np.array(alone) < TARGETS.ttft_s

    # ---- shares ---------------------------------------------------------------------------

    def shares(self, report: dict[str, Any]) -> None:
        """Report the engine seconds of a tenant with `TIMES` times the requests of another, over
        the other's: when both could use all engines, and when the other needs little."""
        for name, load, gateways in (
            ("both_want_all", BOTH_WANT_ALL, 1),
            ("both_want_all_two_gateways", BOTH_WANT_ALL, 2),
            ("light_wants_little", 1.3, 1),
        ):
            runs = [self._share(load, gateways, seed) for seed in self.seeds]
            report[name] = {each: float(np.mean([run[each] for run in runs])) for each in runs[0]}

    def _share(self, load: float, gateways: int, seed: int) -> dict[str, float]:
        work = self.work(load, seed)
        light = np.random.default_rng(seed).random(len(work)) < 1.0 / (1 + TIMES)
        # The heavy tenant asks all gateways, the light one only the first.
        gateway = np.where(light, 0, np.arange(len(work)) % gateways)
        tenancy = Tenancy(light.astype(np.int64), (SLO,), gateways, gateway)
        run, told = self.admitted(work, tenancy)
        plain = self.plain(work)
        seen = self._seen(work)
        return {
            "heavy_vs_light": self._ratio(run, light, seen),
            "heavy_vs_light_without": self._ratio(plain, light, seen),
            "light_refused_share": float(told.refused[seen & light].mean()),
            "heavy_refused_share": float(told.refused[seen & ~light].mean()),
            "expired_share": float(told.expired[seen].mean()),
            "goodput": run.outcome.goodput * run.outcome.requests / (SECONDS * (1.0 - WARM)),
        }

    def _ratio(self, run: SimulationRun, light: Bools, seen: Bools) -> float:
        """Return the engine seconds of the heavy tenant over those of the light one.

        A prompt counts with the time to compute it, an answer with its duration divided by the
        streams of an engine. The queue's own estimates are not used."""
        req = run.state.req
        rows = max(1.0, float(run.course["running"].mean()) / ENGINES)
        until = np.minimum(req["end_s"], SECONDS)
        first = np.minimum(req["first_s"], SECONDS)
        side = self.hardware.prefill
        token_s = prefill_s(side.curve, side.step_tokens, side.step_tokens, side.step_tokens)
        engine_s = req["computed"] * token_s / side.step_tokens + (until - first) / rows
        engine_s = np.where(seen & (req["first_s"] < SECONDS), engine_s, 0.0)
        return float(engine_s[~light].sum() / engine_s[light].sum())

    # ---- without a part -------------------------------------------------------------------

    def ablations(self, report: dict[str, Any]) -> None:
        """The sweep's figures at two loads with one mechanism left out."""
        without: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "nothing": nullcontext,
            "wait_safety_factor": lambda: mock.patch.object(admission, "MAX_WAIT_FACTOR", 1.0),
            "prefill_safety_factor": lambda: mock.patch.object(
                admission, "MAX_PREFILL_FACTOR", 1.0
            ),
            "measured_rate": _engines_for_rate,
            "right_prices": lambda: _dear(3.0),
            "right_prices_and_measured_rate": _dear_and_engines_for_rate,
            "lead_of_two_steps": lambda: mock.patch.object(capacity, "LEAD_STEPS", 1.0),
        }
        for name, changed in without.items():
            with changed():
                told: dict[str, Any] = {}
                for load in (1.1, 2.0):
                    runs = [self._load(load, seed) for seed in self.seeds]
                    told[f"load_{load:g}"] = {
                        each: float(np.mean([run[each] for run in runs]))
                        for each in ("goodput_with", "refused_share", "expired_share", "late_share")
                    }
            report[name] = told

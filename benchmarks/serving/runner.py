"""The order of a run: which arm is asked what, when, and what is noted beside the client's times.

With room for all arms at once they stay up, and each repeat of a cell asks them one after the
other, beginning with another arm each time. Without it, each repeat starts the arms in turn for all
cells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.serving import load, workloads
from benchmarks.serving.arms import MODEL_ID, Arm, CpuClock
from benchmarks.serving.report import Repeat, summarise
from benchmarks.serving.workloads import Cell

IDLE_LOOK_S = 4.0
SLOWDOWN = 1.5  # of a repeat against its prediction, until one has been seen: Ray's app needs twice


def say(text: str) -> None:
    """A progress line."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@dataclass
class Run:
    """A run in progress.

    Args:
        cells: what to measure.
        repeats: how many of each, at most.
        exact: take exactly `repeats`, however long that lasts.
        deadline: on time.monotonic()'s clock; repeats beyond the first are begun only if they fit.
        seed: of the prompts.
        explain: keep the plan of every request that Headrace answers.
    """

    cells: Sequence[Cell]
    repeats: int
    exact: bool
    deadline: float
    seed: int
    explain: bool = False
    done: list[Repeat] = field(default_factory=list)
    idle_cores: dict[str, float] = field(default_factory=dict)
    rss_gb: dict[str, float] = field(default_factory=dict)

    def together(self, arms: Sequence[Arm]) -> None:
        """All arms up at once: cell by cell, repeat by repeat, arm by arm."""
        with ExitStack() as stack:
            start_all(arms, stack)
            self._look_at_idle(arms)
            by_name = {arm.name: arm for arm in arms}
            names = list(by_name)
            predicted = [self._predicted_s(cell, len(arms)) for cell in self.cells]
            slowdown, expected, first = SLOWDOWN, 0.0, time.monotonic()
            for index, cell in enumerate(self.cells):
                began = time.monotonic()
                once = [slowdown * seconds for seconds in predicted[index:]]
                share = workloads.allowance_s(once, self.deadline - began)
                for name in names:
                    self._warm(by_name[name], cell)
                number, longest = 0, 0.0
                while self._goes_on(number, longest, time.monotonic() - began, share):
                    repeat_began = time.monotonic()
                    for name in workloads.rotated(names, number):
                        self._measure(by_name[name], arms, cell, number)
                    longest = max(longest, time.monotonic() - repeat_began)
                    number += 1
                expected += predicted[index] * number
                slowdown = (time.monotonic() - first) / expected
            say("stopping the arms")

    def one_at_a_time(self, make: Sequence[Callable[[], Arm]]) -> None:
        """One arm up at a time: repeat by repeat, arm by arm, cell by cell."""
        repeats = self.repeats if self.exact else min(2, self.repeats)
        for number in range(repeats):
            order = list(range(len(make)))
            for index in order[number % len(order) :] + order[: number % len(order)]:
                arm = make[index]()
                with ExitStack() as stack:
                    start_all([arm], stack)
                    self._look_at_idle([arm])
                    for cell in self.cells:
                        self._warm(arm, cell)
                        self._measure(arm, [arm], cell, number)

    def _goes_on(self, number: int, longest_s: float, spent_s: float, share_s: float) -> bool:
        if self.exact:
            return number < self.repeats
        return workloads.one_more(number, longest_s, spent_s, share_s, self.repeats)

    def _predicted_s(self, cell: Cell, arms: int) -> float:
        return arms * workloads.predicted_s(cell, cell.requests + cell.warmup)

    def _look_at_idle(self, arms: Sequence[Arm]) -> None:
        """Measure the CPU time of each arm without requests; leave all of them paused."""
        for arm in arms:
            arm.pause()
        for arm in arms:
            arm.resume()
            clock = CpuClock(arms)
            time.sleep(IDLE_LOOK_S)
            self.idle_cores[arm.name] = round(clock.cores()[arm.name], 3)
            self.rss_gb[arm.name] = round(arm.rss_bytes() / 1e9, 2)
            arm.pause()
        idle = ", ".join(f"{n} {c:.2f}" for n, c in self.idle_cores.items())
        say(f"idle arms keep busy, in cores: {idle}")

    def _warm(self, arm: Arm, cell: Cell) -> None:
        talks = workloads.conversations(
            cell, cell.warmup, turns=1, seed=self.seed, scope=f"{arm.name}/warm-up"
        )
        arm.resume()
        warm = uvloop.run(load.run(arm.url, MODEL_ID, talks, cell.concurrency))
        arm.pause()
        for sample in warm.samples:
            if sample.error is not None:
                say(f"warm-up of {arm.name}, {cell.name}: {sample.error}")

    def _prime(self, arm: Arm, cell: Cell, number: int) -> None:
        """One short request that is not counted, as the arm's memory may have left the caches."""
        talks = workloads.conversations(
            workloads.PRIMER, 1, seed=self.seed, scope=f"{arm.name}/{cell.name}/{number}/prime"
        )
        uvloop.run(load.run(arm.url, MODEL_ID, talks, 1, output_tokens=4))

    def _measure(self, arm: Arm, arms: Sequence[Arm], cell: Cell, number: int) -> None:
        talks = workloads.conversations(
            cell, cell.conversations, seed=self.seed, scope=f"{arm.name}/{number}"
        )
        arm.resume()
        self._prime(arm, cell, number)
        before = _plans(arm)
        clock = CpuClock(arms)
        seen = uvloop.run(load.run(arm.url, MODEL_ID, talks, cell.concurrency))
        cores = clock.cores()
        after = _plans(arm)
        explained = [_explain(arm, s) for s in seen.samples] if self.explain else []
        arm.pause()
        repeat = Repeat(
            workload=cell.workload.name,
            concurrency=cell.concurrency,
            arm=arm.name,
            number=number,
            measures=summarise(seen),
            requests=len(seen.samples),
            errors=[s.error for s in seen.samples if s.error is not None],
            cores={k: round(v, 3) for k, v in cores.items()},
            plans={k: after[k] - before.get(k, 0) for k in after if k != "nixl_bytes"},
            nixl_bytes=after.get("nixl_bytes", 0) - before.get("nixl_bytes", 0),
            ttfts_s=[round(s.arrivals_s[0], 4) for s in seen.samples if s.arrivals_s],
            explained=[one for one in explained if one],
        )
        self.done.append(repeat)
        ttft, tok_s = repeat.measures["ttft_p50_s"], repeat.measures["tok_s"]
        left_min = max(0.0, self.deadline - time.monotonic()) / 60
        notes = [f"TTFT p50 {1e3 * ttft:6.0f} ms", f"{tok_s:6.1f} tok/s"]
        notes += [f"{k} {v}" for k, v in repeat.plans.items() if v]
        if repeat.errors:
            notes.append(f"{len(repeat.errors)} FAILED, first: {repeat.errors[0]}")
        time_left = "" if self.exact else f", about {left_min:.1f} min left"
        say(f"{cell.name:10} repeat {number + 1} {arm.name:9} {', '.join(notes)}{time_left}")


def start_all(arms: Sequence[Arm], stack: ExitStack) -> None:
    """Start arms, to be stopped with `stack`. Headrace last and alone: it measures itself then."""
    peers = [arm for arm in arms if arm.kind != "headrace"]
    ours = [[arm] for arm in arms if arm.kind == "headrace"]
    for group in [peers, *ours]:
        for arm in group:
            say(f"starting {arm.name}")
            stack.callback(arm.stop)
            arm.start()
        for arm in group:
            arm.wait()
            say(f"{arm.name} is ready after {arm.started_s:.0f} s")
        if group is peers and ours:
            for arm in group:
                arm.pause()


def _explain(arm: Arm, sample: load.Sample) -> dict[str, Any]:
    """Return the plan of a request beside what became of it; empty where there is none."""
    if arm.kind != "headrace" or sample.request_id is None:
        return {}
    plan = arm.get(f"/headrace/v1/plans/chatcmpl-{sample.request_id}")
    return {"ttft_s": sample.ttft_s, "e2e_s": sample.e2e_s, "plan": plan}


def _plans(arm: Arm) -> dict[str, int]:
    """Plans made by kind and bytes moved so far; nothing for arms that make no plans."""
    status = arm.get("/headrace/v1/status") if arm.kind == "headrace" else None
    if not isinstance(status, dict):
        return {}
    return {**status.get("plans", {}), "nixl_bytes": status.get("nixl_bytes", 0)}

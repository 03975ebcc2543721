"""Adapter loads of two decode replicas under Zipf traffic: ``python -m benchmarks.lora``.

Requests arrive at random times, each for one of 20 LoRA adapters, more often for the first ones
(Zipf). Every prompt is new, so only the adapter ties a request to a replica. The replicas are
simulated: each computes its prompts in order, with the step times of `StepTime`'s prior (0.42 s for
a prompt of 512 tokens), keeps a number of adapters, drops the least recently used one, and computes
nothing while it loads one. They report every 0.15 s, as real ones do.

Rules:
    headrace: `Cluster.plan`, the gateway's own code
    least_load: the replica with the fewest requests, ties at random
    random: either one

`loads` counts the adapter loads of both replicas, the first ones included.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.router.cluster import Cluster, Prompt
from headrace.router.plan import RouterSettings
from headrace_engine.reporting.report import Report
from headrace_engine.step_time import StepTime, pairs_of

BLOCK_TOKENS = 16
STEP_TOKENS = 2048
REPORT_S = 0.15
TARGET = 0.2
"""Loads of `headrace` over those of `least_load`, at most."""


@dataclass(frozen=True)
class Traffic:
    """What is asked of the replicas. Times are in seconds."""

    adapters: int = 20
    exponent: float = 1.0
    requests: int = 3000
    utilisation: float = 0.6
    prompt_tokens: int = 512
    answer_tokens: int = 64
    capacity: int = 12
    load_s: float = 1.0
    seed: int = 0


@dataclass
class Replica:
    """A simulated decode replica."""

    name: str
    traffic: Traffic
    step: StepTime
    free_s: float = 0.0
    """Time at which it has computed all prompts that it has."""
    loaded: OrderedDict[int, None] = field(default_factory=OrderedDict)
    ahead: deque[float] = field(default_factory=deque)
    """Times at which the prompts that it has will be computed."""
    streams: list[float] = field(default_factory=list)
    """Times at which its streams end."""
    heard: deque[tuple[float, str]] = field(default_factory=deque)
    loads: int = 0
    sent: int = 0

    def tidy(self, now_s: float) -> None:
        """Drop what has ended."""
        while self.ahead and self.ahead[0] <= now_s:
            self.ahead.popleft()
        while self.heard and now_s - self.heard[0][0] > 2.0:
            self.heard.popleft()
        self.streams = [end_s for end_s in self.streams if end_s > now_s]

    def take(self, adapter: int, now_s: float, plan_id: str) -> float:
        """Take a request; return its time to first token."""
        self.tidy(now_s)
        t, begin_s = self.traffic, max(now_s, self.free_s)
        if adapter in self.loaded:
            self.loaded.move_to_end(adapter)
        else:
            self.loaded[adapter] = None
            self.loads += 1
            begin_s += t.load_s
            if len(self.loaded) > t.capacity:
                self.loaded.popitem(last=False)
        self.free_s = begin_s + prompt_s(self.step, t.prompt_tokens)
        self.ahead.append(self.free_s)
        step_s = self.step.seconds(0, 1 + len(self.streams), 0, 0, 0)
        self.streams.append(self.free_s + t.answer_tokens * step_s)
        self.heard.append((now_s, plan_id))
        return self.free_s - now_s

    def report(self, now_s: float) -> Report:
        """Return its report."""
        self.tidy(now_s)
        prompt, waiting = self.traffic.prompt_tokens, len(self.ahead)
        begun = len(self.streams) - waiting
        self.sent += 1
        return Report(
            replica=self.name,
            role="decode",
            machine=f"of {self.name}",
            block_tokens=BLOCK_TOKENS,
            token_bytes=1000.0,
            step_tokens=STEP_TOKENS,
            seq=self.sent,
            running=max(0, begun),
            context=max(0, begun) * prompt,
            coming=waiting,
            coming_context=waiting * prompt,
            prompts=waiting,
            queued_tokens=waiting * prompt,
            queued_pairs=float(waiting * pairs_of(0, prompt)),
            free_blocks=1_000_000,
            steps=self.step.to_dict(),  # type: ignore[arg-type]
            heard=tuple(plan for _, plan in self.heard),
            adapters=tuple(map(str, self.loaded)),
            adapter_slots=self.traffic.capacity,
            adapter_load_s=self.traffic.load_s,
        )


def prompt_s(step: StepTime, tokens: int) -> float:
    """Return the seconds to compute a prompt alone."""
    return step.prefill_s(tokens, pairs_of(0, tokens), step_tokens=STEP_TOKENS, rows=0, context=0)


def simulate(rule: str, traffic: Traffic) -> dict[str, float]:
    """Send the traffic by one rule; return its figures."""
    rng, step = random.Random(traffic.seed), StepTime()
    replicas = [Replica(name, traffic, step) for name in ("d1", "d2")]
    by_name = {replica.name: replica for replica in replicas}
    cluster = Cluster(RouterSettings(), random.Random(traffic.seed + 1))
    choose: dict[str, Callable[[int, float], tuple[Replica, str]]] = {
        "headrace": lambda adapter, now_s: _planned(cluster, by_name, adapter, traffic, rng, now_s),
        "least_load": lambda adapter, now_s: (
            min(replicas, key=lambda one: (len(one.streams), rng.random())),
            "",
        ),
        "random": lambda adapter, now_s: (rng.choice(replicas), ""),
    }
    weights = [(rank + 1) ** -traffic.exponent for rank in range(traffic.adapters)]
    rate = traffic.utilisation * len(replicas) / prompt_s(step, traffic.prompt_tokens)
    now_s = reported_s = 0.0
    waits: list[float] = []
    arrivals = random.Random(traffic.seed + 2)
    for _ in range(traffic.requests):
        now_s += arrivals.expovariate(rate)
        while reported_s <= now_s:
            for replica in replicas:
                cluster.report(replica.report(reported_s), reported_s)
            reported_s += REPORT_S
        [adapter] = arrivals.choices(range(traffic.adapters), weights)
        for replica in replicas:
            replica.tidy(now_s)
        chosen, plan_id = choose[rule](adapter, now_s)
        waits.append(chosen.take(adapter, now_s, plan_id))
    return {
        "loads": sum(replica.loads for replica in replicas),
        "ttft_mean_s": round(float(np.mean(waits)), 4),
        "ttft_p99_s": round(float(np.quantile(waits, 0.99)), 4),
    }


def _planned(
    cluster: Cluster,
    replicas: dict[str, Replica],
    adapter: int,
    traffic: Traffic,
    rng: random.Random,
    now_s: float,
) -> tuple[Replica, str]:
    blocks = traffic.prompt_tokens // BLOCK_TOKENS
    keys = np.array([rng.getrandbits(64) for _ in range(blocks)], np.uint64)
    plan = cluster.plan(Prompt(keys, traffic.prompt_tokens, adapter=str(adapter)), now_s)
    return replicas[plan.decode], plan.request_id


def measure(traffic: Traffic) -> dict[str, Any]:
    """Return the figures of all rules, and the ratio that has a target."""
    rules = {rule: simulate(rule, traffic) for rule in ("headrace", "least_load", "random")}
    ratio = rules["headrace"]["loads"] / rules["least_load"]["loads"]
    return {**rules, "loads_vs_least_load": round(ratio, 3)}


def main() -> int:
    """Measure and print; the exit status is 1 if the target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lora", description=(__doc__ or "").splitlines()[0]
    )
    default = Traffic()
    for name in ("adapters", "requests", "capacity", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    for name in ("exponent", "utilisation", "load_s"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=float, default=getattr(default, name))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = vars(parser.parse_args())
    file = args.pop("json")
    figures = measure(Traffic(**args))
    for name, value in figures.items():
        print(f"{name:22} {value}")
    if file is not None:
        file.write_text(json.dumps({"traffic": args, "figures": figures}, indent=2) + "\n")
    return int(figures["loads_vs_least_load"] > TARGET)


if __name__ == "__main__":
    raise SystemExit(main())

"""Two decode replicas and who answers: ``python -m benchmarks.speculation.steer`` (no engine).

Requests come at random, half of them draftable, to replicas whose steps take a line; each drafts
what earns most at its load and tells its prices once a second. The gateway's own rule chooses, once
with these prices and once without. Figures are mean seconds from a request's arrival to its end.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.replica_selection import choose_replica
from headrace.router.token_cost import TokenPrices

CHANCE, DRAFT_TOKENS, REQUESTS, SEEDS = 0.7, 8, 1500, 3
RATES = (0.3, 1.0, 3.0)
CASES = {
    "equal": [(0.020, 0.00075, DRAFT_TOKENS)] * 2,
    "one_half_as_fast": [(0.020, 0.00075, DRAFT_TOKENS), (0.040, 0.0015, DRAFT_TOKENS)],
    "one_capped": [(0.020, 0.00075, DRAFT_TOKENS), (0.020, 0.00075, 0)],
}
"""For each replica: seconds of a step, seconds of each token in it, and maximum draft tokens of a
row."""


@dataclass
class Request:
    drafts: bool
    left: int
    came_s: float
    ended_s: float = 0.0


@dataclass
class Replica:
    """An engine that steps while it has requests."""

    name: str
    base_s: float
    token_s: float
    draft_tokens: int
    now_s: float = 0.0
    rows: list[Request] = field(default_factory=list)

    def seconds(self, tokens: int) -> float:
        return self.base_s + self.token_s * tokens

    def told(self) -> ReplicaInfo:
        step_s = [self.seconds(1 << bits) for bits in range(7)]
        depth = [self.draft_tokens] * len(step_s)
        prices = TokenPrices(step_s, depth, 1000.0, 1000.0 * CHANCE, 0.1)
        return ReplicaInfo(self.name, "", len(self.rows), 0, 0.0, prices)

    def run_until(self, until_s: float, rng: random.Random) -> None:
        while self.rows and self.now_s < until_s:
            self._step(rng)
        if not self.rows:
            self.now_s = max(self.now_s, until_s)

    def _step(self, rng: random.Random) -> None:
        drafting = sum(row.drafts for row in self.rows)
        survivals = [CHANCE**place for place in range(1, self.draft_tokens + 1)]

        def rate(depth: int) -> float:
            expected = len(self.rows) + drafting * sum(survivals[:depth])
            return expected / self.seconds(len(self.rows) + depth * drafting)

        depth = max(range(self.draft_tokens + 1), key=rate)
        self.now_s += self.seconds(len(self.rows) + depth * drafting)
        for row in self.rows:
            row.left -= 1
            tried = depth if row.drafts else 0
            while tried and rng.random() < CHANCE:
                row.left, tried = row.left - 1, tried - 1
            row.ended_s = self.now_s
        self.rows = [row for row in self.rows if row.left > 0]


def simulate(
    case: list[tuple[float, float, int]], rate: float, seed: int, *, steered: bool
) -> tuple[float, float]:
    """Return the mean seconds of draftable requests and of others."""
    rng = random.Random(seed)
    replicas = [Replica(str(number), *kind) for number, kind in enumerate(case)]
    requests: list[Request] = []
    told: list[ReplicaInfo] = []
    now_s, poll_s = 0.0, 0.0
    for _ in range(REQUESTS):
        now_s += rng.expovariate(rate)
        for replica in replicas:
            replica.run_until(now_s, rng)
        if now_s >= poll_s:
            told, poll_s = [replica.told() for replica in replicas], now_s + 1.0
        request = Request(rng.random() < 0.5, rng.randint(20, 200), now_s)
        in_flight = {replica.name: len(replica.rows) for replica in replicas}
        draftable = request.left if steered and request.drafts else 0
        chosen = choose_replica(told, in_flight, (), rng.randbytes(4), draftable)
        assert chosen is not None
        replicas[int(chosen.replica_id)].rows.append(request)
        requests.append(request)
    for replica in replicas:
        replica.run_until(float("inf"), rng)
    mean = [
        fmean(r.ended_s - r.came_s for r in requests if r.drafts is kind) for kind in (True, False)
    ]
    return mean[0], mean[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    for name, case in CASES.items():
        for rate in RATES:
            for steered in (False, True):
                runs = [simulate(case, rate, seed, steered=steered) for seed in range(SEEDS)]
                key = f"{name}.r{rate:g}.{'steered' if steered else 'load_only'}"
                for kind, values in zip(
                    ("draftable_s", "other_s"), zip(*runs, strict=True), strict=True
                ):
                    figures[f"{key}.{kind}"] = round(fmean(values), 3)
    for key, value in figures.items():
        print(f"{key:50} {value:8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

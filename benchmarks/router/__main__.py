"""Cost of a routing decision: ``python -m benchmarks.router [--json FILE]``.

It plans on a warm router (full indexes, 8 running streams, fitted models), with prompts of random
tokens, so that no two share a block. Median microseconds of single calls; no engine, no network.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from headrace.router import Geometry, PlanRequest, PrefillReport, Router, RouterSettings
from headrace.router.replica_planner.prefix_index import chain_seed, hash_blocks

BLOCK_TOKENS = 128
VOCABULARY = 49_152
STREAMS = 8


def warm_router() -> Router:
    router = Router(RouterSettings(), Geometry(BLOCK_TOKENS, 23_040, 350, 350))
    rng = random.Random(0)
    for i in range(400):
        router.costs.decode_step.observe(rng.choice((0, 0, 50, 500)), i % 9, 0, 0, 0, 0.03)
        router.costs.prefill_step.observe(rng.randrange(1, 2000), 0, 0, 0, 0, 0.5)
        router.observe_transfer(rng.randrange(1, 20) * 2_949_120, 0.01)
    router.decode_index.insert([i.to_bytes(16, "big") for i in range(350)])
    router.targets[""].index.insert([i.to_bytes(16, "big") for i in range(350)])
    for i in range(STREAMS):
        router.plan(PlanRequest(f"stream-{i}", [i]))
        router.first_token(f"stream-{i}", 0.1, 0)
    return router


def median_us(call: Callable[[int], object], after: Callable[[int], object], rounds: int) -> float:
    times = []
    for i in range(rounds):
        start = time.perf_counter_ns()
        call(i)
        times.append((time.perf_counter_ns() - start) / 1e3)
        after(i)
    return statistics.median(times)


def measure(rounds: int) -> dict[str, float]:
    router, rng = warm_router(), random.Random(1)
    figures: dict[str, float] = {}
    for length in (50, 500, 2000, 8000):
        prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(rounds)]

        def plan(i: int, length: int = length, prompts: list[list[int]] = prompts) -> None:
            router.plan(PlanRequest(f"{length}-{i}", prompts[i]))

        def finish(i: int, length: int = length) -> None:
            router.finished(f"{length}-{i}")

        figures[f"plan_{length}_us"] = median_us(plan, finish, rounds)

    prompt, seed = [rng.randrange(VOCABULARY) for _ in range(3000)], chain_seed("")
    figures["hash_3000_us"] = median_us(
        lambda _: hash_blocks(prompt, BLOCK_TOKENS, seed), lambda _: None, rounds
    )
    figures["observe_step_us"] = median_us(
        lambda i: router.costs.decode_step.observe(0, 1 + i % 8, 0, 1000, 0, 0.03),
        lambda _: None,
        rounds,
    )

    def whole(i: int) -> None:
        router.plan(PlanRequest(f"w{i}", prompt))
        router.prefill_done(f"w{i}", PrefillReport(0.5, 0.0, 0.4, 0, 3000))
        router.first_token(f"w{i}", 0.6, 2999)
        router.finished(f"w{i}", prompt[:200])

    figures["whole_request_3000_us"] = median_us(whole, lambda _: None, rounds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="What a routing decision costs.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--rounds", type=int, default=500)
    args = parser.parse_args()
    figures = measure(args.rounds)
    for name, value in figures.items():
        print(f"{name:24} {value:8.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""KV of agents' sessions that does not fit: ``python -m benchmarks.sessions [--json FILE]``.

Replays traces through the store's own slot table and policies. The working set is the largest
number of blocks that were used and will be used again, at any time; a clairvoyant with so many
slots recomputes nothing. The table has the working set divided by 1, 2 and 4. Two traces:

- ``agents``: generated (`agents.py`), one for each seed
- ``trace``: one in Mooncake's form

Policies: ``lru`` (with sessions bound to nodes, this is what each node does), ``ttl`` (blocks are
kept for 10 s after their use, then LRU), ``store`` (the store's default, cost-aware), ``belady``
(furthest next use, deepest block first, with all prompts known), and for the generated traces
``known_gaps`` (the store's, told the distribution of each session's gaps: the best forecast).
Figures, mean over the seeds:

    agents.2x.store.recomputed        prompt tokens computed again, as a part of all
    agents.2x.store.of_belady         prompt tokens computed again, over belady's
    agents.2x.store.of_belady.sd      standard deviation over the seeds
    agents.2x.store.of_lru            likewise over LRU's
    agents.2x.store.in_time           part of the turns with TTFT <= 2 s (`serving.py`), at a speed
                                      of which an endless cache uses the part `--busy`
    agents.2x.in_time_of_lru          turns in time with the store's policy over those with LRU
    agents.2x.in_time_of_ttl          likewise over the fixed time to live

The nodes of `lru` and `ttl` prefill in the order of arrival, as vLLM does, and that of `store` in
the order of `headrace_engine.prefill_admission`. What the order alone gives:

    agents.2x.lru.in_time_ordered     as `lru.in_time`, in that order
    agents.2x.store.in_time_fifo      as `store.in_time`, in the order of arrival
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.figures import report
from benchmarks.kvpolicy.foresight import next_use_s
from benchmarks.kvpolicy.replay import Replay
from benchmarks.kvpolicy.workload import Costs, Workload, read_trace
from benchmarks.serving.environment import machine
from benchmarks.sessions.agents import as_workload, sessions
from benchmarks.sessions.baselines import Belady, FixedTtl, KnownGaps
from benchmarks.sessions.serving import speed_of, ttfts_s
from headrace_engine.prefill_admission import MAX_STRETCH
from headrace_kvstore.policy.base import Policy
from headrace_kvstore.policy.cost_aware import CostAware
from headrace_kvstore.policy.recency import LRU

FACTORS = (1, 2, 4)
TTFT_S = 2.0
TTL_S = 10.0
ONLINE: dict[str, Callable[[], Policy]] = {
    "lru": LRU,
    "ttl": lambda: FixedTtl(TTL_S),
    "store": CostAware.create,
}
ARMS = {
    "lru.in_time": ("lru", 0.0),
    "ttl.in_time": ("ttl", 0.0),
    "store.in_time": ("store", MAX_STRETCH),
    "lru.in_time_ordered": ("lru", MAX_STRETCH),
    "store.in_time_fifo": ("store", 0.0),
}
"""Policy, and `stretch` of `serving.ttfts_s`."""
TARGETS = {
    "agents.2x.store.of_belady": "<= 1.15",
    "agents.2x.in_time_of_lru": ">= 1.5",
    "agents.2x.in_time_of_ttl": ">= 1.2",
    "agents.1x.store.of_lru": "<= 1",
}


def working_set(work: Workload) -> int:
    """Return the largest number of blocks that have been used and will be used again."""
    used_s = np.repeat(work.arrival_s, np.diff(work.starts))
    next_s = next_use_s(work)
    again = np.isfinite(next_s)
    at_s = np.concatenate([next_s[again], used_s[again]])
    change = np.concatenate([np.full(again.sum(), -1), np.full(again.sum(), 1)])
    live = np.cumsum(change[np.argsort(at_s, kind="stable")])
    return int(live.max(initial=1))


def recomputed(
    work: Workload, costs: Costs, slots: int, known_gaps: Callable[[int], Policy] | None = None
) -> dict[str, float]:
    """Return by policy the prompt tokens that were computed before and are computed again."""
    endless = int(work.endless_hits().sum())
    policies: dict[str, Policy] = {"belady": Belady(work, slots)}
    policies |= {name: make() for name, make in ONLINE.items()}
    if known_gaps is not None:
        policies["known_gaps"] = known_gaps(slots)
    return {
        name: float(endless - Replay(work, costs, slots, policy).run().hits.sum())
        * costs.block_tokens
        for name, policy in policies.items()
    }


def measure_trace(
    work: Workload, costs: Costs, known_gaps: Callable[[int], Policy] | None = None
) -> dict[str, float]:
    """Return the figures of one workload about recomputed tokens."""
    figures = {"working_set_gigabytes": working_set(work) * costs.block_bytes / 1e9}
    for factor in FACTORS:
        found = recomputed(work, costs, working_set(work) // factor, known_gaps)
        for name, tokens in found.items():
            at = f"{factor}x.{name}"
            figures[f"{at}.recomputed"] = tokens / (len(work.blocks) * costs.block_tokens)
            if name != "belady" and factor > 1:
                figures[f"{at}.of_belady"] = tokens / found["belady"]
        figures[f"{factor}x.store.of_lru"] = found["store"] / found["lru"]
    return figures


def measure_agents(seed: int, seconds: float, block_tokens: int, busy: float) -> dict[str, float]:
    """Return the figures of one generated trace."""
    costs = Costs(block_tokens=block_tokens)
    found = sessions(seed, seconds, block_tokens)
    work = as_workload(found, seconds, block_tokens)
    figures = {"turns": float(len(work))}
    figures |= measure_trace(work, costs, partial(KnownGaps, found, seconds))
    speed = speed_of(work, costs, busy)
    for factor in FACTORS:
        slots, turns = working_set(work) // factor, {}
        for name, (of, stretch) in ARMS.items():
            cache = Replay(work, costs, slots, ONLINE[of]())
            ttft_s = np.array(ttfts_s(found, costs, cache, speed, seconds, stretch))
            turns[name] = float((ttft_s <= TTFT_S).sum())
            figures[f"{factor}x.{name}"] = turns[name] / len(ttft_s)
        figures[f"{factor}x.in_time_of_lru"] = turns["store.in_time"] / turns["lru.in_time"]
        figures[f"{factor}x.in_time_of_ttl"] = turns["store.in_time"] / turns["ttl.in_time"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="KV of agents' sessions that does not fit.")
    parser.add_argument(
        "--trace", type=Path, default=Path("../shared/traces/mooncake_conversation.jsonl")
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=200.0, help="of each generated trace")
    parser.add_argument("--block-tokens", type=int, default=128, help="of the generated traces")
    parser.add_argument(
        "--busy", type=float, default=0.2, help="load of the node with an endless cache"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    by_seed: dict[str, list[float]] = defaultdict(list)
    for seed in range(args.seeds):
        found = measure_agents(seed, args.seconds, args.block_tokens, args.busy)
        for name, value in found.items():
            by_seed[name].append(value)
        print(f"seed {seed} of {args.seeds}", flush=True)
    figures = {}
    for name, values in by_seed.items():
        figures[f"agents.{name}"] = float(np.mean(values))
        if "_of_" in name or ".of_" in name:
            figures[f"agents.{name}.sd"] = float(np.std(values, ddof=min(1, len(values) - 1)))
    if args.trace.exists():
        found = measure_trace(read_trace(args.trace), Costs())
        figures |= {f"trace.{name}": value for name, value in found.items()}
    report(figures, TARGETS, machine(), args.json)


if __name__ == "__main__":
    main()

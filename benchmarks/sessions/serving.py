"""A node that prefills agents' turns one after the other, in a closed loop.

A session's next turn arrives its gap after the first token of the turn before, so a slow answer
delays it. TTFT is the wait for the node, the load of the blocks found, and the prefill of all other
tokens. Speed is relative to `workload.Costs`.
"""

from __future__ import annotations

import heapq

import numpy as np

from benchmarks.kvpolicy.replay import Replay
from benchmarks.kvpolicy.workload import Costs, Workload
from benchmarks.sessions.agents import Session
from headrace_kvstore.policy.base import Policy


def prefill_s(costs: Costs, known: float, tokens: float) -> float:
    """Return seconds to prefill a prompt of `tokens`, the first `known` of which are cached."""
    new = tokens - known
    return new * (costs.flops_token + costs.flops_pair * (known + new / 2)) / costs.flops_s


def speed_of(work: Workload, costs: Costs, busy: float) -> float:
    """Return the speed at which an endless cache keeps the node busy for this part of the time."""
    tokens = np.diff(work.starts) * costs.block_tokens
    known = work.endless_hits() * costs.block_tokens
    total_s = sum(map(prefill_s, [costs] * len(work), known.tolist(), tokens.tolist()))
    return total_s / (busy * float(work.arrival_s[-1]))


def ttfts_s(
    found: list[Session],
    work: Workload,
    costs: Costs,
    slots: int,
    policy: Policy,
    speed: float,
    seconds: float,
) -> list[float]:
    """Return the TTFT of each turn that arrives within `seconds`."""
    cache = Replay(work, costs, slots, policy)
    turns = [(session.start_s, i, 0) for i, session in enumerate(found)]
    heapq.heapify(turns)
    free_s, ttft_s = 0.0, []
    while turns:
        arrival_s, i, turn = heapq.heappop(turns)
        if arrival_s >= seconds:
            break
        session = found[i]
        tokens = int(session.tokens[turn])
        chain = session.blocks[: tokens // costs.block_tokens]
        hits = cache.step(chain, arrival_s, 0)
        computed_s = prefill_s(costs, hits * costs.block_tokens, tokens) / speed
        free_s = max(free_s, arrival_s) + computed_s
        done_s = free_s + hits * costs.load_s
        ttft_s.append(done_s - arrival_s)
        if turn + 1 < len(session.tokens):
            heapq.heappush(turns, (done_s + float(session.gaps_s[turn]), i, turn + 1))
    return ttft_s

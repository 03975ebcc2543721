"""A node that prefills agents' turns one after the other, in a closed loop.

A session's next turn arrives its gap after the first token of the turn before, so a slow answer
delays it. TTFT is the wait for the node, the load of the blocks found, and the prefill of all other
tokens. Speed is relative to `workload.Costs`. The waiting turns are prefilled in the order of
`headrace_engine.prefill_admission`, or in the order of their arrival, as vLLM does.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from benchmarks.kvpolicy.replay import Replay
from benchmarks.kvpolicy.workload import Costs, Workload
from benchmarks.sessions.agents import Session


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
    costs: Costs,
    cache: Replay,
    speed: float,
    seconds: float,
    stretch: float,
) -> list[float]:
    """Return the TTFT of each turn that arrives within `seconds`; inf if it waits longer than that.

    Args:
        stretch: how many times its own prefill time a turn lets later ones pass it; 0 for the order
            of arrival.
    """
    arriving = [(session.start_s, i, 0) for i, session in enumerate(found)]
    heapq.heapify(arriving)
    waiting: list[tuple[float, float, int, int]] = []
    free_s, ttft_s = 0.0, []
    while arriving or waiting:
        if not waiting:
            free_s = max(free_s, arriving[0][0])
        while arriving and arriving[0][0] <= free_s:
            arrival_s, i, turn = heapq.heappop(arriving)
            due_s = arrival_s
            if stretch:
                tokens = int(found[i].tokens[turn])
                known = cache.leading(_chain(found[i], tokens, costs)) * costs.block_tokens
                due_s += stretch * prefill_s(costs, known, tokens) / speed
            heapq.heappush(waiting, (due_s, arrival_s, i, turn))
        if free_s >= seconds:
            break
        _, arrival_s, i, turn = heapq.heappop(waiting)
        session, tokens = found[i], int(found[i].tokens[turn])
        hits = cache.step(_chain(session, tokens, costs), free_s, 0)
        free_s += prefill_s(costs, hits * costs.block_tokens, tokens) / speed
        done_s = free_s + hits * costs.load_s
        ttft_s.append(done_s - arrival_s)
        if turn + 1 < len(session.tokens):
            heapq.heappush(arriving, (done_s + float(session.gaps_s[turn]), i, turn + 1))
    return ttft_s + [math.inf for _, arrival_s, _, _ in waiting if arrival_s < seconds]


def _chain(session: Session, tokens: int, costs: Costs) -> NDArray[np.int64]:
    return session.blocks[: tokens // costs.block_tokens]

"""Search for the cheapest pair of a prefill and a decode engine, without pricing all pairs.

A pair costs (`placement.pricing`)

    max(A_p + handoff_d + X(p, d), Q_d) + last_d + rest_d + behind_p

where ``X`` depends on the bytes that ``d`` lacks, and on whether both engines are on one node. As
no term is negative,

    max(A_p + behind_p + handoff_d + X(d), Q_d) + last_d + rest_d

is a lower bound. All pairs within a node are priced. For pairs across nodes, the outer loop visits
decode engines in the order of their bound with the smallest ``A + behind``, and the inner loop
visits prefill engines in the order of ``A + behind``. Each loop ends when its bound reaches the
best price, as no later pair is cheaper. Equal prices are ordered by rendezvous weight, so
callers with equal views choose alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.router.placement.arrays import LATE, NO_ROOM, SLOW_STEP
from headrace.router.placement.pricing import (
    arrival_parts,
    behind_s,
    held_tokens,
    idle_s,
    kv_bytes,
    local_parts,
    prefill_cost,
    price_engines,
    wait_s,
)
from headrace_kvstore.numba_jit import jit

ELSEWHERE, WITHIN = 0, 1
"""Rows of the transfer fits: from one node to another, and within a node."""

CHOICE = np.dtype([("seconds", "f8"), ("prefill", "i8"), ("decode", "i8"), ("broken", "i8")])
"""One choice: rows of the engines. `prefill` is -1 for a local prefill, `decode` -1 for none."""


LOCAL_PARTS = ("queue", "pull", "compute", "load", "stall", "behind")
REMOTE_PARTS = (
    *("call", "queue", "pull", "compute", "load", "transfer", "handoff"),
    *("decode_queue", "decode", "stall", "behind"),
)
"""Parts of each kind's total."""
TOTAL, CACHED, LOADED_RUNS, CACHED_DECODE, LOADED_RUNS_DECODE = range(11, 16)
"""Columns of a detail after the parts: their sum; the cached tokens and the number of loaded runs
of the engine that prefills; the same two of the decode engine, for a prefill of its own."""


@jit()
def _less(keys: Any, ties: Any, a: int, b: int) -> Any:
    if keys[a] != keys[b]:
        return keys[a] < keys[b]
    return ties[a] > ties[b]


@jit()
def _sift(heap: Any, size: int, at: int, keys: Any, ties: Any) -> Any:
    while True:
        least, left = at, 2 * at + 1
        for child in (left, left + 1):
            if child < size and _less(keys, ties, heap[child], heap[least]):
                least = child
        if least == at:
            return
        heap[at], heap[least] = heap[least], heap[at]
        at = least


@jit()
def _pop(heap: Any, size: int, keys: Any, ties: Any) -> Any:
    """Remove and return the first entry of a heap of `size`; the caller lowers `size`."""
    top = heap[0]
    heap[0] = heap[size - 1]
    _sift(heap, size - 1, 0, keys, ties)
    return top


@jit()
def _keep(found: Any, costs: Any, seconds: float, p: int, d: int, broken: int) -> Any:
    """Replace the choice in `found` if this one is better."""
    if found.decode >= 0 and seconds >= found.seconds:
        if seconds > found.seconds:
            return
        mine, theirs = costs[d].tie, costs[found.decode].tie
        if mine == theirs and p >= 0 and found.prefill >= 0:
            mine, theirs = costs[p].tie, costs[found.prefill].tie
        if mine <= theirs:
            return
    found.seconds, found.prefill, found.decode, found.broken = seconds, p, d, broken


@jit()
def find_local(engines: Any, costs: Any, found: Any, allowed: int) -> Any:
    """Find the best local prefill that breaks only `allowed` constraints."""
    for d in range(len(engines)):
        if engines[d].decode and not costs[d].broken_local & ~allowed:
            _keep(found, costs, costs[d].local_s, -1, d, costs[d].broken_local)


@jit()
def _move_s(size: float, fits: Any, link: int) -> Any:
    return fits[link, 0] + size * fits[link, 1] if size > 0.0 else 0.0


@jit()
def find_pairs(
    engines: Any,
    costs: Any,
    nodes: int,
    fits: Any,
    ttft_s: float,
    found: Any,
    allowed: int,
) -> Any:
    """Find the best pair.

    Args:
        costs: the result of `pricing.price_engines`.
        nodes: number of nodes.
        fits: (fixed_s, byte_s, relative error) of transfers, [`ELSEWHERE` and `WITHIN`, 3].
        ttft_s: target; inf for none.
        found: a CHOICE, set to the best pair.
        allowed: constraints that the pair may break.

    Returns:
        How many pairs were priced.
    """
    count = len(engines)
    keys = np.empty(count)
    ties = np.empty(count, np.uint64)
    order = np.empty(count, np.int64)  # the prefill engines that are sorted already
    heap_p = np.empty(count, np.int64)
    size_p, sorted_p, priced = 0, 0, 0
    min_key = np.inf
    for p in range(count):
        if engines[p].prefill:
            heap_p[size_p] = p
            size_p += 1
            keys[p], ties[p] = costs[p].arrival_s + costs[p].behind_s, costs[p].tie
            min_key = min(min_key, keys[p])
    if size_p == 0:
        return 0
    for at in range(size_p // 2 - 1, -1, -1):
        _sift(heap_p, size_p, at, keys, ties)

    # Price the pairs within a node, and compute the decode engines' lower bounds.
    first = np.full(nodes, -1)
    after = np.full(count, -1)
    for p in range(count):
        if engines[p].prefill:
            after[p] = first[costs[p].node]
            first[costs[p].node] = p
    heap_d = np.empty(count, np.int64)
    move_s = np.empty(count)
    size_d = 0
    for d in range(count):
        cost = costs[d]
        if not engines[d].decode or cost.broken_remote & ~allowed:
            continue
        node = cost.node
        own_s = _move_s(cost.bytes, fits, WITHIN)
        p = first[node]
        while p >= 0:
            priced += 1
            begins = max(costs[p].arrival_s + cost.handoff_s + own_s, cost.queue_s) + cost.last_s
            late = LATE if begins > ttft_s else 0
            if not late & ~allowed:
                seconds = begins + cost.rest_s + costs[p].behind_s
                _keep(found, costs, seconds, p, d, cost.broken_remote | late)
            p = after[p]
        if nodes > 1:
            move_s[d] = cost.handoff_s + _move_s(cost.bytes, fits, ELSEWHERE)
            bound = max(min_key + move_s[d], cost.queue_s) + cost.last_s + cost.rest_s
            keys[d], ties[d] = bound, cost.tie
            heap_d[size_d] = d
            size_d += 1
    for at in range(size_d // 2 - 1, -1, -1):
        _sift(heap_d, size_d, at, keys, ties)

    while size_d:
        d = _pop(heap_d, size_d, keys, ties)
        size_d -= 1
        if found.decode >= 0 and keys[d] >= found.seconds:
            break
        cost = costs[d]
        at = 0
        while True:
            if at == sorted_p:
                if size_p == 0:
                    break
                order[at] = _pop(heap_p, size_p, keys, ties)
                size_p -= 1
                sorted_p += 1
            p = order[at]
            at += 1
            bound = max(keys[p] + move_s[d], cost.queue_s) + cost.last_s + cost.rest_s
            if found.decode >= 0 and bound >= found.seconds:
                break
            if costs[p].node == cost.node:
                continue
            priced += 1
            begins = max(costs[p].arrival_s + move_s[d], cost.queue_s) + cost.last_s
            late = LATE if begins > ttft_s else 0
            if not late & ~allowed:
                seconds = begins + cost.rest_s + costs[p].behind_s
                _keep(found, costs, seconds, p, d, cost.broken_remote | late)
    return priced


@jit()
def _detail(
    ask: Any,
    engines: Any,
    curves: Any,
    padded: Any,
    held: Any,
    stores: Any,
    fits: Any,
    found: Any,
    out: Any,
) -> Any:
    """Write one choice to `out` by part: `LOCAL_PARTS` or `REMOTE_PARTS`, then `TOTAL` etc."""
    p, d = found.prefill, found.decode
    engine, node = engines[d], engines[d].node
    cached = held_tokens(ask, engine.hbm, held)
    loaded = prefill_cost(ask, engine, curves, padded, d, cached, stores)
    queue = wait_s(engine, ask.now_s)
    pull, compute, load, stall, behind, last, more, last_behind = local_parts(
        ask, engine, curves, padded, d, loaded
    )
    out[CACHED] = out[CACHED_DECODE] = cached
    out[LOADED_RUNS] = out[LOADED_RUNS_DECODE] = loaded[4]
    if p < 0:
        out[0], out[1], out[2], out[3] = queue, pull, compute, load
        out[4], out[5] = stall, behind
    else:
        other, where = engines[p], engines[p].node
        out[CACHED] = held_tokens(ask, other.hbm, held)
        loaded = prefill_cost(ask, other, curves, padded, p, int(out[CACHED]), stores)
        out[LOADED_RUNS] = loaded[4]
        out[0], out[2], out[3], out[4] = arrival_parts(other, loaded)
        out[1] = wait_s(other, ask.now_s)
        size = kv_bytes(ask, cached)
        out[5] = _move_s(size, fits, WITHIN if where == node else ELSEWHERE)
        out[6] = engine.handoff_s
        out[7] = max(0.0, queue - out[:7].sum())
        out[8] = last
        out[9] = more
        idle = idle_s(other, curves, padded, p)
        out[10] = behind_s(other, out[3] + out[4], idle) + last_behind
    out[TOTAL] = out[:TOTAL].sum()


@jit()
def find_choices(
    asks: Any,
    engines: Any,
    curves: Any,
    padded: Any,
    held: Any,
    stores: Any,
    fits: Any,
    remote: bool,
) -> Any:
    """Find the best choice of each kind.

    If every choice of a kind is late, a late one is returned. If every choice breaks another
    constraint, the cheapest of all is returned.

    Args:
        asks: REQUEST [1].
        engines, curves, padded, fits: as `ClusterView` has them.
        held: leading blocks that each holder has, int32 [holders].
        stores: a `NodeStores`.
        remote: whether pairs are wanted, too.

    Returns:
        (choices CHOICE [2]: the local one and the pair; each by part, [2, 16])
    """
    ask = asks[0]
    costs = price_engines(ask, engines, curves, padded, held, stores)
    kinds = np.zeros(2, CHOICE)
    details = np.zeros((2, LOADED_RUNS_DECODE + 1))
    for kind in range(2):
        found = kinds[kind]
        for allowed in (0, LATE, LATE | NO_ROOM | SLOW_STEP):
            found.decode = -1
            if kind == 0:
                find_local(engines, costs, found, allowed)
            elif remote:
                find_pairs(engines, costs, len(stores.loads), fits, ask.ttft_s, found, allowed)
            if found.decode >= 0:
                _detail(ask, engines, curves, padded, held, stores, fits, found, details[kind])
                break
    return kinds, details

"""Price of a prompt on each engine and on each pair of engines: the formula, compiled.

A choice is a decode engine ``d``, and a prefill engine ``p`` or none. Its price is the number of
seconds that it adds over all requests, each second of each request with the same weight. It is the
sum of this request's time to first token, the time that running streams lose, and the time that the
later prompts in the queue wait::

    local(d)     = Q_d + pull_d + W_d + r_d max(0, W_d - k z_d) + behind_d(W_d)
    remote(p, d) = max(A_p + handoff_d + X(p, d), Q_d) + T_d(1, r_d)
                   + behind_p(W_p) + behind_d(T_d(1, r_d))
                   + r_d max(0, T_d(1, r_d) - z_d)
    A_p          = call_p + Q_p + pull_p + W_p
    W            = max(C, L)
    behind(t)    = n max(0, t - T(0, r))
    z_d          = max(T_d(0, r_d), ITL target)

- ``T(n, r)``: seconds of a step with ``n`` prompt tokens beside ``r`` running requests
  (`headrace_engine.step_time`), attention included. A prompt above the engine's token budget takes
  ``k`` steps. A single prompt token costs as much as a token of a running request.
- ``C``: seconds of the steps that compute the tokens that are neither in the engine's prefix cache
  nor loaded; at least one token.
- ``L``: seconds to load from the node's store, each medium at its own speed, in parallel with the
  computation. ``pull``: the wait for blocks that must first be brought into DRAM, from another node
  or from the object store. Leading runs in DRAM are always loaded. After them, runs are loaded up
  to the end of the run where ``pull + max(C, L)`` is smallest. Within a run, both times grow about
  linearly, so the best point is an end of a run (as in `headrace_engine.connector.load_price`).
- A request with a LoRA adapter that an engine lacks: ``W`` and ``T_d(1, r_d)`` include the seconds
  to load it, since the engine makes no step during the load. If the load evicts another adapter,
  the next request for that one waits as long: ``behind`` includes these seconds.
- ``Q``: expected seconds until the engine begins with this prompt. A reported queue of ``q``
  seconds that is ``a`` seconds old has a normal error of variance ``drift a``, and no queue is
  below 0: ``Q = q Phi(q / s) + s phi(q / s)``, ``s = sqrt(drift a)``. Therefore an idle engine
  without a recent report no longer counts as idle.
- ``X``: seconds to move the KV of the blocks that ``d`` lacks, fitted for moves between nodes and
  within a node.
- ``call``, ``handoff``: overheads of the prefill call, and from its return to the first token.
- ``r``: streams that will run when the engine begins with this prompt: the running ones, the ones
  whose prompts are ahead of it, and the ones whose KV will arrive from a prefill engine.
- ``z``: step time that costs the streams nothing. With an ITL target, steps within the target are
  free. Without one, each second beyond a step without this prompt counts.
- ``behind``: time that later prompts lose. ``n`` prompts are ahead. They arrived while the first of
  them waited, which took about as long as this prompt will wait. Therefore as many will arrive
  while it waits (Little's law, with the past as the estimate of the future), and each of them waits
  for the time that this prompt adds to the steps. Prompts share steps, so the engine would have
  made a step without this prompt anyway. Without a queue no prompt waits. The later prompts up to
  the end of the queue are left out.
"""

# The functions below never pass on a slice of an array: numba would count a reference for each,
# which made the whole computation take 1.5 times as long.

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headrace.router.placement.arrays import COST, LATE, NO_ROOM, SLOW_STEP
from headrace_engine.step_time import KNOTS
from headrace_kvstore.lookup.availability import DRAM, MEDIA, NVME
from headrace_kvstore.numba_jit import jit

_DRAM, _NVME = MEDIA.index(DRAM), MEDIA.index(NVME)
_KNOTS = np.array(KNOTS)
_LAST = len(KNOTS) - 1


@jit()
def hash_pair(key: Any, other: Any) -> Any:
    """Hash two u64 (splitmix64's finaliser): the rendezvous weight of a name for a prefix."""
    x = np.uint64(key) ^ (np.uint64(other) * np.uint64(0x9E3779B97F4A7C15))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit()
def sized_step_s(engine: Any, curves: Any, padded: Any, i: int, prompt: float, rows: float) -> Any:
    """Return the seconds of a step of engine `i`, by its size alone.

    Args:
        curves: seconds at each knot, [engines, 29].
        padded: sizes that the engine pads to, filled up with inf, [engines, sizes].
    """
    n = engine.weight * prompt + rows
    low, high = 0, padded.shape[1]
    while low < high:
        middle = (low + high) >> 1
        if padded[i, middle] < n:
            low = middle + 1
        else:
            high = middle
    if low < padded.shape[1] and padded[i, low] < np.inf:
        n = padded[i, low]
    if n <= 1.0:
        return curves[i, 0]
    if n >= _KNOTS[_LAST]:
        return curves[i, _LAST] * n / _KNOTS[_LAST]
    upper, high = 0, _LAST
    while upper < high:
        middle = (upper + high) >> 1
        if _KNOTS[middle] < n:
            upper = middle + 1
        else:
            high = middle
    left, right = _KNOTS[upper - 1], _KNOTS[upper]
    return curves[i, upper - 1] + (curves[i, upper] - curves[i, upper - 1]) * (n - left) / (
        right - left
    )


@jit()
def step_s(
    engine: Any,
    curves: Any,
    padded: Any,
    i: int,
    prompt: float,
    rows: float,
    context: float,
    pairs: float,
) -> Any:
    """Return the same as `StepTime.seconds` for a step without drafts."""
    seconds = sized_step_s(engine, curves, padded, i, prompt, rows)
    return seconds + engine.context_s * context + engine.pair_s * pairs


@jit()
def full_step_s(engine: Any, curves: Any, padded: Any, i: int, tokens: int) -> Any:
    """Return `sized_step_s` of a full step of the engine; 0 if `tokens` do not fill one."""
    if tokens < engine.step_tokens:
        return 0.0
    return sized_step_s(engine, curves, padded, i, engine.step_tokens, engine.running)


@jit()
def prefill_s(
    engine: Any, curves: Any, padded: Any, i: int, tokens: int, pairs: float, full: float
) -> Any:
    """Return the same as `StepTime.prefill_s`, beside all requests that decode there.

    Args:
        full: the result of `full_step_s`.
    """
    rows, context = engine.running, engine.context
    if tokens == 1:
        return step_s(engine, curves, padded, i, 0.0, rows + 1.0, context + pairs, 0.0)
    size = engine.step_tokens
    steps = tokens // size
    rest = tokens - steps * size
    total_s = 0.0
    if steps:
        part = pairs * size / tokens
        total_s += steps * (full + engine.context_s * context + engine.pair_s * part)
    if rest:
        total_s += step_s(engine, curves, padded, i, rest, rows, context, pairs * rest / tokens)
    return total_s


@jit()
def queue_s(engine: Any, curves: Any, padded: Any, i: int) -> Any:
    """Return the seconds to compute the prompts ahead."""
    tokens = engine.queued_tokens
    full = full_step_s(engine, curves, padded, i, tokens)
    return prefill_s(engine, curves, padded, i, tokens, engine.queued_pairs, full)


@jit()
def last_pairs(prompt_tokens: int, tokens: int) -> Any:
    """Return `step_time.pairs_of` for the last `tokens` tokens of a prompt."""
    end = max(prompt_tokens, tokens)
    begin = end - tokens
    return (end * (end + 1) - begin * (begin + 1)) // 2


@jit()
def wait_s(engine: Any, now_s: float) -> Any:
    """Return Q, the expected seconds until the engine begins with one more prompt."""
    queue_s = max(0.0, engine.queue_s - max(0.0, now_s - engine.at_s))
    if not (engine.drift > 0.0 and engine.reported_s > -np.inf):
        return queue_s
    spread_s = math.sqrt(engine.drift * max(0.0, now_s - engine.reported_s))
    if not spread_s * 8.0 > queue_s:  # otherwise Q and q differ by less than rounding
        return queue_s
    z = queue_s / spread_s
    below = 0.5 * math.erfc(-z / math.sqrt(2.0))
    return queue_s * below + spread_s * math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)


@jit()
def held_tokens(ask: Any, holder: int, held: Any) -> Any:
    """Return the tokens in an engine's own cache that it need not compute.

    The engine always computes at least the last token.
    """
    if holder < 0 or holder >= len(held):
        return 0
    useful = max(0, ask.prompt_tokens - 1) // ask.block_tokens
    return min(held[holder], useful) * ask.block_tokens


@jit()
def prefill_cost(
    ask: Any,
    engine: Any,
    curves: Any,
    padded: Any,
    i: int,
    cached: int,
    stores: Any,
) -> Any:
    """Return how much of a prompt an engine computes and loads.

    Args:
        cached: tokens in its own cache.
        stores: a `NodeStores`.

    Returns:
        (tokens to compute, seconds to compute, seconds to load, seconds until pulled blocks are in
        DRAM, number of leading runs that are loaded)
    """
    n, node, held = ask.prompt_tokens, engine.node, 0
    lengths, waits, media, loads = stores
    for run in range(lengths.shape[1]):
        held += lengths[node, run]
    useful = min(held, max(0, n - 1)) // ask.block_tokens * ask.block_tokens
    tokens = max(1, n - cached)
    pairs = last_pairs(n, tokens)
    full = full_step_s(engine, curves, padded, i, tokens)
    compute = prefill_s(engine, curves, padded, i, tokens, pairs, full)
    best = (tokens, compute, 0.0, 0.0, 0)
    best_s = compute
    end, from_dram, from_nvme = 0, 0, 0
    pull_s, slow = 0.0, False
    for run in range(lengths.shape[1]):
        begin = max(end, cached)
        end += lengths[node, run]
        new = min(end, useful) - begin
        if new <= 0:
            continue
        if media[node, run] == _NVME:
            from_nvme += new
        else:
            from_dram += new
        slow |= media[node, run] != _DRAM
        pull_s += waits[node, run] * new / lengths[node, run]
        load_s = 0.0
        if from_dram:
            load_s += loads[node, _DRAM, 0] + from_dram * ask.token_bytes * loads[node, _DRAM, 1]
        if from_nvme:
            load_s += loads[node, _NVME, 0] + from_nvme * ask.token_bytes * loads[node, _NVME, 1]
        tokens = max(1, n - cached - from_dram - from_nvme)
        pairs = last_pairs(n, tokens)
        compute = prefill_s(engine, curves, padded, i, tokens, pairs, full)
        seconds = pull_s + max(compute, load_s)
        if not slow or seconds <= best_s:
            best = (tokens, compute, load_s, pull_s, run + 1)
            best_s = seconds
    return best


@jit()
def kv_bytes(ask: Any, cached: int) -> Any:
    """Return the KV bytes of the blocks that an engine with `cached` tokens of the prompt lacks."""
    blocks = -(-ask.prompt_tokens // ask.block_tokens)
    return (blocks * ask.block_tokens - cached) * ask.token_bytes


@jit()
def needed_blocks(ask: Any, engine: Any, cached: int, most: int) -> Any:
    """Return the blocks that a prompt takes beyond its cached tokens (`BlockUse.blocks`).

    Args:
        most: maximum number of blocks in groups that keep a window.
    """
    all_blocks, held = -(-ask.prompt_tokens // ask.block_tokens), cached // ask.block_tokens
    need = engine.kept * (all_blocks - held)
    return need + min(engine.windowed * all_blocks, most) - min(engine.windowed * held, most)


@jit()
def arrival_parts(engine: Any, found: Any) -> Any:
    """Return (call, pull, compute, load) of A_p.

    Args:
        found: the result of `prefill_cost`.
    """
    _, compute, load, pull, _ = found
    return engine.call_s, pull, compute, max(0.0, load - compute) + engine.adapter_s


@jit()
def idle_s(engine: Any, curves: Any, padded: Any, i: int) -> Any:
    """Return T(0, r), the seconds of a step that computes no prompt."""
    return step_s(engine, curves, padded, i, 0.0, engine.running, engine.context, 0.0)


@jit()
def behind_s(engine: Any, work_s: float, idle: float) -> Any:
    """Return n max(0, W - T(0, r)), the seconds that later prompts lose by steps of `work_s`, and
    those that an evicted adapter's next request will lose."""
    return engine.prompts * max(0.0, work_s - idle) + engine.reload_s


@jit()
def local_parts(ask: Any, engine: Any, curves: Any, padded: Any, i: int, found: Any) -> Any:
    """Return the parts of local(d), and the figures of a step with one more request.

    Args:
        found: the result of `prefill_cost`.

    Returns:
        (pull, compute, load, stall, behind) of local(d), T_d(1, r_d), and the seconds that the
        running streams, and the later prompts, lose by that step.
    """
    tokens, compute, load_s, pull, _ = found
    rows = engine.running
    idle = idle_s(engine, curves, padded, i)
    load = max(0.0, load_s - compute) + engine.adapter_s
    steps = -(-tokens // engine.step_tokens)
    pace = max(idle, ask.itl_s) if ask.itl_s < np.inf else idle
    stall = rows * max(0.0, compute + load - steps * pace)
    context = engine.context + max(ask.prompt_tokens, 1)
    last = step_s(engine, curves, padded, i, 0.0, rows + 1.0, context, 0.0) + engine.adapter_s
    more = rows * max(0.0, last - pace)
    behind = behind_s(engine, compute + load, idle)
    last_behind = behind_s(engine, last, idle)
    return pull, compute, load, stall, behind, last, more, last_behind


@jit()
def price_engines(ask: Any, engines: Any, curves: Any, padded: Any, held: Any, stores: Any) -> Any:
    """Return each engine's part of every choice (COST), [engines]."""
    count = len(engines)
    costs = np.zeros(count, COST)
    for i in range(count):
        engine = engines[i]
        cost = costs[i]
        cost.queue_s = wait_s(engine, ask.now_s)
        if not (engine.prefill or engine.decode):
            continue
        cost.node = engine.node
        cost.tie = hash_pair(engine.key, ask.affinity)
        cached = held_tokens(ask, engine.hbm, held)
        found = prefill_cost(ask, engine, curves, padded, i, cached, stores)
        if engine.prefill:
            call, pull, compute, load = arrival_parts(engine, found)
            cost.arrival_s = call + cost.queue_s + pull + compute + load
            cost.behind_s = behind_s(engine, compute + load, idle_s(engine, curves, padded, i))
        if engine.decode:
            pull, compute, load, stall, behind, last, more, last_behind = local_parts(
                ask, engine, curves, padded, i, found
            )
            rows = engine.running
            cost.handoff_s = engine.handoff_s
            cost.last_s = last
            cost.rest_s = more + last_behind
            cost.bytes = kv_bytes(ask, cached)
            cost.local_ttft_s = cost.queue_s + pull + compute + load
            cost.local_s = cost.local_ttft_s + stall + behind
            broken = 0
            if 0 <= engine.free_blocks < needed_blocks(ask, engine, cached, engine.prompt_blocks):
                broken = NO_ROOM
            cost.broken_local = cost.broken_remote = broken
            if broken and engine.windowed:  # of a pulled prompt, only the windows are kept
                need = needed_blocks(ask, engine, cached, engine.window_blocks)
                cost.broken_remote = NO_ROOM if engine.free_blocks < need else 0
            if rows and ask.itl_s < np.inf:
                if last > ask.itl_s:
                    cost.broken_remote |= SLOW_STEP
                tokens = min(found[0], engine.step_tokens)
                pairs = last_pairs(ask.prompt_tokens, tokens)
                full = full_step_s(engine, curves, padded, i, tokens)
                step = prefill_s(engine, curves, padded, i, tokens, pairs, full)
                if step + engine.adapter_s > ask.itl_s:
                    cost.broken_local |= SLOW_STEP
            if cost.local_ttft_s > ask.ttft_s:
                cost.broken_local |= LATE
    return costs

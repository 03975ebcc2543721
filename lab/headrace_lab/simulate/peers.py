"""Placement rules of other routers, as published, each a function of what a router sees.

All see the same: exact prefixes of every engine and of the store of its node, through events, with
what was placed counted as there (`known`), and requests in flight counted exactly. That is more
than some of these routers have. Where a rule is published for one kind of replica only, it chooses
the prefill engine, and decode engines are chosen as that project's own prefill/decode mode does.

Ties go to the lowest number unless the rule says otherwise.
"""

from __future__ import annotations

from random import Random

import numpy as np

from headrace.simulate.hardware import prefill_s
from headrace.simulate.policies import Indices, better_of_two, choice, least, sides
from headrace.simulate.sight import Ask, Choice, Floats, Sight


def ray(sight: Sight, ask: Ask, rng: Random) -> Choice:
    """Ray Serve 2.60's `PrefixCacheAffinityRouter` for prefill, its default for decode.

    Queues that differ by more than `imbalanced_threshold`: power of two choices. A match of at
    least `match_rate_threshold` = 10 % of the prompt: the engines that match most, of these the
    shortest queue. Else the engine with the least cache. The threshold is infinite by default,
    which sends whole sessions to one queue; taken is 5, as in Ray's own example (docs.ray.io,
    prefix-aware-request-router). Its tree holds the prompts that were sent; here
    the store's match stands for it.
    """
    p, d = sides(sight)
    decode = better_of_two(sight, d, rng)
    if not len(p):
        return choice(None, decode)
    queue, match = sight.sent_requests[p], ask.store[p]
    if queue.max() - queue.min() > 5:
        return choice(better_of_two(sight, p, rng), decode)
    if match.max() * sight.hardware.block_tokens >= 0.1 * ask.prompt:
        return choice(least(p, queue, match == match.max(), rng), decode)
    return choice(least(p, sight.report.used[p] + sight.since_tokens[p], None, rng), decode)


def dynamo(sight: Sight, ask: Ask, rng: Random) -> Choice:
    """Dynamo 1.x's KV router: the least of ``prefill blocks - credit + decode blocks``.

    `credit` is 1.0 a block in the GPU and 0.75 a block in host memory; prefill blocks are those of
    active prompts and of this one (docs.nvidia.com/dynamo, Routing Concepts; `--router-kv-overlap-
    score-credit`, `--router-host-cache-hit-weight`). Apart, prefill workers are weighed by their
    prompts, decode workers by their active blocks.
    """
    p, d = sides(sight)
    decode = d[np.argmin(sight.sent_blocks[d])]
    return choice(_dynamo_prefill(sight, ask, p), decode)


def dynamo_conditional(sight: Sight, ask: Ask, rng: Random) -> Choice:
    """Dynamo with its conditional disaggregation, which is off by default: the decode worker
    computes the prompt if fewer than 2,048 tokens and less than 0.7 of it are not cached there
    (`lib/kv-router/src/conditional_disagg.rs`). The decode worker is the one of least cost with its
    overlap counted."""
    p, d = sides(sight)
    overlap = ask.match[d] + 0.75 * (ask.store[d] - ask.match[d])
    decode = d[np.argmin(sight.sent_blocks[d] - overlap)]
    left = ask.prompt - int(ask.store[decode]) * sight.hardware.block_tokens
    if left < 2048 and left < 0.7 * ask.prompt:
        return choice(None, decode)
    return choice(_dynamo_prefill(sight, ask, p), decode)


def _dynamo_prefill(sight: Sight, ask: Ask, p: Indices) -> int | None:
    if not len(p):
        return None
    credit = ask.match[p] + 0.75 * (ask.store[p] - ask.match[p])
    size = sight.hardware.block_tokens
    new = np.maximum(0.0, ask.prompt / size - credit)
    return int(p[np.argmin(sight.sent_tokens[p] / size + new)])


def llm_d(sight: Sight, ask: Ask, rng: Random) -> Choice:
    """llm-d's endpoint picker: the weighted sum of three scores from 0 to 1, once for each side.

    Queue 2 (the shortest reported queue has 1, the longest 0), KV cache 2 (the free share), prefix
    3 (the matched share); the highest wins, at random among equals (llm-d-router, `queue-scorer`,
    `kv-cache-utilization-scorer`, `prefix-cache-scorer`, `max-score-picker`). Prompts always go to
    a prefill engine (the decider's threshold is 0 by default).
    """
    p, d = sides(sight)
    prefill = _llm_d_pick(sight, ask, p, sight.hardware.prefill.kv_blocks, rng)
    return choice(prefill, _llm_d_pick(sight, ask, d, sight.hardware.decode.kv_blocks, rng))


def _llm_d_pick(sight: Sight, ask: Ask, side: Indices, kv_blocks: int, rng: Random) -> int | None:
    if not len(side):
        return None
    queue = sight.report.waiting[side] + sight.since_requests[side]
    span = int(queue.max() - queue.min())
    scores = 2.0 * ((queue.max() - queue) / span if span else np.ones(len(side)))
    scores += 2.0 * (1.0 - sight.report.used[side] / kv_blocks)
    scores += 3.0 * ask.store[side] / max(1, ask.blocks)
    return int(side[rng.choice(np.flatnonzero(scores >= scores.max() - 1e-9).tolist())])


def mooncake(sight: Sight, ask: Ask, rng: Random) -> Choice:
    """Mooncake's conductor: the prefill instance of the least predicted TTFT, queue plus prefill
    with the prefix that it has (Qin et al., Mooncake, FAST 2025, algorithm 1), and the decode
    instance with the most free KV.

    The queue is the predicted time of the prompts ahead; the true step times are given. The part of
    the rule that copies a hot prefix from another instance is left out: no engine here can.
    """
    p, d = sides(sight)
    decode = d[np.argmin(sight.sent_blocks[d])]
    if not len(p):
        return choice(None, decode)
    ahead_s = queue_s(sight)[p]
    return choice(p[np.argmin(ahead_s + compute_s(sight, ask)[p])], decode)


def sglang(sight: Sight, ask: Ask, rng: Random) -> Choice:
    """SGLang's gateway, `cache_aware`, with its prefill/decode mode's default for decode.

    Unbalanced if the queues differ by more than 32 and by more than 10 %: the shortest. Else the
    best match, if it is above 0.3 of the prompt (`--cache-threshold`); else the shortest queue.
    """
    p, d = sides(sight)
    decode = better_of_two(sight, d, rng)
    if not len(p):
        return choice(None, decode)
    queue, match = sight.sent_requests[p], ask.store[p]
    unbalanced = queue.max() - queue.min() > 32 and queue.max() > 1.1 * queue.min()
    if not unbalanced and match.max() * sight.hardware.block_tokens > 0.3 * ask.prompt:
        return choice(least(p, queue, match == match.max(), rng), decode)
    return choice(least(p, queue, None, rng), decode)


def aibrix(sight: Sight, ask: Ask, rng: Random) -> Choice:
    """AIBrix's `prefix-cache`: requests in flight that differ by more than 8: the fewest. Else the
    best match of an engine with at most the mean and one standard deviation of requests; without
    one the fewest (vllm-project/aibrix, `pkg/plugins/gateway/algorithms/prefix_cache.go`). Decode:
    the fewest requests."""
    p, d = sides(sight)
    decode = least(d, sight.sent_requests[d], None, rng)
    if not len(p):
        return choice(None, decode)
    queue, match = sight.sent_requests[p], ask.store[p]
    if queue.max() - queue.min() <= 8:
        may = (queue <= queue.mean() + queue.std()) & (match > 0)
        if may.any():
            may &= match == match[may].max()
            return choice(least(p, queue, may, rng), decode)
    return choice(least(p, queue, None, rng), decode)


def queue_s(sight: Sight) -> Floats:
    """Predicted seconds until each engine's prompts ahead are computed: those that it reported and
    those sent since, in full steps, less the time since the report; float64 [engines]."""
    tokens = sight.report.queue_tokens + sight.since_tokens
    pairs = sight.report.queue_pairs + sight.since_pairs
    age_s = max(0.0, sight.now_s - sight.report.at_s)
    found = np.empty(len(tokens))
    for side, curve, first, last in _halves(sight):
        size = side.step_tokens
        a = np.interp(curve.weight * size, curve.knots, curve.plain) / size
        found[first:last] = a * tokens[first:last] + curve.pair_s * pairs[first:last]
    return np.where(sight.since_tokens > 0, found, np.maximum(0.0, found - age_s))


def compute_s(sight: Sight, ask: Ask) -> Floats:
    """Predicted seconds for each engine to load and compute what it lacks, alone [engines]."""
    hardware, found = sight.hardware, np.empty(len(ask.store))
    size = hardware.block_tokens
    most = (ask.prompt - 1) // size
    held, there = np.minimum(ask.match, most), np.minimum(ask.store, most)
    for side, curve, first, last in _halves(sight):
        times = {
            n: prefill_s(curve, ask.prompt - n * size, ask.prompt, side.step_tokens)
            for n in np.unique(there[first:last]).tolist()
        }
        found[first:last] = [times[n] for n in there[first:last].tolist()]
    loads = (there - held) * hardware.block_bytes / hardware.store_bytes_s
    return np.maximum(found, np.where(there > held, loads + hardware.store_fixed_s, 0.0))


def _halves(sight: Sight) -> list[tuple]:  # type: ignore[type-arg]
    hardware, split, engines = sight.hardware, sight.prefills, len(sight.node)
    return [
        (hardware.prefill, sight.curves[0], 0, split),
        (hardware.decode, sight.curves[1], split, engines),
    ]

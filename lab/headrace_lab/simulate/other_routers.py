"""Placement rules of other routers, as published, each a function of a router's view
(`ClusterState`).

Each rule has the same view: exact prefixes of every engine and of its node's store, from events,
where the blocks of placed requests count as present (`known_blocks`), and exact counts of requests
in flight. Some of these routers know less. If a rule is published for one kind of replica only, it
chooses the prefill engine, and decode engines are chosen as in that project's own prefill/decode
mode.

Ties go to the lowest number unless the rule says otherwise.
"""

from __future__ import annotations

from random import Random

import numpy as np

from headrace_lab.simulate.cluster_state import ClusterState, EnginePair, Floats, PromptRequest
from headrace_lab.simulate.hardware import prefill_s
from headrace_lab.simulate.policies import (
    Indices,
    alive_engines,
    better_of_two,
    engine_pair,
    least_loaded,
)


def ray(cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
    """Place by Ray Serve 2.60's `PrefixCacheAffinityRouter` for prefill, its default for decode.

    If queues differ by more than `imbalanced_threshold`: power of two choices. If the best match is
    at least `match_rate_threshold` = 10 % of the prompt: the shortest queue among the engines with
    the best match. Else the engine with the least cache in use. The threshold is infinite by
    default, which sends whole sessions to one queue; here it is 5, as in Ray's own example
    (docs.ray.io, prefix-aware-request-router). Ray's tree holds the prompts that were sent; the
    store's match replaces it here.
    """
    p, d = alive_engines(cluster)
    decode = better_of_two(cluster, d, rng)
    if not len(p):
        return engine_pair(None, decode)
    queue, match = cluster.sent_requests[p], request.store[p]
    if queue.max() - queue.min() > 5:
        return engine_pair(better_of_two(cluster, p, rng), decode)
    if match.max() * cluster.hardware.block_tokens >= 0.1 * request.prompt:
        return engine_pair(least_loaded(p, queue, match == match.max(), rng), decode)
    used = cluster.report.used[p] + cluster.since_tokens[p] / cluster.hardware.block_tokens
    return engine_pair(least_loaded(p, used, None, rng), decode)


def dynamo(cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
    """Place by Dynamo 1.x's KV router: the least of ``prefill blocks - credit + decode blocks``.

    `credit` is 1.0 for a block in GPU memory and 0.75 for one in host memory; prefill blocks are
    those of active prompts and of this one (docs.nvidia.com/dynamo, Routing Concepts;
    `--router-kv-overlap-score-credit`, `--router-host-cache-hit-weight`). With disaggregation,
    prefill workers are weighed by their prompts, decode workers by their active blocks.
    """
    p, d = alive_engines(cluster)
    decode = d[np.argmin(cluster.sent_blocks[d])]
    return engine_pair(_dynamo_prefill(cluster, request, p), decode)


def dynamo_conditional(cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
    """Place by Dynamo with its conditional disaggregation, which is off by default.

    The decode worker computes the prompt if fewer than 2,048 tokens and less than 0.7 of it are not
    cached there (`lib/kv-router/src/conditional_disagg.rs`). The decode worker is the one with the
    least cost, its overlap included."""
    p, d = alive_engines(cluster)
    overlap = request.match[d] + 0.75 * (request.store[d] - request.match[d])
    decode = d[np.argmin(cluster.sent_blocks[d] - overlap)]
    left = request.prompt - int(request.store[decode]) * cluster.hardware.block_tokens
    if left < 2048 and left < 0.7 * request.prompt:
        return engine_pair(None, decode)
    return engine_pair(_dynamo_prefill(cluster, request, p), decode)


def _dynamo_prefill(cluster: ClusterState, request: PromptRequest, p: Indices) -> int | None:
    if not len(p):
        return None
    credit = request.match[p] + 0.75 * (request.store[p] - request.match[p])
    size = cluster.hardware.block_tokens
    new = np.maximum(0.0, request.prompt / size - credit)
    return int(p[np.argmin(cluster.sent_tokens[p] / size + new)])


def llm_d(cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
    """Place by llm-d's endpoint picker: a weighted sum of three scores from 0 to 1, for each role.

    Weights: queue 2 (the shortest reported queue has 1, the longest 0), KV cache 2 (the free
    share), prefix 3 (the matched share). The highest sum wins, at random among equals
    (llm-d-router, `queue-scorer`, `kv-cache-utilization-scorer`, `prefix-cache-scorer`,
    `max-score-picker`). Prompts always go to a prefill engine (the decider's threshold is 0 by
    default).
    """
    p, d = alive_engines(cluster)
    prefill = _llm_d_pick(cluster, request, p, cluster.hardware.prefill.kv_blocks, rng)
    return engine_pair(
        prefill, _llm_d_pick(cluster, request, d, cluster.hardware.decode.kv_blocks, rng)
    )


def _llm_d_pick(
    cluster: ClusterState, request: PromptRequest, side: Indices, kv_blocks: int, rng: Random
) -> int | None:
    if not len(side):
        return None
    queue = cluster.report.waiting[side] + cluster.since_requests[side]
    span = int(queue.max() - queue.min())
    scores = 2.0 * ((queue.max() - queue) / span if span else np.ones(len(side)))
    scores += 2.0 * (1.0 - cluster.report.used[side] / kv_blocks)
    scores += 3.0 * request.store[side] / max(1, request.blocks)
    return int(side[rng.choice(np.flatnonzero(scores >= scores.max() - 1e-9).tolist())])


def mooncake(cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
    """Place by Mooncake's conductor: the prefill instance with the least predicted TTFT, and the
    decode instance with the most free KV.

    The TTFT is the queue time plus the time to prefill the tokens after the instance's own prefix
    (Qin et al., Mooncake, FAST 2025, algorithm 1). The queue time is the predicted time of the
    prompts ahead; the true step times are given. The part of the rule that copies a hot prefix from
    another instance is left out: no engine here can do that.
    """
    p, d = alive_engines(cluster)
    decode = d[np.argmin(cluster.sent_blocks[d])]
    if not len(p):
        return engine_pair(None, decode)
    ahead_s = queue_s(cluster)[p]
    return engine_pair(p[np.argmin(ahead_s + compute_s(cluster, request)[p])], decode)


def sglang(cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
    """Place by SGLang's gateway, `cache_aware`, with its prefill/decode mode's default for decode.

    If the queues are unbalanced (they differ by more than 32 and by more than 10 %): the shortest.
    Else the best match, if it is above 0.3 of the prompt (`--cache-threshold`); else the shortest
    queue.
    """
    p, d = alive_engines(cluster)
    decode = better_of_two(cluster, d, rng)
    if not len(p):
        return engine_pair(None, decode)
    queue, match = cluster.sent_requests[p], request.store[p]
    unbalanced = queue.max() - queue.min() > 32 and queue.max() > 1.1 * queue.min()
    if not unbalanced and match.max() * cluster.hardware.block_tokens > 0.3 * request.prompt:
        return engine_pair(least_loaded(p, queue, match == match.max(), rng), decode)
    return engine_pair(least_loaded(p, queue, None, rng), decode)


def aibrix(cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
    """Place by AIBrix's `prefix-cache` (vllm-project/aibrix,
    `pkg/plugins/gateway/algorithms/prefix_cache.go`).

    If requests in flight differ by more than 8: the engine with the fewest. Else the best match
    among engines whose requests are at most the mean plus one standard deviation; if none matches,
    the engine with the fewest. Decode: the engine with the fewest requests."""
    p, d = alive_engines(cluster)
    decode = least_loaded(d, cluster.sent_requests[d], None, rng)
    if not len(p):
        return engine_pair(None, decode)
    queue, match = cluster.sent_requests[p], request.store[p]
    if queue.max() - queue.min() <= 8:
        may = (queue <= queue.mean() + queue.std()) & (match > 0)
        if may.any():
            may &= match == match[may].max()
            return engine_pair(least_loaded(p, queue, may, rng), decode)
    return engine_pair(least_loaded(p, queue, None, rng), decode)


def queue_s(cluster: ClusterState) -> Floats:
    """Return the predicted seconds until each engine has computed the prompts ahead, float64
    [engines].

    Prompts ahead are those that it reported and those sent since, in full steps. The time since the
    report is subtracted if none was sent since."""
    tokens = cluster.report.queue_tokens + cluster.since_tokens
    pairs = cluster.report.queue_pairs + cluster.since_pairs
    age_s = max(0.0, cluster.now_s - cluster.report.at_s)
    found = np.empty(len(tokens))
    for side, curve, first, last in _halves(cluster):
        size = side.step_tokens
        a = np.interp(curve.weight * size, curve.knots, curve.plain) / size
        found[first:last] = a * tokens[first:last] + curve.pair_s * pairs[first:last]
    return np.where(cluster.since_tokens > 0, found, np.maximum(0.0, found - age_s))


def compute_s(cluster: ClusterState, request: PromptRequest) -> Floats:
    """Return the predicted seconds for each engine to load and compute the missing part of the
    prompt without other load, [engines]."""
    hardware, found = cluster.hardware, np.empty(len(request.store))
    size = hardware.block_tokens
    most = (request.prompt - 1) // size
    held, there = np.minimum(request.match, most), np.minimum(request.store, most)
    for side, curve, first, last in _halves(cluster):
        times = {
            n: prefill_s(curve, request.prompt - n * size, request.prompt, side.step_tokens)
            for n in np.unique(there[first:last]).tolist()
        }
        found[first:last] = [times[n] for n in there[first:last].tolist()]
    loads = (there - held) * hardware.block_bytes / hardware.store_bytes_s
    return np.maximum(found, np.where(there > held, loads + hardware.store_fixed_s, 0.0))


def _halves(cluster: ClusterState) -> list[tuple]:  # type: ignore[type-arg]
    hardware, split, engines = cluster.hardware, cluster.prefills, len(cluster.node)
    return [
        (hardware.prefill, cluster.curves[0], 0, split),
        (hardware.decode, cluster.curves[1], split, engines),
    ]

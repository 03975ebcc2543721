"""Choice of an engine's next batch: vLLM's scheduler (V1), on arrays.

Each step computes a token for every running request. The rest of the token budget goes to the
prompt that is under way, then to the waiting prompts in order. A waiting request is admitted when
all its blocks fit. When the running requests need a block and none is free, the last of them is
preempted: it releases its blocks and computes its tokens again later, before the other waiting
requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace_lab.simulate import block_pool
from headrace_lab.simulate.hardware import prefill_s
from headrace_lab.simulate.prefill_admission import curve_at, may_share_step
from headrace_lab.simulate.request_kv import (
    blocks_of,
    fits,
    hold,
    match,
    match_further,
    pairs_between,
    release_blocks,
    take,
)
from headrace_lab.simulate.state import (
    CHUNKS,
    COMPUTING_D,
    COMPUTING_P,
    FAR,
    MOVING,
    QUEUED_D,
    State,
)

inner, room = block_pool.inner, block_pool.room


@inner
def push(s: State, at: float, r: int) -> None:
    """Push an event of a request; events of equal time keep the order of the pushes."""
    ev, n = s.ev, s.ev.count[0]
    order = ev.count[1]
    ev.count[0], ev.count[1] = n + 1, order + 1
    while n > 0:
        above = (n - 1) // 2
        if ev.heap[above].at_s <= at:
            break
        ev.heap[n] = ev.heap[above]
        n = above
    event = ev.heap[n]
    event.at_s, event.order, event.request, event.tries = at, order, r, s.req[r].tries


@inner
def enqueue(s: State, e: int, r: int, front: bool) -> None:
    """Add a request to an engine's queue, at its front or its end."""
    eng = s.eng
    if eng[e].waiting == 0:
        eng[e].head = eng[e].tail = r
        s.req[r].next = -1
    elif front:
        s.req[r].next = eng[e].head
        eng[e].head = r
    else:
        s.req[eng[e].tail].next = r
        s.req[r].next = -1
        eng[e].tail = r
    eng[e].waiting += 1
    s.req[r].due_s = -FAR if front else 0.0


@inner
def _leave_queue(s: State, e: int) -> None:
    eng, r = s.eng, s.eng[e].head
    eng[e].head = s.req[r].next
    eng[e].waiting -= 1
    if eng[e].waiting == 0:
        eng[e].head = eng[e].tail = -1


@inner
def expect(s: State, e: int, r: int, ready: int) -> None:
    """Update the engine's reported queue with the tokens that the request still has to compute."""
    tokens, need = s.req[r].need - ready, s.req[r].need
    s.eng[e].queue_tokens += tokens - s.req[r].expected
    s.eng[e].queue_pairs -= pairs_between(need - s.req[r].expected, need)
    s.eng[e].queue_pairs += pairs_between(ready, need)
    s.req[r].expected = tokens


@inner
def append_row(s: State, e: int, r: int) -> None:
    eng = s.eng
    s.rows[e, eng[e].running] = r
    eng[e].running += 1
    eng[e].context += s.req[r].prompt + s.req[r].emitted


@inner
def _growth(s: State, e: int, steps: int) -> int:
    """Return the additional blocks that the running requests need for `steps` steps."""
    req, eng, more = s.req, s.eng, 0
    for n in range(eng[e].running):
        r = s.rows[e, n]
        tokens = req[r].prompt + req[r].emitted + steps
        more += max(0, blocks_of(s, tokens) - req[r].held_d - req[r].plain_d)
    return more


@inner
def make_room(s: State, e: int, now: float) -> bool:
    """Preempt requests, the last first, until the others have the blocks for one step.

    The running requests take these blocks before any waiting request does.

    Returns:
        Whether a request was preempted.
    """
    eng, preempted = s.eng, False
    while eng[e].running > 0 and _growth(s, e, 1) > room(s.kv, e):
        preempted = True
        eng[e].running -= 1
        r = s.rows[e, eng[e].running]
        eng[e].context -= s.req[r].prompt + s.req[r].emitted
        release_blocks(s, r, e, s.req[r].held_d, s.req[r].plain_d)
        s.req[r].held_d = s.req[r].plain_d = 0
        s.req[r].p, s.req[r].phase = -1, QUEUED_D
        s.req[r].need = s.req[r].prompt + s.req[r].emitted
        s.req[r].ready = 0
        s.req[r].expected = 0
        s.req[r].preempted += 1
        eng[e].preemptions += 1
        eng[e].inside -= 1
        expect(s, e, r, match(s, r, e) * s.limits.block_tokens)
        enqueue(s, e, r, True)
    for n in range(eng[e].running):
        r = s.rows[e, n]
        more = blocks_of(s, s.req[r].prompt + s.req[r].emitted + 1)
        more -= s.req[r].held_d + s.req[r].plain_d
        if more > 0:
            take(s, e, more, now)
            s.req[r].plain_d += more
    return preempted


@inner
def steps_until_change(s: State, e: int) -> Any:
    """Return the number of steps until the first running request ends or the blocks run out."""
    req, eng = s.req, s.eng
    steps: Any = np.int64(1) << 40
    for n in range(eng[e].running):
        r = s.rows[e, n]
        steps = min(steps, np.int64(req[r].output - req[r].emitted))
    have = room(s.kv, e)
    if _growth(s, e, steps) <= have:
        return steps
    low: Any = np.int64(1)
    high = steps
    while high - low > 1:
        middle = (low + high) // 2
        if _growth(s, e, middle) <= have:
            low = middle
        else:
            high = middle
    return low


@inner
def continue_prompts(s: State, e: int) -> tuple[int, float]:
    """Give the prompts under way their part of the step; return its tokens and pairs."""
    eng, tokens, pairs = s.eng, 0, 0.0
    budget = eng[e].step_tokens + eng[e].spare_tokens - eng[e].running
    for n in range(eng[e].chunks):
        r = s.chunk_of[e, n]
        size = min(budget - tokens, s.req[r].need - s.req[r].ready, eng[e].step_tokens)
        s.chunk[e, n] = size
        pairs += pairs_between(s.req[r].ready, s.req[r].ready + size)
        tokens += size
    return tokens, pairs


@inner
def admit_waiting(s: State, e: int, now: float, tokens: int, pairs: float) -> tuple[int, float]:
    """Admit waiting requests, in order, while there is room and budget."""
    eng, req = s.eng, s.req
    budget = eng[e].step_tokens + eng[e].spare_tokens - eng[e].running
    while eng[e].waiting > 0 and eng[e].inside < eng[e].max_requests:
        r = eng[e].head
        if req[r].p >= 0 and req[r].p != e:
            if not _pull(s, e, r, now):
                break
            continue
        if tokens >= budget or eng[e].chunks >= CHUNKS:
            break
        if eng[e].has_prefill_admission and not may_share_step(s, e, r, budget - tokens):
            break
        if not _begin_prompt(s, e, r, now):
            break
        size = min(budget - tokens, req[r].need - req[r].ready, eng[e].step_tokens)
        s.chunk_of[e, eng[e].chunks], s.chunk[e, eng[e].chunks] = r, size
        eng[e].chunks += 1
        pairs += pairs_between(req[r].ready, req[r].ready + size)
        tokens += size
    return tokens, pairs


@inner
def _begin_prompt(s: State, e: int, r: int, now: float) -> bool:
    """Admit a prompt that this engine computes: take its blocks; False if they do not fit."""
    req, size = s.req, s.limits.block_tokens
    here = req[r].p < 0
    matched = match(s, r, e)
    fresh = blocks_of(s, req[r].need + here) - matched
    if not fits(s, r, e, matched, fresh):
        return False
    hold(s, r, e, matched)
    take(s, e, fresh, now)
    if here:
        req[r].held_d, req[r].plain_d, req[r].phase = matched, fresh, COMPUTING_D
    else:
        req[r].held_p, req[r].plain_p, req[r].phase = matched, fresh, COMPUTING_P
    loaded = _load(s, e, r, matched)
    req[r].ready = (matched + loaded) * size
    if req[r].emitted == 0:
        req[r].cached, req[r].loaded = matched * size, loaded * size
    expect(s, e, r, req[r].ready)
    req[r].begun_s = min(req[r].begun_s, now)
    _leave_queue(s, e)
    s.eng[e].inside += 1
    return True


@inner
def _load(s: State, e: int, r: int, matched: int) -> int:
    """Load blocks from the node's store if that is faster than computing them.

    The next step takes as long as the longer of its computation and its loads.

    Returns:
        The number of loaded blocks.
    """
    if s.limits.store == 0:
        return 0
    more = match_further(s, r, len(s.eng) + s.eng[e].node, matched) - matched
    if more <= 0:
        return 0
    size, need, curve = s.limits.block_tokens, s.req[r].need, curve_at(s, e)
    load_s = s.limits.store_fixed_s + more * s.limits.block_bytes / s.limits.store_bytes_s
    saved_s = prefill_s(curve, need - matched * size, need, s.eng[e].step_tokens)
    saved_s -= prefill_s(curve, need - (matched + more) * size, need, s.eng[e].step_tokens)
    if load_s >= saved_s:
        return 0
    s.eng[e].load_s += load_s
    return more


@inner
def _pull(s: State, e: int, r: int, now: float) -> bool:
    """Admit a prompt that another engine computed: take its blocks, and pull the missing ones.

    False if they do not fit.
    """
    req, limits = s.req, s.limits
    matched = match(s, r, e)
    fresh = blocks_of(s, req[r].need + 1) - matched
    if not fits(s, r, e, matched, fresh):
        return False
    hold(s, r, e, matched)
    take(s, e, fresh, now)
    req[r].held_d, req[r].plain_d, req[r].phase = matched, fresh, MOVING
    size = (blocks_of(s, req[r].need) - matched) * limits.block_bytes
    req[r].moved += (blocks_of(s, req[r].need) - matched) * limits.block_tokens
    source, target = s.eng[req[r].p].node, s.eng[e].node
    if source == target:
        there = now + size / limits.inside_bytes_s
    else:
        begin = max(now, s.links[source].out_s, s.links[target].in_s)
        there = begin + size / limits.link_bytes_s
        s.links[source].out_s = s.links[target].in_s = there
    push(s, there + limits.transfer_fixed_s, r)
    _leave_queue(s, e)
    s.eng[e].inside += 1
    return True

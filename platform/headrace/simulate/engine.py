"""Simulation of one engine: vLLM's scheduler (V1), on arrays.

Each step computes a token for every running request. The rest of the token budget goes to the
prompt that is under way, then to the waiting prompts in order. A waiting request is admitted when
all its blocks fit. When the running requests need a block and none is free, the last of them is
preempted: it releases its blocks and computes its tokens again later, before the other waiting
requests.

Consecutive steps of an unchanged batch are simulated together (`state`, *stretch*).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.simulate import blocks
from headrace.simulate.gate import curve_at, may_join
from headrace.simulate.hardware import prefill_s, step_s
from headrace.simulate.kv import (
    blocks_of,
    commit,
    fits,
    give_back,
    hold,
    match,
    match_further,
    pairs_between,
    take,
)
from headrace.simulate.state import (
    CHUNKS,
    COMPUTING_D,
    COMPUTING_P,
    DECODING,
    DONE,
    FAR,
    HANDOVER,
    ITL_BINS,
    ITL_GROWTH,
    ITL_LEAST_S,
    MOVING,
    QUEUED_D,
    State,
)

inner, room = blocks.inner, blocks.room
_LOG_GROWTH = float(np.log(ITL_GROWTH))


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
def stretch_s(first_s: float, more_s: float, steps: int) -> float:
    """Return the seconds of a stretch of `steps` steps."""
    return first_s * steps + more_s * (0.5 * steps * (steps - 1))


@inner
def nudge(s: State, e: int, now: float) -> None:
    """Let an engine plan again after a change: now if it is idle, else after its current step."""
    eng = s.eng
    if not eng[e].alive:
        return
    if eng[e].wake_s == FAR:
        plan(s, e, now)
        return
    elapsed, most = now - eng[e].begun_s, eng[e].steps
    if most <= 1 or elapsed >= eng[e].wake_s - eng[e].begun_s:
        return
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if stretch_s(eng[e].first_s, eng[e].more_s, middle) >= elapsed:
            high = middle
        else:
            low = middle + 1
    eng[e].steps = low
    eng[e].wake_s = eng[e].begun_s + stretch_s(eng[e].first_s, eng[e].more_s, low)


# ---- the next stretch -------------------------------------------------------------------------


@inner
def plan(s: State, e: int, now: float) -> None:
    """Choose the next batch and the end of its stretch.

    A prefill engine that begins or ends its work changes the speed of the decode engines of its
    node, during their current steps.
    """
    was_idle = s.eng[e].wake_s == FAR
    _plan(s, e, now)
    is_idle = s.eng[e].wake_s == FAR
    if s.limits.lost_share == 0.0 or e >= s.limits.prefills or was_idle == is_idle:
        return
    if _beside(s, s.eng[e].node, e):
        return
    slower = 1.0 / (1.0 - s.limits.lost_share)
    for d in range(s.limits.prefills, len(s.eng)):
        if s.eng[d].node == s.eng[e].node and s.eng[d].wake_s != FAR:
            left_s = (s.eng[d].wake_s - now) * (slower if was_idle else 1.0 / slower)
            s.eng[d].wake_s = now + left_s
            s.eng[d].first_s = s.eng[d].wake_s - s.eng[d].begun_s


@inner
def _beside(s: State, node: int, but: int) -> bool:
    """Return whether a prefill engine of a node computes, other than engine `but`."""
    for p in range(s.limits.prefills):
        if p != but and s.eng[p].node == node and s.eng[p].wake_s != FAR:
            return True
    return False


@inner
def _plan(s: State, e: int, now: float) -> None:
    eng = s.eng
    for n in range(eng[e].joins):
        _append_row(s, e, s.joining[e, n])
    eng[e].joins = 0
    preempted = _make_room(s, e, now)
    tokens, pairs = _continue_prompts(s, e)
    if not preempted or (tokens == 0 and eng[e].running == 0):
        tokens, pairs = _let_in(s, e, now, tokens, pairs)
    rows, context = eng[e].running, eng[e].context
    eng[e].begun_s = now
    if tokens == 0 and rows == 0:
        eng[e].steps, eng[e].wake_s = 0, FAR
        return
    curve = curve_at(s, e)
    eng[e].more_s = 0.0
    if tokens > 0:
        eng[e].steps = 1
        eng[e].first_s = max(step_s(curve, tokens, rows, context, pairs), eng[e].load_s)
        eng[e].load_s = 0.0
    else:
        # After a preemption, the next step may have room for the preempted request.
        eng[e].steps = 1 if preempted else _steps_until_change(s, e)
        eng[e].first_s = step_s(curve, 0, rows, context, 0.0)
        eng[e].more_s = curve.context_s * rows
    if s.limits.lost_share > 0.0 and e >= s.limits.prefills:
        eng[e].steps = 1  # single steps, since the speed may change at any time
        if _beside(s, eng[e].node, -1):
            eng[e].first_s /= 1.0 - s.limits.lost_share
    eng[e].wake_s = now + stretch_s(eng[e].first_s, eng[e].more_s, eng[e].steps)


@inner
def _append_row(s: State, e: int, r: int) -> None:
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
def _make_room(s: State, e: int, now: float) -> bool:
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
        give_back(s, r, e, s.req[r].held_d, s.req[r].plain_d)
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
def _steps_until_change(s: State, e: int) -> Any:
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
def _continue_prompts(s: State, e: int) -> tuple[int, float]:
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
def _let_in(s: State, e: int, now: float, tokens: int, pairs: float) -> tuple[int, float]:
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
        if eng[e].gated and not may_join(s, e, r, budget - tokens):
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


# ---- the end of a stretch ---------------------------------------------------------------------


@inner
def finish(s: State, e: int, now: float) -> None:
    """End a stretch: emit tokens, advance prompts, end requests, and plan the next stretch."""
    eng = s.eng
    steps = eng[e].steps
    eng[e].busy_s += now - eng[e].begun_s
    eng[e].step_count += steps
    _emit(s, e, steps, now)
    _advance_prompts(s, e, now)
    plan(s, e, now)


@inner
def _emit(s: State, e: int, steps: int, now: float) -> None:
    """Emit the tokens of all running requests, and end the finished ones.

    All requests take blocks for their tokens before any request releases its own, as vLLM allocates
    before a step and frees after it.
    """
    eng, req = s.eng, s.req
    rows, kept, seen = eng[e].running, 0, 0
    for n in range(rows):
        r = s.rows[e, n]
        seen += steps
        if req[r].first_s == FAR:
            req[r].first_s = eng[e].begun_s + eng[e].first_s
            seen -= 1
        req[r].emitted += steps
        more = blocks_of(s, req[r].prompt + req[r].emitted) - req[r].held_d - req[r].plain_d
        if more > 0:
            take(s, e, more, now)
            req[r].plain_d += more
    for n in range(rows):
        r = s.rows[e, n]
        if req[r].emitted >= req[r].output:
            eng[e].context -= req[r].prompt + req[r].emitted - steps
            end(s, r, now)
        else:
            eng[e].context += steps
            s.rows[e, kept] = r
            kept += 1
    eng[e].running = kept
    eng[e].answer_tokens += rows * steps
    if seen > 0:
        _count_gaps(s, (now - eng[e].begun_s) / steps, seen)


@inner
def _count_gaps(s: State, gap_s: float, tokens: int) -> None:
    place = int(np.log(max(gap_s, ITL_LEAST_S) / ITL_LEAST_S) / _LOG_GROWTH)
    s.itl[min(place, ITL_BINS - 1)] += tokens


@inner
def end(s: State, r: int, now: float) -> None:
    """End a request whose tokens are all emitted."""
    req, e = s.req, s.req[r].d
    give_back(s, r, e, req[r].held_d, req[r].plain_d)
    req[r].held_d = req[r].plain_d = 0
    req[r].phase, req[r].end_s = DONE, now
    s.eng[e].inside -= 1
    s.eng[e].sent_requests -= 1
    s.eng[e].sent_blocks -= blocks_of(s, req[r].prompt)
    s.ev.count[4] += 1


@inner
def _advance_prompts(s: State, e: int, now: float) -> None:
    """Count the prompt tokens that the step computed; pass complete prompts on to decode."""
    eng, req, kept = s.eng, s.req, 0
    for n in range(eng[e].chunks):
        r, size = s.chunk_of[e, n], s.chunk[e, n]
        req[r].ready += size
        req[r].computed += size
        eng[e].prompt_tokens += size
        expect(s, e, r, req[r].ready)
        if req[r].p == e:
            full = commit(s, r, e, req[r].held_p, req[r].ready, now)
            req[r].plain_p -= full - req[r].held_p
            req[r].held_p = full
        else:
            full = commit(s, r, e, req[r].held_d, req[r].ready, now)
            req[r].plain_d -= full - req[r].held_d
            req[r].held_d = full
        if req[r].ready < req[r].need:
            s.chunk_of[e, kept] = r
            kept += 1
        elif req[r].p == e:
            _hand_over(s, e, r, now)
        else:
            _first_token(s, e, r, now)
    eng[e].chunks = kept


@inner
def _hand_over(s: State, e: int, r: int, now: float) -> None:
    s.req[r].phase = HANDOVER
    s.eng[e].inside -= 1
    s.eng[e].sent_requests -= 1
    s.eng[e].sent_tokens -= s.req[r].guess
    s.req[r].guess = 0
    push(s, now + s.limits.handoff_s, r)


@inner
def _first_token(s: State, e: int, r: int, now: float) -> None:
    """Emit a request's first token, which the last step of its prompt has sampled."""
    req = s.req
    s.eng[e].sent_tokens -= req[r].guess
    req[r].guess = 0
    req[r].emitted += 1
    s.eng[e].answer_tokens += 1
    req[r].first_s = min(req[r].first_s, now)
    req[r].phase = DECODING
    if req[r].emitted >= req[r].output:
        end(s, r, now)
    else:
        _append_row(s, e, r)

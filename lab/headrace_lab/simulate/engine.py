"""Simulation of one engine: consecutive steps of its batches.

`scheduler` chooses each batch. Consecutive steps of an unchanged batch are simulated together
(`state`, *stretch*).
"""

from __future__ import annotations

import numpy as np

from headrace_lab.simulate import block_pool
from headrace_lab.simulate.hardware import step_s
from headrace_lab.simulate.prefill_admission import curve_at
from headrace_lab.simulate.request_kv import (
    blocks_of,
    commit,
    release_blocks,
    take,
)
from headrace_lab.simulate.scheduler import (
    admit_waiting,
    append_row,
    continue_prompts,
    expect,
    make_room,
    push,
    steps_until_change,
)
from headrace_lab.simulate.state import (
    DECODING,
    DONE,
    FAR,
    HANDOVER,
    ITL_BINS,
    ITL_GROWTH,
    ITL_LEAST_S,
    State,
)

inner, room = block_pool.inner, block_pool.room
_LOG_GROWTH = float(np.log(ITL_GROWTH))


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


@inner
def plan(s: State, e: int, now: float) -> None:
    eng = s.eng
    for n in range(eng[e].joins):
        append_row(s, e, s.joining[e, n])
    eng[e].joins = 0
    preempted = make_room(s, e, now)
    tokens, pairs = continue_prompts(s, e)
    if not preempted or (tokens == 0 and eng[e].running == 0):
        tokens, pairs = admit_waiting(s, e, now, tokens, pairs)
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
        eng[e].steps = 1 if preempted else steps_until_change(s, e)
        eng[e].first_s = step_s(curve, 0, rows, context, 0.0)
        eng[e].more_s = curve.context_s * rows
    eng[e].wake_s = now + stretch_s(eng[e].first_s, eng[e].more_s, eng[e].steps)


@inner
def finish(s: State, e: int, now: float) -> None:
    """End a stretch: emit tokens, advance prompts, end requests, and plan the next stretch."""
    eng = s.eng
    steps = eng[e].steps
    eng[e].busy_s += now - eng[e].begun_s
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
    release_blocks(s, r, e, req[r].held_d, req[r].plain_d)
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
        append_row(s, e, r)

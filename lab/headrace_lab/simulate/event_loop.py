"""Clock of the simulation: the next event of any engine or request, placements and failures."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace_kvstore.numba_jit import jit
from headrace_lab.simulate import block_pool
from headrace_lab.simulate.engine import finish, nudge
from headrace_lab.simulate.prefill_admission import wait_for_admission
from headrace_lab.simulate.request_kv import blocks_of, clear_cache, commit, match, release_blocks
from headrace_lab.simulate.scheduler import enqueue, expect
from headrace_lab.simulate.state import (
    COMPUTING_P,
    DECODING,
    DONE,
    FAR,
    HANDOVER,
    LOG_ROWS,
    LOST,
    MOVING,
    NEW,
    QUEUED_D,
    QUEUED_P,
    State,
)

inner = block_pool.inner
_LOG_LEFT = LOG_ROWS // 2
GONE = -2
"""Value of a request's decode engine after that engine has failed."""


@inner
def _before(s: State, one: int, other: int) -> bool:
    """Return whether one event of the heap is before another."""
    a, b = s.ev.heap[one], s.ev.heap[other]
    return a.at_s < b.at_s or (a.at_s == b.at_s and a.order < b.order)


@inner
def _pop(s: State) -> int:
    """Pop the first event; return its request, or -1 if the event is of an earlier try."""
    ev = s.ev
    r = ev.heap[0].request if ev.heap[0].tries == s.req[ev.heap[0].request].tries else -1
    ev.count[0] -= 1
    size, n = ev.count[0], 0
    while True:
        below = 2 * n + 1
        if below >= size:
            break
        if below + 1 < size and _before(s, below + 1, below):
            below += 1
        if not _before(s, below, size):
            break
        ev.heap[n] = ev.heap[below]
        n = below
    ev.heap[n] = ev.heap[size]
    return r


@jit()
def advance(s: State, until: float) -> bool:
    """Advance the time to `until`, including the events at that moment.

    Returns:
        True if it stopped earlier because the log of cache changes must be read first.
    """
    eng, ev = s.eng, s.ev
    while True:
        if ev.count[2] > _LOG_LEFT:
            return True
        first = np.argmin(eng["wake_s"])
        at = eng[first].wake_s
        if ev.count[0] > 0 and ev.heap[0].at_s <= at:
            at = ev.heap[0].at_s
            if at > until:
                break
            s.now_s[0] = at
            r = _pop(s)
            if r >= 0:
                _handle_event(s, r, at)
        else:
            if at > until:
                break
            s.now_s[0] = at
            finish(s, first, at)
    s.now_s[0] = max(s.now_s[0], until)
    return False


@inner
def _handle_event(s: State, r: int, now: float) -> None:
    """Handle a request's event: its hand-over to the decode engine, or the arrival of its KV."""
    req = s.req
    d = req[r].d
    if req[r].phase == HANDOVER:
        if d == GONE:
            p = req[r].p
            _leave_prefill(s, r, now)
            _lose(s, r)
            nudge(s, p, now)
        else:
            req[r].phase = QUEUED_D
            enqueue(s, d, r, s.eng[d].has_prefill_admission)
            nudge(s, d, now)
    elif req[r].phase == MOVING:
        req[r].ready = req[r].need
        full = commit(s, r, d, req[r].held_d, req[r].need, now)
        req[r].plain_d -= full - req[r].held_d
        req[r].held_d = full
        p = req[r].p
        _leave_prefill(s, r, now)
        req[r].phase = DECODING
        s.joining[d, s.eng[d].joins] = r
        s.eng[d].joins += 1
        nudge(s, p, now)
        nudge(s, d, now)


@inner
def _leave_prefill(s: State, r: int, now: float) -> None:
    """Release a request's KV on its prefill engine."""
    release_blocks(s, r, s.req[r].p, s.req[r].held_p, s.req[r].plain_p)
    s.req[r].held_p = s.req[r].plain_p = 0


@inner
def _lose(s: State, r: int) -> None:
    s.req[r].phase = LOST
    s.req[r].tries += 1
    s.ev.lost[s.ev.count[3]] = r
    s.ev.count[3] += 1


@jit()
def send(s: State, r: int, p: int, d: int, guess: int) -> None:
    """Place a request now: p computes its prompt (-1: d does), d decodes.

    The request is lost at once if an engine is dead.

    Args:
        guess: prompt tokens to compute, as the router assumes.
    """
    req, now = s.req, s.now_s[0]
    if not s.eng[d].alive or (p >= 0 and not s.eng[p].alive):
        _lose(s, r)
        return
    req[r].p, req[r].d, req[r].guess = p, d, guess
    req[r].need = req[r].prompt + req[r].emitted
    req[r].ready = req[r].expected = 0
    e = p if p >= 0 else d
    s.eng[e].sent_tokens += guess
    if p >= 0:
        s.eng[p].sent_requests += 1
    s.eng[d].sent_requests += 1
    s.eng[d].sent_blocks += blocks_of(s, req[r].prompt)
    req[r].phase = QUEUED_P if p >= 0 else QUEUED_D
    expect(s, e, r, match(s, r, e) * s.limits.block_tokens)
    if s.eng[e].has_prefill_admission:
        wait_for_admission(s, e, r, now)
    else:
        enqueue(s, e, r, False)
    nudge(s, e, now)


@jit()
def fail(s: State, e: int) -> None:
    """Stop an engine with its cache and its requests, and release their KV on other engines."""
    now, eng = s.now_s[0], s.eng
    req: Any = s.req
    eng[e].alive = 0
    for r in range(len(req.phase)):
        phase = req[r].phase
        if phase in (NEW, DONE, LOST):
            continue
        at_p = phase in (QUEUED_P, COMPUTING_P, HANDOVER)
        if req[r].d == e:
            if at_p:
                req[r].d = GONE
                continue
            apart = req[r].p >= 0 and phase in (QUEUED_D, MOVING)
            p = req[r].p
            if apart:
                _leave_prefill(s, r, now)
            req[r].held_d = req[r].plain_d = 0
            _lose(s, r)
            if apart:
                nudge(s, p, now)
        elif req[r].p == e and (at_p or phase in (QUEUED_D, MOVING)):
            d = req[r].d
            if d >= 0:
                eng[d].sent_requests -= 1
                eng[d].sent_blocks -= blocks_of(s, req[r].prompt)
            if phase == MOVING:
                release_blocks(s, r, d, req[r].held_d, req[r].plain_d)
                eng[d].inside -= 1
            elif phase == QUEUED_D:
                _unqueue(s, d, r)
            req[r].held_p = req[r].plain_p = req[r].held_d = req[r].plain_d = 0
            _lose(s, r)
            if phase in (MOVING, QUEUED_D):
                nudge(s, d, now)
    _empty(s, e)
    clear_cache(s, e, now)


@inner
def _unqueue(s: State, e: int, request: int) -> None:
    """Remove a request from any place in an engine's queue."""
    before, r = -1, s.eng[e].head
    while r != request:
        before, r = r, s.req[r].next
    after = s.req[request].next
    if before >= 0:
        s.req[before].next = after
    else:
        s.eng[e].head = after
    if after < 0:
        s.eng[e].tail = before
    s.eng[e].waiting -= 1


@inner
def _empty(s: State, e: int) -> None:
    eng = s.eng
    eng[e].head = eng[e].tail = -1
    eng[e].waiting = eng[e].inside = eng[e].running = eng[e].context = 0
    eng[e].chunks = eng[e].joins = eng[e].steps = 0
    eng[e].queue_tokens, eng[e].queue_pairs = 0, 0.0
    eng[e].sent_requests = eng[e].sent_tokens = eng[e].sent_blocks = 0
    eng[e].wake_s, eng[e].load_s = FAR, 0.0


@jit()
def recover(s: State, e: int) -> None:
    """Start a failed engine again, or a new one, with an empty cache."""
    s.eng[e].alive = s.eng[e].open = 1


@jit()
def stop(s: State, e: int) -> None:
    """Stop an engine without requests, and clear its cache."""
    s.eng[e].alive = s.eng[e].open = 0
    _empty(s, e)
    clear_cache(s, e, s.now_s[0])

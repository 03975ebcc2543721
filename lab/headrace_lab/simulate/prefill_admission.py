"""Prefill admission of a simulated engine: which prompt is next, and which may share a step.

The rules are those of `headrace_engine.prefill_admission`. The prompt with the smallest arrival
time plus a multiple of its own work is next. A prompt joins another's step if that costs the other
less than a step. Beside a prompt that takes several steps, only a prompt that fits into a sixteenth
of a step is admitted. In the simulator, it must also be the next one. Requests whose KV comes from
another engine pass.
"""

from __future__ import annotations

from headrace_engine.prefill_admission import MAX_STRETCH
from headrace_lab.simulate import block_pool
from headrace_lab.simulate.hardware import StepCurve, step_s
from headrace_lab.simulate.request_kv import match
from headrace_lab.simulate.state import State

inner = block_pool.inner


@inner
def curve_at(s: State, e: int) -> StepCurve:
    return s.prefill_curve if e < s.limits.prefills else s.decode_curve


@inner
def _left(s: State, e: int, r: int) -> int:
    return s.req[r].need - match(s, r, e) * s.limits.block_tokens


@inner
def wait_for_admission(s: State, e: int, r: int, now: float) -> None:
    """Insert a request into the queue, by arrival time plus a multiple of its own work."""
    req, eng, curve = s.req, s.eng, curve_at(s, e)
    work_s = step_s(curve, _left(s, e, r), 0, 0, 0.0) - step_s(curve, 0, 0, 0, 0.0)
    req[r].due_s = now + MAX_STRETCH * work_s
    before, after = -1, eng[e].head if eng[e].waiting > 0 else -1
    while after >= 0 and req[after].due_s <= req[r].due_s:
        before, after = after, req[after].next
    req[r].next = after
    if before >= 0:
        req[before].next = r
    else:
        eng[e].head = r
    if after < 0:
        eng[e].tail = r
    eng[e].waiting += 1


@inner
def may_share_step(s: State, e: int, r: int, room: int) -> bool:
    """Return whether a prompt may join the step that is being planned.

    Args:
        room: tokens that are left of the step's budget.
    """
    together = s.eng[e].chunks
    if together == 0:
        return True
    tokens = _left(s, e, r)
    for n in range(together):
        other = s.chunk_of[e, n]
        done = s.req[other].ready > s.req[other].cached + s.req[other].loaded
        if done or s.chunk[e, n] < s.req[other].need - s.req[other].ready:
            return tokens <= min(room, s.eng[e].spare_tokens)
    return tokens * together <= s.eng[e].free_tokens

"""The best case: each block of KV is computed once, for all engines and for ever."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.simulate.hardware import Hardware, StepCurve, prefill_s
from headrace.simulate.trace import Trace, Workload, multiply
from headrace_kvstore.compiled import jit

_COPIES = 8.0
"""Of the trace, from as many random places on, that tell what it computes on average."""


class BestCase(NamedTuple):
    """Of the requests that come in a part of a run: prompt tokens, those that an endless cache has,
    and engine seconds to compute the rest, each prompt alone."""

    prompt_tokens: int
    cached_tokens: int
    compute_s: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)


def best_case(work: Workload, hardware: Hardware, from_s: float) -> BestCase:
    """Of the requests from `from_s` on; blocks of those before are cached."""
    trace, side = work.trace, hardware.prefill
    return BestCase(
        *_best_case(
            *(work.arrival_s, work.row, work.offset, trace.prompt, trace.starts, trace.keys),
            *(
                np.zeros(work.keys, np.bool_),
                from_s,
                side.curve,
                side.step_tokens,
                hardware.block_tokens,
            ),
        )
    )


@jit()
def _best_case(
    arrival_s: NDArray[np.float64],
    row: NDArray[np.int32],
    offset: NDArray[np.int64],
    prompt: NDArray[np.int32],
    starts: NDArray[np.int64],
    keys: NDArray[np.int32],
    seen: NDArray[np.bool_],
    from_s: float,
    curve: StepCurve,
    step_tokens: int,
    block: int,
) -> tuple[int, int, float]:
    total: Any = 0
    cached: Any = 0
    compute_s = 0.0
    for n in range(len(row)):
        r, held = row[n], 0
        first, last = starts[r], starts[r + 1]
        while first + held < last and seen[keys[first + held] + offset[n]]:
            held += 1
        for at in range(first + held, last):
            seen[keys[at] + offset[n]] = True
        if arrival_s[n] >= from_s:
            tokens: Any = np.int64(prompt[r])
            there = min(held, (tokens - 1) // block) * block
            total += tokens
            cached += there
            compute_s += prefill_s(curve, tokens - there, tokens, step_tokens)
    return total, cached, compute_s


def capacity_rate(
    trace: Trace, hardware: Hardware, prefills: int, seconds: float, warm_share: float
) -> float:
    """How many times as often as in the trace requests can come at most, in runs of so many seconds
    of which the first part only fills caches: at this rate, and in the best case, the prefill
    engines compute all the time."""
    from_s = warm_share * seconds
    work = multiply(trace, _COPIES, seconds, 0)
    busy_s = best_case(work, hardware, from_s).compute_s
    return prefills * (seconds - from_s) * _COPIES / max(busy_s, 1e-9)

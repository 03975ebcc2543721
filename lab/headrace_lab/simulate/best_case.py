"""The best case: each block of KV is computed only once, for all engines and the whole run."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.numba_jit import jit
from headrace_lab.simulate.hardware import Hardware, StepCurve, prefill_s
from headrace_lab.simulate.trace import Trace, Workload, scale_trace

_COPIES = 8.0
"""Number of copies of the trace, each from a random position, that estimate its mean work."""


class BestCase(NamedTuple):
    """Figures of the requests that arrive in a part of a run.

    Attributes:
        prompt_tokens: tokens of their prompts.
        cached_tokens: prompt tokens that an unlimited cache has.
        compute_s: engine seconds to compute the other tokens, each prompt alone.
    """

    prompt_tokens: int
    cached_tokens: int
    compute_s: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)


def best_case(work: Workload, hardware: Hardware, from_s: float) -> BestCase:
    """Return the best case of the requests from `from_s` on; earlier requests fill the cache."""
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
    """Return the maximum request rate of the best case, as a multiple of the trace's rate.

    At this rate the prefill engines compute all the time.

    Args:
        seconds: length of the runs.
        warm_share: part at the beginning of a run that only fills caches.
    """
    from_s = warm_share * seconds
    work = scale_trace(trace, _COPIES, seconds, 0)
    busy_s = best_case(work, hardware, from_s).compute_s
    return prefills * (seconds - from_s) * _COPIES / max(busy_s, 1e-9)

"""Figures of a run: times to first token, gaps between tokens, goodput, hits, use of engines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_lab.simulate.state import DONE, ITL_GROWTH, ITL_LEAST_S, State


@dataclass(frozen=True, slots=True)
class GoodputTargets:
    """Targets that a request must keep to count for goodput.

    Its first token comes within `ttft_s` plus `ttft_token_s` for each token of its prompt, and its
    later tokens take at most `itl_s` each on average.
    """

    ttft_s: float = 2.0
    ttft_token_s: float = 0.0
    itl_s: float = 0.05

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.itl_s > 0 and self.ttft_token_s >= 0):
            raise ValueError("targets must be above 0")


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """Figures of the requests that arrived in the measured part of a run.

    Times are in seconds. `goodput` is the share of requests that kept the targets. `hit_rate` is
    the share of prompt tokens that came from a cache, and `reachable` the hit rate of one unlimited
    cache for all engines. `prefill_use` and `decode_use` are the shares of time in which the
    engines had work. Requests that did not end in time are included; without a first token, their
    TTFT lasts until the end of the run.
    """

    requests: int
    ended: int
    goodput: float
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_mean: float
    tpot_p90: float
    tpot_p99: float
    itl_p99: float
    hit_rate: float
    reachable: float
    local_share: float
    moved_tokens: int
    prefill_use: float
    decode_use: float
    preempted: int
    lost: int


def measure_outcome(
    s: State, targets: GoodputTargets, reachable: float, measured_from_s: float, until_s: float
) -> SimulationOutcome:
    """Return the figures of the requests that arrived from `measured_from_s` on."""
    req, eng = s.req, s.eng
    seen = np.flatnonzero(req["arrival_s"] >= measured_from_s)
    if len(seen) == 0:
        raise ValueError("no request arrived in the measured part of the run")
    ttft = first_token_seconds(s, measured_from_s, until_s)
    more = req["output"][seen] - 1
    ended = req["phase"][seen] == DONE
    tpot = (req["end_s"][seen] - req["first_s"][seen])[ended & (more > 0)] / more[
        ended & (more > 0)
    ]
    good = ended & (ttft <= targets.ttft_s + targets.ttft_token_s * req["prompt"][seen])
    good &= req["end_s"][seen] - req["first_s"][seen] <= targets.itl_s * np.maximum(more, 1)
    prompt = float(req["prompt"][seen].sum())
    p50, p90, p99 = np.percentile(ttft, [50, 90, 99]).tolist()
    slow = np.percentile(tpot, [90, 99]).tolist() if len(tpot) else [0.0, 0.0]
    split = s.limits.prefills
    use = eng["busy_s"] / max(until_s, 1e-9)
    return SimulationOutcome(
        requests=len(seen),
        ended=int(ended.sum()),
        goodput=float(good.mean()),
        ttft_mean=float(ttft.mean()),
        ttft_p50=p50,
        ttft_p90=p90,
        ttft_p99=p99,
        tpot_mean=float(tpot.mean()) if len(tpot) else 0.0,
        tpot_p90=slow[0],
        tpot_p99=slow[1],
        itl_p99=gap_percentile(s.itl, 0.99),
        hit_rate=float((req["cached"][seen] + req["loaded"][seen]).sum()) / prompt,
        reachable=reachable,
        local_share=float((req["p"][seen] < 0).mean()),
        moved_tokens=int(req["moved"][seen].sum()),
        prefill_use=float(use[:split].mean()) if split else 0.0,
        decode_use=float(use[split:].mean()),
        preempted=int(eng["preemptions"].sum()),
        lost=int(req["tries"].sum()),
    )


def first_token_seconds(s: State, measured_from_s: float, until_s: float) -> NDArray[np.float64]:
    """Return the times to first token of the requests that arrived from `measured_from_s` on."""
    seen = s.req["arrival_s"] >= measured_from_s
    return np.asarray(np.minimum(s.req["first_s"][seen], until_s) - s.req["arrival_s"][seen])


def gap_percentile(histogram: NDArray[np.int64], share: float) -> float:
    """Return a percentile of the gaps between tokens, accurate to 2 %."""
    total = int(histogram.sum())
    if total == 0:
        return 0.0
    place = int(np.searchsorted(np.cumsum(histogram), share * total))
    return float(ITL_LEAST_S * ITL_GROWTH ** (place + 0.5))

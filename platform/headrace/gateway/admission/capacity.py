"""The free capacity of the replicas now, computed from a view of them.

A request is sent when an engine would start its prompt within `LEAD_STEPS` steps. No engine then
runs dry, and no request waits in a queue whose order cannot be changed any more. In addition, a
decode engine must have KV blocks for the request, and must keep its streams' ITL target with one
more stream.

If there are prefill engines, the wait at a decode engine includes the time that its streams would
lose by the prompt, as in the price of a plan (`router.placement.pricing`).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.router.placement.cluster_view import ClusterView
from headrace_engine.step_time import KNOTS

LEAD_STEPS = 2.0
MIN_LEAD_S = 0.05
"""Minimum of `Capacity.lead_s`, since reports and the queue's polls take some time, too."""
_KNOTS = np.array(KNOTS)


@dataclass(slots=True)
class Capacity:
    """The requests that can be sent until the capacity is computed again.

    Attributes:
        waits_s: wait at each engine that may compute a prompt, in seconds; a heap.
        lead_s: a prompt is sent if the shortest wait is shorter than this.
        streams: number of streams that decode engines can still take.
        rows: streams of a decode engine, on average; at least 1.
        engines: number of engines that may compute a prompt.
        is_idle: whether no engine has a prompt to compute.
    """

    waits_s: list[float] = field(default_factory=list)
    lead_s: float = MIN_LEAD_S
    streams: int = 0
    rows: float = 1.0
    engines: int = 0
    is_idle: bool = False

    @property
    def has_room(self) -> bool:
        """Whether a request can be sent."""
        return self.streams > 0 and bool(self.waits_s) and self.waits_s[0] < self.lead_s

    @property
    def wait_s(self) -> float:
        """Seconds until an engine starts one more prompt."""
        return self.waits_s[0] if self.waits_s else 0.0

    def take(self, prefill_s: float) -> None:
        """Deduct a request that was sent, whose prompt takes `prefill_s` seconds."""
        heapq.heapreplace(self.waits_s, self.waits_s[0] + prefill_s)
        self.streams -= 1
        self.is_idle = False


def compute_capacity(
    view: ClusterView,
    now_s: float,
    *,
    prompt_tokens: float,
    itl_s: float = math.inf,
    sent: int = 0,
    prefill_safety_factor: float = 1.0,
) -> Capacity:
    """Compute the capacity from a view.

    Args:
        prompt_tokens: number of tokens to compute of a usual prompt.
        itl_s: the lowest ITL target of the streams; inf for none.
        sent: number of requests that were sent and that the view does not show yet.
        prefill_safety_factor: factor by which prompts take longer than the view says.
    """
    engines = view.engines
    prefill, decode = engines["prefill"], engines["decode"]
    if not decode.any():
        return Capacity()
    queue_s = np.maximum(0.0, engines["queue_s"] - np.maximum(0.0, now_s - engines["at_s"]))
    rows = engines["running"].astype(np.float64)
    attention_s = engines["context_s"] * engines["context"]
    idle_s = _size_s(view, rows) + attention_s
    step_s = _size_s(view, rows + engines["weight"] * prompt_tokens) + attention_s
    computes = decode.copy()
    waits_s = queue_s
    if prefill.any() and view.settings.policy != "local":
        computes = prefill.copy() if view.settings.policy == "remote" else prefill | decode
        waits_s = queue_s + np.where(prefill, 0.0, rows * np.maximum(0.0, step_s - idle_s))
    waits = np.sort(prefill_safety_factor * waits_s[computes])
    lead_s = max(MIN_LEAD_S, LEAD_STEPS * float(np.median(step_s[computes])))
    mean_rows = max(1.0, float(rows[decode].mean()))
    capacity = Capacity(
        waits.tolist(),
        lead_s,
        _streams(view, decode, idle_s, rows, prompt_tokens, itl_s),
        mean_rows,
        int(computes.sum()),
        is_idle=bool((queue_s[computes] <= 0.0).all()),
    )
    for _ in range(min(sent, 4 * len(capacity.waits_s))):
        capacity.take(prefill_safety_factor * float(np.median((step_s - idle_s)[computes])))
    return capacity


def busiest_step_s(view: ClusterView) -> tuple[float, float]:
    """Return the seconds of the longest step of a decode engine with streams, now and with one more
    stream; zeros if there is none."""
    engines = view.engines
    rows = engines["running"].astype(np.float64)
    busy = engines["decode"] & (rows > 0)
    if not busy.any():
        return 0.0, 0.0
    attention_s = engines["context_s"] * engines["context"]
    now_s = np.where(busy, _size_s(view, rows) + attention_s, 0.0)
    longest = int(now_s.argmax())
    more_s = _size_s(view, rows + 1.0) + attention_s
    return float(now_s[longest]), float(more_s[longest])


def _streams(
    view: ClusterView,
    decode: NDArray[np.bool_],
    idle_s: NDArray[np.float64],
    rows: NDArray[np.float64],
    prompt_tokens: float,
    itl_s: float,
) -> int:
    """Return the number of streams that decode engines can take, by KV blocks and ITL target."""
    engines = view.engines
    positions = max(1.0, math.ceil(prompt_tokens / view.block_tokens))
    windows = np.minimum(engines["windowed"] * positions, engines["window_blocks"])
    blocks = np.maximum(1.0, engines["kept"] * positions + windows)
    free = engines["free_blocks"]
    fitting = np.where(free < 0, 1e6, free // blocks)
    if itl_s < math.inf:
        mean = np.where(rows > 0, engines["context"] / np.maximum(rows, 1.0), prompt_tokens)
        each_s = _size_s(view, rows + 1.0) - _size_s(view, rows) + engines["context_s"] * mean
        fits = np.floor((itl_s - idle_s) / np.maximum(each_s, 1e-9))
        # An idle engine takes one stream whatever the target is: it will not get faster.
        fitting = np.minimum(fitting, np.maximum(fits, rows == 0))
    return int(np.maximum(fitting, 0.0)[decode].sum())


def _size_s(view: ClusterView, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of a step of each engine by its size alone, like
    `router.placement.pricing.sized_step_s`, but without padding."""
    at = np.clip(np.searchsorted(_KNOTS, sizes), 1, len(_KNOTS) - 1)
    low, high = _KNOTS[at - 1], _KNOTS[at]
    each = np.arange(len(sizes))
    left, right = view.curves[each, at - 1], view.curves[each, at]
    share = np.clip((sizes - low) / (high - low), 0.0, None)
    return left + (right - left) * share

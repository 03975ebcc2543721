"""What the replicas can take now, read off a view of them.

A request is sent when some engine would begin with its prompt within `LEAD_STEPS` steps, so that no
engine runs dry, and no request stands in a queue whose order cannot be changed any more. And some
decode engine must have KV blocks for it, and keep its streams' ITL target with one stream more.

Where there are prefill engines, a decode engine counts as busy for as long as its streams would
lose by the prompt, as in the price of a plan (`router.engines`).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.router.view import View
from headrace_engine.steptime import KNOTS

LEAD_STEPS = 2.0
LEAST_LEAD_S = 0.05
"""Reports and turns of the queue take some time, too."""
_KNOTS = np.array(KNOTS)


@dataclass(slots=True)
class Room:
    """What can be sent before the next look.

    Attributes:
        waits_s: of each engine that may compute a prompt, the least first: a heap.
        lead_s: a prompt is sent to one that waits less.
        streams: that decode engines can take.
        rows: streams of a decode engine, on average; at least 1.
        engines: that can be asked.
        idle: whether no prompt is ahead of another one anywhere.
    """

    waits_s: list[float] = field(default_factory=list)
    lead_s: float = LEAST_LEAD_S
    streams: int = 0
    rows: float = 1.0
    engines: int = 0
    idle: bool = False

    @property
    def open(self) -> bool:
        """Whether a request can be sent."""
        return self.streams > 0 and bool(self.waits_s) and self.waits_s[0] < self.lead_s

    @property
    def wait_s(self) -> float:
        """Until an engine begins with one more prompt."""
        return self.waits_s[0] if self.waits_s else 0.0

    def take(self, prefill_s: float) -> None:
        """A request was sent, whose prompt takes so long."""
        heapq.heapreplace(self.waits_s, self.waits_s[0] + prefill_s)
        self.streams -= 1
        self.idle = False


def room_of(
    view: View,
    now_s: float,
    *,
    prompt_tokens: float,
    itl_s: float = math.inf,
    sent: int = 0,
    stretch: float = 1.0,
) -> Room:
    """The room that a view shows.

    Args:
        prompt_tokens: that a usual prompt has to compute.
        itl_s: the least ITL target of the streams; inf for none.
        sent: requests that were sent and that the view does not show yet.
        stretch: how much longer prompts take than the view says (`admission`).
    """
    engines = view.engines
    prefill, decode = engines["prefill"], engines["decode"]
    if not decode.any():
        return Room()
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
    waits = np.sort(stretch * waits_s[computes])
    lead_s = max(LEAST_LEAD_S, LEAD_STEPS * float(np.median(step_s[computes])))
    mean_rows = max(1.0, float(rows[decode].mean()))
    room = Room(
        waits.tolist(),
        lead_s,
        _streams(view, decode, idle_s, rows, prompt_tokens, itl_s),
        mean_rows,
        int(computes.sum()),
        idle=bool((queue_s[computes] <= 0.0).all()),
    )
    for _ in range(min(sent, 4 * len(room.waits_s))):
        room.take(stretch * float(np.median((step_s - idle_s)[computes])))
    return room


def _streams(
    view: View,
    decode: NDArray[np.bool_],
    idle_s: NDArray[np.float64],
    rows: NDArray[np.float64],
    prompt_tokens: float,
    itl_s: float,
) -> int:
    """Streams that decode engines can take: as far as their KV goes, and their ITL target."""
    engines = view.engines
    blocks = max(1.0, math.ceil(prompt_tokens / view.block_tokens))
    free = engines["free_blocks"]
    most = np.where(free < 0, 1e6, free // blocks)
    if itl_s < math.inf:
        mean = np.where(rows > 0, engines["context"] / np.maximum(rows, 1.0), prompt_tokens)
        each_s = _size_s(view, rows + 1.0) - _size_s(view, rows) + engines["context_s"] * mean
        fits = np.floor((itl_s - idle_s) / np.maximum(each_s, 1e-9))
        # An idle engine takes one stream whatever the target is: it will not get faster.
        most = np.minimum(most, np.maximum(fits, rows == 0))
    return int(np.maximum(most, 0.0)[decode].sum())


def _size_s(view: View, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of a step of each engine by its size alone, as `router.engines.size_s`, but without
    padding."""
    at = np.clip(np.searchsorted(_KNOTS, sizes), 1, len(_KNOTS) - 1)
    low, high = _KNOTS[at - 1], _KNOTS[at]
    each = np.arange(len(sizes))
    left, right = view.curves[each, at - 1], view.curves[each, at]
    share = np.clip((sizes - low) / (high - low), 0.0, None)
    return left + (right - left) * share

"""Request of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.lookup.availability import AvailableRun

_NO_BLOCKS = np.zeros(0, np.int32)


class NoDecodeReplicaError(LookupError):
    """The view has no decode engine that may be asked."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The properties of one prompt that its placement depends on.

    Attributes:
        request_id: id of the plan.
        prompt_tokens: its length.
        now_s: time on the view's clock.
        held: leading blocks that each holder has, int32 [holders] (`BlockIndex.match`).
        available_runs: leading runs of tokens that each node's store can supply, [nodes], with the
            waits that the nodes predict; empty for none.
        affinity: hash of the prompt's first block: of several engines with the same price, requests
            with the same first block go to the same one.
        local_only: why the decode engine must prefill it, or None.
        itl_target_s, ttft_target_s: targets in place of the settings'.
        adapter_s: seconds that each engine needs to load the request's LoRA adapter, and seconds to
            load again the adapter that this load evicts, [2, engines]; None for a request without
            an adapter.
        may_explore: whether a more expensive engine may be chosen in order to measure it again.
    """

    request_id: str
    prompt_tokens: int
    now_s: float = 0.0
    held: NDArray[np.int32] = field(default_factory=lambda: _NO_BLOCKS)
    available_runs: Sequence[Sequence[AvailableRun]] = ()
    affinity: int = 0
    local_only: str | None = None
    itl_target_s: float | None = None
    ttft_target_s: float | None = None
    adapter_s: NDArray[np.float64] | None = None
    may_explore: bool = False

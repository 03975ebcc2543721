"""State of a request between its plan and its end, kept by a decode replica's router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.router.plan import Plan, Run
from headrace.router.sides import PrefillSide
from headrace_engine.steptime import pairs_of


@dataclass(slots=True)
class Active:
    """State of a request between its plan and its end."""

    plan: Plan
    hashes: list[bytes]
    seed: bytes
    tail: Sequence[int]
    uncached_decode_tokens: int
    #: The prefill replica that computes the prompt; a placeholder if the prefill is local.
    side: PrefillSide
    #: Part of the wait at the prefill engine that is due to this router's own requests.
    own_queue_s: float
    #: Sent while the prefill replica was cold: its overheads include a handshake.
    cold: bool
    #: The prefill call's measured seconds, once it returned.
    call_s: float | None = None
    decoding: bool = False


def computed_tokens(runs: Sequence[Run]) -> int:
    """Return the number of prompt tokens that an engine computes: at least one."""
    return max(1, sum(run.tokens for run in runs if run.source == "compute"))


def computed_pairs(plan: Plan, tokens: int) -> int:
    """Return the number of attention pairs of the last `tokens` tokens of the plan's prompt."""
    end = max(plan.prompt_tokens, tokens)
    return pairs_of(end - tokens, end)

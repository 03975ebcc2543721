"""A request between its plan and its end, as a decode replica's router keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.router.plan import Plan, Run
from headrace.router.sides import PrefillSide
from headrace_engine.steptime import pairs_of


@dataclass(slots=True)
class Active:
    """A request between its plan and its end."""

    plan: Plan
    hashes: list[bytes]
    seed: bytes
    tail: Sequence[int]
    uncached_decode_tokens: int
    #: The prefill replica that is asked, or that nobody is.
    side: PrefillSide
    #: Wait at the prefill engine that this router's own requests explain.
    own_queue_s: float
    #: Sent while the prefill side was cold: its overheads hold the handshake, not the rule.
    cold: bool
    #: The prefill call's measured seconds, once it returned.
    call_s: float | None = None
    decoding: bool = False


def computed_tokens(runs: Sequence[Run]) -> int:
    """Prompt tokens that an engine computes: at least one."""
    return max(1, sum(run.tokens for run in runs if run.source == "compute"))


def computed_pairs(plan: Plan, tokens: int) -> int:
    """What the last so many tokens of the plan's prompt attend to."""
    end = max(plan.prompt_tokens, tokens)
    return pairs_of(end - tokens, end)

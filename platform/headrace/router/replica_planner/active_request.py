"""State of a request between its plan and its end, kept by a decode replica's router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.router.plan import Plan, Run
from headrace.router.replica_planner.prefill_targets import PrefillTarget
from headrace.router.replica_planner.prefix_index import PrefixIndex
from headrace_engine.step_time import pairs_of


@dataclass(slots=True)
class ActiveRequest:
    """State of a request between its plan and its end."""

    plan: Plan
    hashes: list[bytes]
    seed: bytes
    tail: Sequence[int]
    uncached_decode_tokens: int
    #: The prefill replica that computes the prompt; a placeholder if the prefill is local.
    target: PrefillTarget
    #: Part of the wait at the prefill engine that is due to this router's own requests.
    own_queue_s: float
    #: Sent while the prefill replica was cold: its overheads include a handshake.
    cold: bool
    #: The prefill call's measured seconds, once it returned.
    call_s: float | None = None
    decoding: bool = False

    def remove_lost(
        self, index: PrefixIndex, cached_tokens: int, predicted_tokens: int, block_tokens: int
    ) -> None:
        """Remove blocks that an engine lost, if it found fewer cached tokens than predicted.

        The blocks after the predicted ones stay, since they have been computed.
        """
        if cached_tokens < predicted_tokens:
            lost = self.hashes[: predicted_tokens // block_tokens]
            index.truncate(lost, cached_tokens // block_tokens)
            index.insert(self.hashes)

    def remove_uncertain(self, index: PrefixIndex, cached_tokens: int, block_tokens: int) -> None:
        """Remove the blocks of a computation that may not have happened."""
        index.truncate(self.hashes, cached_tokens // block_tokens)

    def move_to(self, target: PrefillTarget, now_s: float, block_tokens: int) -> None:
        """Record that another prefill replica than the planned one computes the prompt.

        The request's success or failure then counts for this replica.
        """
        request_id = self.plan.request_id
        self.target.breaker.on_end(request_id)
        self.remove_uncertain(self.target.index, self.plan.cached_prefill_tokens, block_tokens)
        self.target, self.cold = target, self.cold or target.cold
        target.breaker.on_sent(request_id, now_s)
        target.index.insert(self.hashes)


def computed_tokens(runs: Sequence[Run]) -> int:
    """Return the number of prompt tokens that an engine computes: at least one."""
    return max(1, sum(run.tokens for run in runs if run.source == "compute"))


def computed_pairs(plan: Plan, tokens: int) -> int:
    """Return the number of attention pairs of the last `tokens` tokens of the plan's prompt."""
    end = max(plan.prompt_tokens, tokens)
    return pairs_of(end - tokens, end)

"""Prompt work ahead of a new request on a prefill engine, and the plans that arrived. Pure."""

from __future__ import annotations

from collections import OrderedDict

from headrace_engine.reporting.report import HEARD_S, MAX_HEARD
from headrace_engine.step_time import pairs_of


class PromptBacklog:
    """Prompts that have arrived and not ended, and the part of them that is still to be computed.

    The engine reports how many prompt tokens a step computed, but not of which prompts. Computed
    tokens are counted for the prompts that end next.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, int]] = {}
        self._tokens = self._pairs = 0
        self._done_tokens = self._done_pairs = 0.0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return max(0, round(self._tokens - self._done_tokens))

    @property
    def pairs(self) -> float:
        """Pairs of these tokens and the tokens that they attend to (`step_time.pairs_of`)."""
        return max(0.0, self._pairs - self._done_pairs)

    def arrived(self, request_id: str, prompt_tokens: int, compute_tokens: int) -> None:
        """Add a prompt whose last `compute_tokens` tokens are to be computed."""
        self.ended(request_id)
        tokens = min(max(1, compute_tokens), max(1, prompt_tokens))
        pairs = pairs_of(prompt_tokens - tokens, prompt_tokens)
        self._prompts[request_id] = tokens, pairs
        self._tokens += tokens
        self._pairs += pairs

    def computed(self, tokens: float, pairs: float) -> None:
        """Count the prompt tokens and pairs that a step of the engine computed."""
        if self._prompts:
            self._done_tokens = min(self._done_tokens + tokens, self._tokens)
            self._done_pairs = min(self._done_pairs + pairs, self._pairs)

    def ended(self, request_id: str) -> None:
        """Remove a prompt that was computed or cancelled. Unknown ids are ignored."""
        tokens, pairs = self._prompts.pop(request_id, (0, 0))
        self._tokens -= tokens
        self._pairs -= pairs
        self._done_tokens = max(0.0, self._done_tokens - tokens) if self._prompts else 0.0
        self._done_pairs = max(0.0, self._done_pairs - pairs) if self._prompts else 0.0


class ReceivedPlans:
    """Ids of the plans that arrived lately. They tell gateways which plans a replica's own numbers
    include."""

    def __init__(self) -> None:
        self._heard: OrderedDict[str, float] = OrderedDict()

    def add(self, plan_id: str, now_s: float) -> None:
        """Add a plan that arrived. If there are too many, the oldest one is removed."""
        self._heard.pop(plan_id, None)
        self._heard[plan_id] = now_s
        if len(self._heard) > MAX_HEARD:
            self._heard.popitem(last=False)

    def recent(self, now_s: float) -> tuple[str, ...]:
        """Return the plans of the last `HEARD_S` seconds, and remove older ones."""
        while self._heard and next(iter(self._heard.values())) < now_s - HEARD_S:
            self._heard.popitem(last=False)
        return tuple(self._heard)

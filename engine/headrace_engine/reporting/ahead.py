"""What lies ahead of a new prompt on an engine that only prefills, and which plans came. Pure."""

from __future__ import annotations

from collections import OrderedDict

from headrace_engine.reporting.report import HEARD_S, MOST_HEARD
from headrace_engine.steptime import pairs_of


class PromptsAhead:
    """Prompts between their arrival and their end, less what the engine has computed of them.

    The engine says how many prompt tokens a step computed, but not whose. Those that it computed
    are taken to belong to the prompts that end next.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, int]] = {}
        self._tokens = self._pairs = 0
        self._done_tokens = self._done_pairs = 0.0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def tokens(self) -> int:
        """That are still to be computed."""
        return max(0, round(self._tokens - self._done_tokens))

    @property
    def pairs(self) -> float:
        """What these attend to (`steptime.pairs_of`)."""
        return max(0.0, self._pairs - self._done_pairs)

    def arrived(self, request_id: str, prompt_tokens: int, compute_tokens: int) -> None:
        """A prompt came, of which so many tokens, the last ones, are to be computed."""
        self.ended(request_id)
        tokens = min(max(1, compute_tokens), max(1, prompt_tokens))
        pairs = pairs_of(prompt_tokens - tokens, prompt_tokens)
        self._prompts[request_id] = tokens, pairs
        self._tokens += tokens
        self._pairs += pairs

    def computed(self, tokens: float, pairs: float) -> None:
        """The engine made a step."""
        if self._prompts:
            self._done_tokens = min(self._done_tokens + tokens, self._tokens)
            self._done_pairs = min(self._done_pairs + pairs, self._pairs)

    def ended(self, request_id: str) -> None:
        """A prompt was computed, or is not wanted any more. Unknown ids are fine."""
        tokens, pairs = self._prompts.pop(request_id, (0, 0))
        self._tokens -= tokens
        self._pairs -= pairs
        self._done_tokens = max(0.0, self._done_tokens - tokens) if self._prompts else 0.0
        self._done_pairs = max(0.0, self._done_pairs - pairs) if self._prompts else 0.0


class HeardPlans:
    """Ids of the plans that were taken up lately: so gateways know that a replica's own numbers
    hold them."""

    def __init__(self) -> None:
        self._heard: OrderedDict[str, float] = OrderedDict()

    def add(self, plan_id: str, now_s: float) -> None:
        """A plan was taken up; the oldest one makes room for it."""
        self._heard.pop(plan_id, None)
        self._heard[plan_id] = now_s
        if len(self._heard) > MOST_HEARD:
            self._heard.popitem(last=False)

    def recent(self, now_s: float) -> tuple[str, ...]:
        """Those of the last `HEARD_S` seconds."""
        while self._heard and next(iter(self._heard.values())) < now_s - HEARD_S:
            self._heard.popitem(last=False)
        return tuple(self._heard)

"""What computing a block takes an engine, learnt from its steps: the price that a pull must beat.

    step seconds = fixed + tokens * seconds each        (see `remote.price.LineFit`)

A step is timed from its beginning to the next one's, while some request runs in both, so that the
engine had no pause between. The price of one more block is its tokens' part alone: the step itself
is paid in any case. Attention's growth with the prefix is left out, so late blocks of long prompts
are priced low, and pulled less than they might be. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headrace_kvstore.remote.price import LineFit

ENOUGH_TOKENS = 64
"""Steps with fewer are decodes, which tell nothing of prefill."""
ENOUGH_STEPS = 2


class Pace:
    """Of one engine."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._fit = LineFit(0.0, 0.0, 1.0)
        self._seen = 0
        self._began_s = 0.0
        self._tokens = 0
        self._requests: Collection[str] = ()

    @property
    def block_s(self) -> float:
        """Seconds to compute one block; 0 while that is not known."""
        return self._fit.each_s * self._block_tokens if self._seen >= ENOUGH_STEPS else 0.0

    def step(self, scheduled: Mapping[str, int], now_s: float) -> None:
        """A step begins. scheduled: tokens by request."""
        if self._tokens >= ENOUGH_TOKENS and not scheduled.keys().isdisjoint(self._requests):
            self._fit.observe(self._tokens, now_s - self._began_s)
            self._seen += 1
        self._began_s, self._tokens = now_s, sum(scheduled.values())
        self._requests = set(scheduled)

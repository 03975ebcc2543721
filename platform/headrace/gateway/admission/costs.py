"""What a request takes, in predicted seconds of engine time, before anybody has read its prompt.

    cost = prefill_s + answer_s / rows

- `prefill_s`: seconds to compute the prompt, of which a plan later tells how many they are. Before,
  they follow from the body's bytes and from what a byte of this tenant's took: tokens that were
  cached cost nothing, so a tenant whose prompts are alike is cheap.
- `answer_s`: seconds from the first token to the last. `rows` streams share an engine's steps, so
  each has that part of its time. This needs no count of tokens, and a long stream costs more than
  many short ones.

Both are means of each tenant's requests, with forgetting. A tenant that is not known yet has the
mean of all. Without prices (no replica has told its step times) every request costs 1.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.gateway.admission.fair import MOST_TENANTS

_GAIN = 0.1
"""Weight of a request in its tenant's means: a memory of about ten."""
_BYTE_S, _ANSWER_S = 1e-5, 2.0
"""Before the first request: 40 us a token of 4 bytes, and an answer of 2 s."""
LEAST_S = 1e-4


class Cost(NamedTuple):
    """Seconds of engine time. `answer_s` is the engine's part, not how long the answer takes."""

    prefill_s: float
    answer_s: float

    @property
    def total_s(self) -> float:
        return max(LEAST_S, self.prefill_s + self.answer_s)


UNPRICED = Cost(0.0, 1.0)


@dataclass(slots=True)
class _Means:
    byte_s: float = _BYTE_S
    answer_s: float = _ANSWER_S

    def seen_prompt(self, byte_s: float) -> None:
        self.byte_s += _GAIN * (byte_s - self.byte_s)

    def seen_answer(self, seconds: float) -> None:
        self.answer_s += _GAIN * (seconds - self.answer_s)


@dataclass(slots=True)
class Costs:
    """What tenants' requests took."""

    _all: _Means = field(default_factory=_Means)
    _tenants: OrderedDict[str, _Means] = field(default_factory=OrderedDict)

    def expect(self, tenant: str, body_bytes: int, rows: float) -> Cost:
        """What a request will take.

        Args:
            rows: streams that share an engine, at least 1.
        """
        means = self._tenants.get(tenant, self._all)
        return Cost(means.byte_s * body_bytes, means.answer_s / rows)

    def prefilled(self, tenant: str, body_bytes: int, seconds: float) -> None:
        """A plan tells how long a prompt's computation takes."""
        for means in (self._all, self._of(tenant)):
            means.seen_prompt(seconds / max(1, body_bytes))

    def answered(self, tenant: str, seconds: float) -> None:
        """An answer took so long, from its first token on."""
        for means in (self._all, self._of(tenant)):
            means.seen_answer(seconds)

    def _of(self, tenant: str) -> _Means:
        means = self._tenants.get(tenant)
        if means is None:
            means = self._tenants[tenant] = _Means(self._all.byte_s, self._all.answer_s)
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        return means

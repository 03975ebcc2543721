"""What a request takes, in predicted seconds of engine time, before anybody has read its prompt.

    cost = prefill_s + answer_s / rows

- `prefill_s`: seconds to compute the prompt, of which a plan later tells how many they are. Before,
  they follow from the body's bytes and from what a byte of this tenant's took in bodies of about
  this size: tokens that were cached cost nothing, so a tenant whose prompts are alike is cheap.
  Long prompts cost more a byte: they attend to more, and less of them is cached.
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
    """Seconds a byte of prompts, all and by the binary digits of their size, and of answers."""

    byte_s: float = _BYTE_S
    answer_s: float = _ANSWER_S
    sizes: dict[int, float] = field(default_factory=dict)

    def prompt_s(self, body_bytes: int) -> float:
        return self._byte_s(body_bytes.bit_length()) * body_bytes

    def seen_prompt(self, body_bytes: int, seconds: float) -> None:
        byte_s, size = seconds / max(1, body_bytes), body_bytes.bit_length()
        before = self._byte_s(size)
        self.sizes[size] = before + _GAIN * (byte_s - before)
        self.byte_s += _GAIN * (byte_s - self.byte_s)

    def _byte_s(self, size: int) -> float:
        """Of a size of which nothing was seen: as of the next smaller one that was."""
        found = self.sizes.get(size)
        if found is None:
            smaller = max((one for one in self.sizes if one < size), default=None)
            found = self.byte_s if smaller is None else self.sizes[smaller]
        return found

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
        return Cost(means.prompt_s(body_bytes), means.answer_s / rows)

    def prefilled(self, tenant: str, body_bytes: int, seconds: float) -> None:
        """A plan tells how long a prompt's computation takes."""
        for means in (self._all, self._of(tenant)):
            means.seen_prompt(body_bytes, seconds)

    def answered(self, tenant: str, seconds: float) -> None:
        """An answer took so long, from its first token on."""
        for means in (self._all, self._of(tenant)):
            means.seen_answer(seconds)

    def _of(self, tenant: str) -> _Means:
        means = self._tenants.get(tenant)
        if means is None:
            means = self._tenants[tenant] = _Means(
                self._all.byte_s, self._all.answer_s, dict(self._all.sizes)
            )
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        return means

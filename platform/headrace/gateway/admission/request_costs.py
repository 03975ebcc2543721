"""The cost of a request: predicted seconds of engine time, before its prompt is tokenised.

    cost = prefill_s + answer_s / rows

- `prefill_s`: seconds to compute the prompt. A plan later gives this time. Until then it is
  predicted from the size of the body and from this tenant's mean seconds per byte for bodies of
  about this size. Cached tokens cost nothing, so a tenant with similar prompts is cheap. Long
  prompts cost more per byte: they attend to more, and less of them is cached.
- `answer_s`: seconds from the first token to the last. `rows` streams share an engine's steps, so
  each is charged that part of the time. No token count is needed, and a long stream costs more than
  a short one.

Both are exponentially decaying means of each tenant's requests. A tenant without requests has the
mean of all tenants. Without prices (no replica has reported its step times) every request costs 1.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.gateway.admission.fair_queue import MAX_TENANTS

_GAIN = 0.1
"""Weight of a request in its tenant's means, which cover about the last ten requests."""
_BYTE_S, _ANSWER_S = 1e-5, 2.0
"""Means before the first request: 40 us a token of 4 bytes, and an answer of 2 s."""
MIN_S = 1e-4


class Cost(NamedTuple):
    """Seconds of engine time. `answer_s` is the request's part of it, not the answer's duration."""

    prefill_s: float
    answer_s: float

    @property
    def total_s(self) -> float:
        return max(MIN_S, self.prefill_s + self.answer_s)


UNPRICED = Cost(0.0, 1.0)


@dataclass(slots=True)
class _Means:
    """Means of requests.

    Attributes:
        byte_s: seconds per byte of prompts of all sizes.
        answer_s: seconds of an answer.
        sizes: seconds per byte of prompts, by bit length of the body's size in bytes.
    """

    byte_s: float = _BYTE_S
    answer_s: float = _ANSWER_S
    sizes: dict[int, float] = field(default_factory=dict)

    def prompt_s(self, body_bytes: int) -> float:
        return self._byte_s(body_bytes.bit_length()) * body_bytes

    def record_prompt(self, body_bytes: int, seconds: float) -> None:
        byte_s, size = seconds / max(1, body_bytes), body_bytes.bit_length()
        before = self._byte_s(size)
        self.sizes[size] = before + _GAIN * (byte_s - before)
        self.byte_s += _GAIN * (byte_s - self.byte_s)

    def _byte_s(self, size: int) -> float:
        """Return the seconds per byte for a size: its own mean, else the next smaller size's."""
        found = self.sizes.get(size)
        if found is None:
            smaller = max((one for one in self.sizes if one < size), default=None)
            found = self.byte_s if smaller is None else self.sizes[smaller]
        return found

    def record_answer(self, seconds: float) -> None:
        self.answer_s += _GAIN * (seconds - self.answer_s)


@dataclass(slots=True)
class RequestCosts:
    """Means of past requests, for all tenants together and for each."""

    _all: _Means = field(default_factory=_Means)
    _tenants: OrderedDict[str, _Means] = field(default_factory=OrderedDict)

    def predict(self, tenant: str, body_bytes: int, rows: float) -> Cost:
        """Predict the cost of a request.

        Args:
            rows: number of streams that share an engine, at least 1.
        """
        means = self._tenants.get(tenant, self._all)
        return Cost(means.prompt_s(body_bytes), means.answer_s / rows)

    def record_prefill(self, tenant: str, body_bytes: int, seconds: float) -> None:
        """Record the seconds that a prompt's computation takes, as a plan gives them."""
        for means in (self._all, self._means_of(tenant)):
            means.record_prompt(body_bytes, seconds)

    def record_answer(self, tenant: str, seconds: float) -> None:
        """Record the seconds of an answer, from its first token to its last."""
        for means in (self._all, self._means_of(tenant)):
            means.record_answer(seconds)

    def _means_of(self, tenant: str) -> _Means:
        means = self._tenants.get(tenant)
        if means is None:
            means = self._tenants[tenant] = _Means(
                self._all.byte_s, self._all.answer_s, dict(self._all.sizes)
            )
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        return means

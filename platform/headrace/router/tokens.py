"""Which decode replicas are clearly too dear for a request that can be drafted for.

A draft is worth most where a token more costs the step least. Each replica tells what its steps
take at every load and how deep it drafts there, all together how good drafts are of late. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_PRIOR_TESTED, _PRIOR_RIGHT = 4.0, 1.0
"""Drafted tokens that count as seen, so that a cluster without any yet expects something."""


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """What a replica publishes (`headrace_decode.speculation.publish.prices`).

    Attributes:
        step_s: seconds of a step without drafts at 1, 2, 4, ... running requests.
        draft_tokens: most that one request may draft in a step at each of these loads; 0 while
            none would be.
        tested_tokens, right_tokens: of late, drafted tokens that were put to the test, and those
            that were right.
        error: relative error of `step_s`, root mean square.
    """

    step_s: Sequence[float]
    draft_tokens: Sequence[int]
    tested_tokens: float = 0.0
    right_tokens: float = 0.0
    error: float = 0.0

    def seconds(self, rows: int) -> float:
        """Of a step without drafts at `rows` (from 1 up) requests: a line between the loads told,
        and on from the last two."""
        at = max(min(rows.bit_length() - 1, len(self.step_s) - 2), 0)
        if len(self.step_s) == 1:
            return self.step_s[0]
        low, high = self.step_s[at], self.step_s[at + 1]
        return low + (high - low) * (rows - (1 << at)) / (1 << at)

    def depth(self, rows: int) -> int:
        """Most tokens that one request drafts at `rows` requests."""
        return self.draft_tokens[min(rows.bit_length(), len(self.draft_tokens)) - 1]


class Tested(Protocol):
    """What a replica tells of its drafts, as in `TokenPrices`."""

    @property
    def tested_tokens(self) -> float: ...
    @property
    def right_tokens(self) -> float: ...


def acceptance(replicas: Sequence[Tested]) -> float:
    """Chance that a drafted token is accepted behind accepted ones, 0 to 1; all replicas' together,
    since it lies in what is asked for and not in who answers."""
    tested = sum(prices.tested_tokens for prices in replicas) + _PRIOR_TESTED
    return (sum(prices.right_tokens for prices in replicas) + _PRIOR_RIGHT) / tested


def token_seconds(prices: TokenPrices, rows: int, chance: float, tokens: int) -> float:
    """Predicted seconds for each token of one more request's answer.

    With ``n`` requests in the batch, this one included, ``T(n)`` the seconds of a step without
    drafts, ``a`` the chance of a drafted token and ``k`` the depth of drafts at that load:

        p = n (T(n+1) - T(n)) / T(n)        tokens that the batch forgoes for one drafted token
        e = 1 + sum over i = 1..k of max(0, a^i - p)        tokens a step, less what drafts cost
        seconds = T(n) / e

    Dear tokens make ``e`` 1, as if nothing were drafted. An answer of ``L`` tokens costs ``L``
    times the difference between two replicas more on the dearer one.

    Args:
        rows: ``n``. chance: ``a``.
        tokens: most that the answer may have; the last one is never drafted.
    """
    step_s = prices.seconds(rows)
    price = rows * (prices.seconds(rows + 1) - step_s) / step_s
    gained, survival = 0.0, 1.0
    for _ in range(min(prices.depth(rows), tokens - 1)):
        survival *= chance
        if survival <= price:
            break
        gained += survival - price
    return step_s / (1.0 + gained)


def affordable(
    prices: Mapping[str, TokenPrices | None], rows: Mapping[str, int], tokens: int
) -> set[str]:
    """The replicas whose tokens cannot be told from the cheapest ones.

    Dearer is who needs more than ``1 + sqrt(e1^2 + e2^2)`` times the cheapest one's seconds, with
    ``e`` the relative errors of both replicas' step times. Where a replica tells no prices, nobody
    drafts, or the answer is too short for a draft, all are as cheap.

    Args:
        prices: of each replica that may be chosen, at least one; None where they are unknown.
        rows: requests that each would run, this one included.
        tokens: most that the answer may have.
    """
    known = {name: told for name, told in prices.items() if told is not None}
    drafts = any(told.depth(rows[name]) for name, told in known.items())
    if len(known) < len(prices) or not drafts or tokens < 2:
        return set(prices)
    chance = acceptance(list(known.values()))
    costs_s = {
        name: token_seconds(told, rows[name], chance, tokens) for name, told in known.items()
    }
    cheapest = min(costs_s, key=lambda name: costs_s[name])
    return {
        name
        for name, cost_s in costs_s.items()
        if cost_s
        <= costs_s[cheapest] * (1.0 + math.hypot(known[name].error, known[cheapest].error))
    }

"""Choice of the decode replicas that are cheap enough for a request with speculative decoding.

A draft token is worth most where one more token costs a step least. Each replica reports its step
times and the depth of its drafts at each load. The recent acceptance of draft tokens is computed
over all replicas. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_PRIOR_TESTED, _PRIOR_RIGHT = 4.0, 1.0
"""Tested and accepted draft tokens of the prior, for a cluster without any drafts yet."""


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Prices of tokens that a replica publishes
    (`headrace_decode.speculative.speculation_report.prices`).

    Attributes:
        step_s: seconds of a step without drafts at 1, 2, 4, ... running requests.
        draft_tokens: maximum that one request may draft in a step at each of these loads; 0 while
            no token would be drafted.
        tested_tokens, right_tokens: recent draft tokens that were tested, and that were right.
        error: relative error of `step_s`, root mean square.
    """

    step_s: Sequence[float]
    draft_tokens: Sequence[int]
    tested_tokens: float = 0.0
    right_tokens: float = 0.0
    error: float = 0.0

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step without drafts at `rows` (from 1 up) requests.

        Linear interpolation between the reported loads, and extrapolation from the last two.
        """
        at = max(min(rows.bit_length() - 1, len(self.step_s) - 2), 0)
        if len(self.step_s) == 1:
            return self.step_s[0]
        low, high = self.step_s[at], self.step_s[at + 1]
        return low + (high - low) * (rows - (1 << at)) / (1 << at)

    def depth(self, rows: int) -> int:
        """Return the maximum of tokens that one request drafts at `rows` requests."""
        return self.draft_tokens[min(rows.bit_length(), len(self.draft_tokens)) - 1]


class Tested(Protocol):
    """A replica's counts of draft tokens, as in `TokenPrices`."""

    @property
    def tested_tokens(self) -> float: ...
    @property
    def right_tokens(self) -> float: ...


def acceptance(replicas: Sequence[Tested]) -> float:
    """Return the chance, 0 to 1, that a draft token is accepted after accepted ones.

    It is computed over all replicas, since it depends on the requests and not on the replica.
    """
    tested = sum(prices.tested_tokens for prices in replicas) + _PRIOR_TESTED
    return (sum(prices.right_tokens for prices in replicas) + _PRIOR_RIGHT) / tested


def token_seconds(prices: TokenPrices, rows: int, chance: float, tokens: int) -> float:
    """Return the predicted seconds for each token of one more request's answer.

    With ``n`` requests in the batch, this one included, ``T(n)`` the seconds of a step without
    drafts, ``a`` the chance of a draft token and ``k`` the depth of drafts at that load:

        p = n (T(n+1) - T(n)) / T(n)        tokens that the batch loses for one draft token
        e = 1 + sum over i = 1..k of max(0, a^i - p)        tokens a step, less the drafts' cost
        seconds = T(n) / e

    If draft tokens cost too much, ``e`` is 1, as without drafts. An answer of ``L`` tokens costs
    ``L`` times the difference between two replicas more on the more expensive one.

    Args:
        rows: ``n``.
        chance: ``a``.
        tokens: maximum length of the answer; its last token is never drafted.
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
    """Return the replicas whose tokens are not clearly more expensive than the cheapest one's.

    A replica is clearly more expensive if it needs more than ``1 + sqrt(e1^2 + e2^2)`` times the
    cheapest one's seconds, with ``e`` the relative errors of both replicas' step times. All
    replicas are returned if one reports no prices, if none drafts, or if the answer is too short
    for a draft.

    Args:
        prices: prices of each replica that may be chosen, at least one; None if they are unknown.
        rows: requests that each replica would run, this one included.
        tokens: maximum length of the answer.
    """
    known = {name: published for name, published in prices.items() if published is not None}
    drafts = any(published.depth(rows[name]) for name, published in known.items())
    if len(known) < len(prices) or not drafts or tokens < 2:
        return set(prices)
    chance = acceptance(list(known.values()))
    costs_s = {
        name: token_seconds(published, rows[name], chance, tokens)
        for name, published in known.items()
    }
    cheapest = min(costs_s, key=lambda name: costs_s[name])
    return {
        name
        for name, cost_s in costs_s.items()
        if cost_s
        <= costs_s[cheapest] * (1.0 + math.hypot(known[name].error, known[cheapest].error))
    }

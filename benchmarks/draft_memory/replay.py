"""Replay of answers as if a model gave them greedily, to count the steps that a drafter saves.

A request's first token comes from its prefill. From then on, each step asks for a draft and accepts
the part of it that agrees with the answer, and one more token, which the step computes anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.draft_memory.arms import Arm, Ours
from benchmarks.draft_memory.corpora import Exchange

MOST = 24
"""Tokens in a draft: vLLM's default for suffix decoding."""
EQUAL = 0.005
"""By what share drafted tokens may differ and still count as equally many."""


@dataclass(frozen=True)
class Outcome:
    """Sums over a replay."""

    queries: int
    drafted: int
    accepted: int

    @property
    def accepted_per_query(self) -> float:
        return self.accepted / max(self.queries, 1)


def replay(arm: Arm, exchanges: list[Exchange]) -> Outcome:
    """Replay all exchanges in order; the memory has the answers of the earlier ones."""
    queries = drafted = accepted = 0
    for exchange in exchanges:
        whole = np.concatenate([exchange.prompt, exchange.answer])
        arm.open(exchange.prompt)
        at = len(exchange.prompt)
        fresh = 1
        while True:
            arm.extend(whole[at : at + fresh])
            at += fresh
            left = len(whole) - at
            if left <= 0:
                break
            draft = arm.draft(whole[:at], min(MOST, left))
            right = draft == whole[at : at + len(draft)]
            good = len(draft) if right.all() else int(np.argmin(right))
            arm.verified(len(draft), good)
            queries += 1
            drafted += len(draft)
            accepted += good
            fresh = min(good + 1, left)
        arm.close()
    return Outcome(queries, drafted, accepted)


def at_equal_drafts(
    make: Callable[[float], Ours], exchanges: list[Exchange], drafted: int, rounds: int = 12
) -> tuple[Outcome, Ours, float]:
    """Replay with the floor at which `drafted` tokens are drafted, give or take `EQUAL`, found by
    bisection. Where a floor's smallest step makes more difference than that, the outcome is the mix
    of those on both sides of it that drafts as many.

    Returns:
        The outcome, the arm that drafts no more, and its floor.
    """
    low, high, under, over = 0.0, 1.0, None, None
    for _ in range(rounds):
        floor = (low + high) / 2
        arm = make(floor)
        outcome = replay(arm, exchanges)
        if abs(outcome.drafted - drafted) <= EQUAL * drafted:
            return outcome, arm, floor
        if outcome.drafted > drafted:
            low, over = floor, outcome
        else:
            high, under = floor, (outcome, arm, floor)
    assert under is not None, "a floor near 1 drafts next to nothing"
    return under if over is None else (_mixed(under[0], over, drafted), *under[1:])


def _mixed(under: Outcome, over: Outcome, drafted: int) -> Outcome:
    share = (drafted - under.drafted) / (over.drafted - under.drafted)

    def mix(few: int, many: int) -> int:
        return round(few + share * (many - few))

    return Outcome(mix(under.queries, over.queries), drafted, mix(under.accepted, over.accepted))

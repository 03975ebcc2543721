"""The error of reuse by its budget, for one model, and the budget that meets a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from headrace_lab.blending.correct import Case, corrected
from headrace_lab.models.exact import Exact, Score, score
from headrace_lab.models.lm import LM
from headrace_lab.texts.prompts import Prompt

BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
ANSWER_TOKENS = 48


@dataclass
class Curve:
    """Scores by budget.

    Attributes:
        scores: by budget, the scores of the prompts whose probe the budget covers.
    """

    scores: dict[float, list[Score]] = field(default_factory=dict)

    def add(self, points: Iterable[tuple[float, Score]]) -> None:
        """Add a prompt's scores."""
        for budget, one in points:
            self.scores.setdefault(budget, []).append(one)

    def kl(self, budget: float) -> float:
        """Return the mean over prompts of KL(exact || reused), nats a token."""
        return float(np.mean([one.kl for one in self.scores[budget]]))

    def budget_for(self, target_kl: float) -> float | None:
        """Return the smallest budget that meets a target; None if the largest one does not.

        Between measured budgets, it is interpolated in the log scale of both."""
        budgets = sorted(self.scores)
        kls = [max(self.kl(budget), 1e-12) for budget in budgets]
        for n, (budget, kl) in enumerate(zip(budgets, kls, strict=True)):
            if kl > target_kl:
                continue
            if n == 0:
                return budget
            logs = np.log([kl, kls[n - 1]]), np.log([budget, budgets[n - 1]])
            return float(np.exp(np.interp(np.log(target_kl), *logs)))
        return None


def points(lm: LM, prompt: Prompt) -> Iterator[tuple[float, Score]]:
    """Score one prompt at all budgets that cover its probe."""
    case = Case.of(lm, prompt, Exact.of(lm, prompt.tokens, ANSWER_TOKENS))
    for budget in BUDGETS:
        done = corrected(lm, case, budget)
        if done is not None:
            yield budget, score(lm, case.exact, done.kv)

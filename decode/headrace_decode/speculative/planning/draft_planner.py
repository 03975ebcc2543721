"""The planner, which decides before each engine step how many draft tokens of each row to verify.

It combines three parts: the seconds of a step (`headrace_engine.step_time`), the budget that
maximises tokens per second (`draft_budget`), and the decision whether speculation pays at this load
(`draft_guard`). It does not depend on an engine: a proposer, a simulator or a test passes the
contents of the batch, and afterwards the result of the step.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.planning.draft_budget import best_draft_budget
from headrace_decode.speculative.planning.draft_guard import ControlDraw, DraftGuard
from headrace_engine.step_time import StepTime, pairs_of

EXPLORE_EVERY = 16
"""Interval of trials. While no draft could pay, one step in so many looks up drafts and compares
them with the next tokens, to notice when drafts get better. While the guard is off, one step in so
many verifies drafts."""
_SURVIVAL_DECAY = 0.98
MAX_DRAFT_TOKENS = 4096
"""Maximum number of draft tokens in one step, which bounds the arithmetic."""


@dataclass(frozen=True)
class DraftMode:
    """The way in which the number of draft tokens is decided.

    `auto` is for production; the others are for measurements and as a kill switch.

    Attributes:
        kind: "auto", "off" (no look-up, no drafts) or "static" (as many as there are).
        tokens: maximum number of tokens a row with "static".
    """

    kind: str = "auto"
    tokens: int = 0

    @staticmethod
    def parse(text: str) -> DraftMode:
        """Parse "auto", "off" or "static:K".

        Raises:
            ValueError: the text is none of these.
        """
        kind, _, tokens = text.partition(":")
        if text in ("auto", "off"):
            return DraftMode(kind)
        if kind == "static" and tokens.isdecimal() and int(tokens) > 0:
            return DraftMode(kind, int(tokens))
        raise ValueError(f"mode {text!r}: expected auto, off or static:K with K from 1 up")


@dataclass(frozen=True)
class StepLoad:
    """The work of the next step apart from drafts.

    Attributes:
        rows: number of sequences that decode; each emits one certain token.
        context_tokens: total length of all these sequences.
        prefill_tokens: number of prompt tokens still to be computed, of prompts begun or not.
    """

    rows: int
    context_tokens: int = 0
    prefill_tokens: int = 0


@dataclass(frozen=True)
class StepLimits:
    """The limits of a step.

    Attributes:
        step_tokens: the engine's token budget; prompts take precedence over drafts.
        itl_s: tightest inter-token latency target in the batch. Drafts do not make a step longer
            than that; a step that is longer without drafts gets none.
        draft_tokens: cap for the step from outside (cluster, operator); None for no cap.
    """

    step_tokens: int = 8192
    itl_s: float = math.inf
    draft_tokens: int | None = None


@dataclass(frozen=True)
class StepRecord:
    """A step that was run.

    Attributes:
        tokens: number of tokens that it computed, with prompts and drafts.
        drafted: number of draft tokens among them.
        rows: number of rows that decoded.
        emitted: number of tokens that these rows emitted.
        context_tokens: total length of all rows.
        seconds: seconds from its start to the next step's start.
        control_draw: the random choice made for the step, if it should verify drafts.
    """

    tokens: int
    drafted: int
    rows: int
    emitted: int
    context_tokens: int
    seconds: float
    control_draw: ControlDraw | None = None

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Arguments of `StepTime` for the step. A prompt is assumed to have begun in the step."""
        prompt = max(self.tokens - self.drafted - self.rows, 0)
        return prompt, self.rows, self.drafted, self.context_tokens, pairs_of(0, prompt)


class DraftPlanner:
    """The draft budgets of one engine, for use by one thread; deterministic for a seed."""

    def __init__(
        self,
        *,
        padded_sizes: Sequence[int] = (),
        seed: int = 0,
        controls: bool = True,
        times: StepTime | None = None,
    ) -> None:
        """Args:
        padded_sizes: batch sizes to which the engine pads.
        seed: seed of the random choices.
        controls: whether to run random steps without drafts and apply the guard.
        times: the engine's step times; new ones if None.
        """
        self.mode = DraftMode()
        self.times = times or StepTime(padded_sizes)
        self.counts: Counter[str] = Counter()
        self.price = 0.0
        """Survival that one more token had to offer in the last budget."""
        self.control_draw: ControlDraw | None = None
        """Random choice made for the next step, if it should verify drafts."""
        self.last_step = StepRecord(
            tokens=0, drafted=0, rows=0, emitted=0, context_tokens=0, seconds=0.0
        )
        """The last step that was observed."""
        self._controls = controls
        self._random = random.Random(seed)
        self._guards: dict[int, DraftGuard] = {}
        self._best_survival = 1.0
        self._steps_since_exploration = 0

    def guard(self, rows: int) -> DraftGuard:
        """Return the guard of this load; there is one for each power of two of rows."""
        return self._guards.setdefault(max(rows, 1).bit_length(), DraftGuard())

    def plan_lookup(self, load: StepLoad, limits: StepLimits, tokens_max: int) -> str:
        """Return the purpose of a look-up of drafts before the next step.

        Args:
            tokens_max: maximum number of draft tokens of all rows together.

        Returns:
            "verify", "compare" (look drafts up without verifying them) or "nothing" (no look-up).
        """
        self.control_draw = None
        if self.mode.kind == "off" or load.rows == 0 or tokens_max <= 0:
            return "nothing"
        if self.mode.kind == "static":
            return "verify"
        max_tokens = self._max_tokens(load, limits, tokens_max)
        on, pays = self.guard(load.rows).is_on or not self._controls, False
        if max_tokens:
            seconds = self._seconds(load, max_tokens)
            # An upper bound: one draft of that length whose tokens all have the best survival.
            bound = np.full((1, max_tokens), self._best_survival, np.float32)
            length = np.array([max_tokens], np.int32)
            pays = bool(best_draft_budget(bound, length, seconds, load.rows).take[0])
            self.counts["cannot_pay"] += not pays
        if on and pays:
            return "verify"
        self._steps_since_exploration += 1
        if self._steps_since_exploration < EXPLORE_EVERY:
            return "nothing"
        self._steps_since_exploration = 0
        return "verify" if pays else "compare"

    def choose(
        self,
        load: StepLoad,
        limits: StepLimits,
        survival: NDArray[np.float32],
        lengths: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """Return the number of draft tokens to verify of each row.

        Args:
            survival: float32 [n, K], probability that a row's first i + 1 tokens are all accepted.
            lengths: int32 [n], number of draft tokens in each row.

        Returns:
            int32 [n].
        """
        self.record_survival(survival, lengths)
        if self.mode.kind == "static":
            return self._static(load, limits, lengths)
        max_tokens = self._max_tokens(load, limits, int(lengths.sum()))
        seconds = self._seconds(load, max_tokens)
        budget = best_draft_budget(survival, lengths, seconds, load.rows)
        self.price = budget.price
        if self._controls and budget.take.any():
            share = self.guard(load.rows).control_probability
            self.control_draw = ControlDraw(self._random.random() < share, share)
            if self.control_draw.is_control:
                self.counts["control_steps"] += 1
                return np.zeros_like(budget.take)
        return budget.take

    def record_survival(self, survival: NDArray[np.float32], lengths: NDArray[np.int32]) -> None:
        """Record the best survival of present drafts, verified or not."""
        if len(lengths) and survival.shape[1]:
            first = float(np.where(lengths > 0, survival[:, 0], 0.0).max())
            self._best_survival = max(first, _SURVIVAL_DECAY * self._best_survival)

    def observe(self, step: StepRecord) -> None:
        """Learn from a step that was run."""
        drafted, shape = step.drafted > 0, step.shape
        prompt, rows, _, context, pairs = shape
        undrafted_s = self.times.seconds(prompt, rows, 0, context, pairs)
        if not self.times.observe(*shape, step.seconds):
            return
        self.counts["steps"] += 1
        self.counts["drafted_steps"] += drafted
        self.counts["drafted_tokens"] += step.drafted
        self.counts["accepted_tokens"] += max(step.emitted - step.rows, 0)
        self.counts["row_steps"] += step.rows
        self.counts["emitted_tokens"] += step.emitted
        self.last_step = step
        control_draw = step.control_draw
        # Only steps without prompts are comparable with and without drafts.
        pure = step.rows > 0 and step.tokens - step.drafted == step.rows
        if control_draw is not None and pure and drafted is not control_draw.is_control:
            each = step.emitted / step.rows
            self.guard(step.rows).observe(control_draw, each, step.seconds, undrafted_s)

    @property
    def saved_s(self) -> float:
        """Seconds that speculation saved recently, at all loads together."""
        return sum(guard.saved_s for guard in self._guards.values())

    @property
    def regret_bound_s(self) -> float:
        """Maximum seconds that speculation lost recently, with confidence, over all loads."""
        return sum(guard.lost_s for guard in self._guards.values())

    def snapshot(self) -> dict[str, object]:
        """Return a JSON-able view for metrics and status pages."""
        return {
            "mode": self.mode.kind,
            "price": self.price,
            "best_survival": self._best_survival,
            "step_time": self.times.summary(),
            "counts": dict(self.counts),
            "loads": {
                f"{2 ** (bits - 1)}..{2**bits - 1}": {
                    "on": guard.is_on,
                    "saved": guard.saved,
                    "bounds": [bound if math.isfinite(bound) else None for bound in guard.bounds],
                    "switched_off": guard.switched_off,
                }
                for bits, guard in sorted(self._guards.items())
            },
        }

    def _max_tokens(self, load: StepLoad, limits: StepLimits, tokens: int) -> int:
        """Return how many of `tokens` draft tokens the limits permit."""
        free = limits.step_tokens - load.rows - load.prefill_tokens
        max_tokens = min(tokens, free, MAX_DRAFT_TOKENS)
        if limits.draft_tokens is not None:
            max_tokens = min(max_tokens, limits.draft_tokens)
        if max_tokens <= 0:
            return 0
        if math.isfinite(limits.itl_s):
            seconds = self._seconds(load, max_tokens)
            max_tokens = int(np.searchsorted(seconds, limits.itl_s, "right")) - 1
        return max(max_tokens, 0)

    def _seconds(self, load: StepLoad, max_tokens: int) -> NDArray[np.float64]:
        """Return the predicted seconds of a step with 0 to `max_tokens` drafts, not decreasing."""
        prompt = load.prefill_tokens
        return self.times.seconds_each(
            np.arange(max_tokens + 1), prompt, load.rows, load.context_tokens, pairs_of(0, prompt)
        )

    def _static(
        self, load: StepLoad, limits: StepLimits, lengths: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        take = np.minimum(lengths, self.mode.tokens)
        max_tokens = self._max_tokens(load, replace(limits, itl_s=math.inf), int(take.sum()))
        return np.clip(max_tokens - (np.cumsum(take) - take), 0, take).astype(np.int32)

"""The planner: before each engine step, how many draft tokens of each row to verify, if any.

Puts together what other files know: prices of a step (`headrace_engine.steptime`), the budget that
earns most (`budget`), and whether drafting has paid at this load (`regret`). Knows no engine: a
proposer, a simulator or a test tells it what is in the batch, and afterwards what the step brought.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculation.budget import best_budget, can_pay
from headrace_decode.speculation.regret import Ledger
from headrace_engine.steptime import StepTime, pairs_of

CONTROL_SHARE = 1 / 64
"""Of the steps, those without drafts at random, once their cost is known: what they lose bounds the
price of knowing that drafting pays. They lose what drafting saves, so the more that is (seconds per
second, above a half), the rarer they are."""
LOOK_EVERY = 16
"""Where no draft could pay, or drafting is off, drafts are looked at (and compared with what comes,
not verified) this often, so that a change for the better is seen."""
LEAST_GAIN = 0.01
"""Drafts of which less is to be expected, by what budgets at this load have kept, are left."""
_BEST_MEMORY = 0.98
DRAFT_TOKENS_MAX = 4096
"""Of one step; bounds the arithmetic."""


@dataclass(frozen=True)
class Mode:
    """Who decides. `auto` is for production; the others serve measurements and the kill switch.

    Attributes:
        kind: "auto", "off" (no look-up, no drafts) or "static" (as many as there are).
        tokens: of "static", at most so many a row.
    """

    kind: str = "auto"
    tokens: int = 0

    @staticmethod
    def parse(text: str) -> Mode:
        """From "auto", "off" or "static:K".

        Raises:
            ValueError: it is none of these.
        """
        kind, _, tokens = text.partition(":")
        if text in ("auto", "off"):
            return Mode(kind)
        if kind == "static" and tokens.isdecimal() and int(tokens) > 0:
            return Mode(kind, int(tokens))
        raise ValueError(f"mode {text!r}: expected auto, off or static:K with K from 1 up")


@dataclass(frozen=True)
class Load:
    """What the next step holds besides drafts.

    Attributes:
        rows: sequences that decode; each emits one token for certain.
        context_tokens: of all of them together.
        prefill_tokens: prompt tokens that still wait to be computed, begun or not.
    """

    rows: int
    context_tokens: int = 0
    prefill_tokens: int = 0


@dataclass(frozen=True)
class Limits:
    """What a step must keep to.

    Attributes:
        step_tokens: the engine's token budget; prompts go first, drafts take what they leave.
        itl_s: tightest inter-token latency target in the batch. A step is not made longer than that
            by drafts; one that is longer without any gets none.
        draft_tokens: cap for the step from outside (cluster, operator); None for none.
    """

    step_tokens: int = 8192
    itl_s: float = math.inf
    draft_tokens: int | None = None


@dataclass(frozen=True)
class Step:
    """A step that was run.

    Attributes:
        tokens: that it computed, prompts and drafts included.
        drafted: draft tokens among them.
        rows: that decoded. emitted: tokens that they emitted.
        context_tokens: of all rows.
        seconds: from its start to the next one's.
        pure: nothing but decoding rows was in it; only such steps compare with and without drafts.
        promised: gain that its budget promised; counts if anything was drafted.
    """

    tokens: int
    drafted: int
    rows: int
    emitted: int
    context_tokens: int
    seconds: float
    pure: bool = True
    promised: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """What `StepTime` prices. A prompt is taken to have begun in the step."""
        prompt = max(self.tokens - self.drafted - self.rows, 0)
        return prompt, self.rows, self.drafted, self.context_tokens, pairs_of(0, prompt)


class Planner:
    """Draft budgets of one engine. Used from one thread; deterministic for a seed."""

    def __init__(
        self,
        *,
        padded_sizes: Sequence[int] = (),
        seed: int = 0,
        controls: bool = True,
        times: StepTime | None = None,
    ) -> None:
        """`controls`: whether to run random steps without drafts and heed the ledger."""
        self.mode = Mode()
        self.times = times or StepTime(padded_sizes)
        self.counts: Counter[str] = Counter()
        self.price = 0.0
        """Survival that one more token had to offer in the last budget."""
        self.promised = 0.0
        """Gain that the last budget promised."""
        self.last = Step(tokens=0, drafted=0, rows=0, emitted=0, context_tokens=0, seconds=0.0)
        """The last step that was observed."""
        self._controls = controls
        self._random = random.Random(seed)
        self._ledgers: dict[int, Ledger] = {}
        self._best_survival = 1.0
        self._since_look = 0

    def ledger(self, rows: int) -> Ledger:
        """The ledger of loads like this: one for each power of two of rows."""
        return self._ledgers.setdefault(max(rows, 1).bit_length(), Ledger())

    def looks(self, load: Load, limits: Limits, tokens_max: int) -> str:
        """What to look drafts up for: "verify", "compare" (look, do not verify) or "nothing".

        Args:
            tokens_max: draft tokens that all rows together could take.
        """
        if self.mode.kind == "off" or load.rows == 0 or tokens_max <= 0:
            return "nothing"
        if self.mode.kind == "static":
            return "verify"
        room = self._room(load, limits, tokens_max)
        ledger = self.ledger(load.rows)
        if room and ledger.on and not self._is_control(ledger):
            seconds = self._seconds(load, room)
            least_gain = LEAST_GAIN / ledger.credit.share
            if can_pay(self._best_survival, seconds, load.rows, room, least_gain=least_gain):
                return "verify"
            self.counts["cannot_pay"] += 1
        self._since_look += 1
        if self._since_look >= LOOK_EVERY:
            self._since_look = 0
            return "compare"
        return "nothing"

    def choose(
        self,
        load: Load,
        limits: Limits,
        survival: NDArray[np.float32],
        lengths: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """Draft tokens to verify of each row.

        Args:
            survival: float32 [n, K], probability that a row's first i + 1 tokens are all accepted.
            lengths: int32 [n], tokens on offer in each row.

        Returns:
            int32 [n].
        """
        self.saw(survival, lengths)
        if self.mode.kind == "static":
            return self._static(load, limits, lengths)
        room = self._room(load, limits, int(lengths.sum()))
        seconds = self._seconds(load, room)
        least_gain = LEAST_GAIN / self.ledger(load.rows).credit.share
        budget = best_budget(survival, lengths, seconds, load.rows, least_gain=least_gain)
        self.price, self.promised = budget.price, budget.gain
        return budget.take

    def saw(self, survival: NDArray[np.float32], lengths: NDArray[np.int32]) -> None:
        """Note how good drafts are at present, verified or not."""
        if len(lengths) and survival.shape[1]:
            first = float(np.where(lengths > 0, survival[:, 0], 0.0).max())
            self._best_survival = max(first, _BEST_MEMORY * self._best_survival)

    def observe(self, step: Step) -> None:
        """Learn from a step that was run."""
        drafted, shape = step.drafted > 0, step.shape
        prompt, rows, _, context, pairs = shape
        predicted_s = self.times.seconds(*shape)
        undrafted_s = self.times.seconds(prompt, rows, 0, context, pairs)
        if not self.times.observe(*shape, step.seconds):
            return
        self.counts["steps"] += 1
        self.counts["drafted_steps"] += drafted
        self.counts["drafted_tokens"] += step.drafted
        self.counts["accepted_tokens"] += max(step.emitted - step.rows, 0)
        self.counts["row_steps"] += step.rows
        self.counts["emitted_tokens"] += step.emitted
        self.last = step
        if not (step.pure and step.rows and self.mode.kind == "auto"):
            return
        ledger = self.ledger(step.rows)
        if drafted:
            ledger.drafted_step(
                *(step.emitted, step.rows, step.seconds),
                *(predicted_s, undrafted_s, step.promised),
            )
        else:
            ledger.controls.observe(step.seconds, undrafted_s)
            ledger.idle_step()

    def depth(self, rows: int, draft_tokens: int) -> int:
        """Most tokens that a request may draft at such a load, of `draft_tokens`; 0 while drafting
        is off there."""
        if self.mode.kind == "static":
            return min(draft_tokens, self.mode.tokens)
        ledger = self._ledgers.get(max(rows, 1).bit_length())
        drafts = self.mode.kind == "auto" and (ledger is None or ledger.on)
        return draft_tokens if drafts else 0

    @property
    def saved_s(self) -> float:
        """Seconds that drafting saved of late, at all loads together."""
        return sum(ledger.saved_s for ledger in self._ledgers.values())

    @property
    def regret_bound_s(self) -> float:
        """Seconds that drafting lost of late at most, with confidence, summed over the loads."""
        return sum(max(0.0, -ledger.lower_s) for ledger in self._ledgers.values())

    def snapshot(self) -> dict[str, object]:
        """JSON-able view for metrics and status pages."""
        return {
            "mode": self.mode.kind,
            "price": self.price,
            "best_survival": self._best_survival,
            "step_time": self.times.summary(),
            "counts": dict(self.counts),
            "loads": {
                f"{2 ** (bits - 1)}..{2**bits - 1}": {
                    "on": ledger.on,
                    "gain": ledger.gain,
                    "credit": ledger.credit.share,
                    "regret_bound": ledger.regret_bound,
                    "switched_off": ledger.switched_off,
                }
                for bits, ledger in sorted(self._ledgers.items())
            },
        }

    def _is_control(self, ledger: Ledger) -> bool:
        if not self._controls:
            return False
        share = max(CONTROL_SHARE, 1.0 / (2.0 + ledger.controls.weight) ** 2)
        share /= max(1.0, 2.0 * ledger.gain)
        control = self._random.random() < share
        self.counts["control_steps"] += control
        return control

    def _room(self, load: Load, limits: Limits, tokens: int) -> int:
        """Draft tokens that the limits leave room for, of `tokens`."""
        room = min(tokens, limits.step_tokens - load.rows - load.prefill_tokens, DRAFT_TOKENS_MAX)
        if limits.draft_tokens is not None:
            room = min(room, limits.draft_tokens)
        if room <= 0:
            return 0
        if math.isfinite(limits.itl_s):
            room = int(np.searchsorted(self._seconds(load, room), limits.itl_s, "right")) - 1
        return max(room, 0)

    def _seconds(self, load: Load, room: int) -> NDArray[np.float64]:
        """Predicted, of the step with 0 to `room` draft tokens; not decreasing."""
        prompt = load.prefill_tokens
        return self.times.seconds_each(
            np.arange(room + 1), prompt, load.rows, load.context_tokens, pairs_of(0, prompt)
        )

    def _static(self, load: Load, limits: Limits, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        take = np.minimum(lengths, self.mode.tokens)
        room = self._room(load, replace(limits, itl_s=math.inf), int(take.sum()))
        return np.clip(room - (np.cumsum(take) - take), 0, take).astype(np.int32)

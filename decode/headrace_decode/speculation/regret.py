"""Whether drafting pays at all, judged by what happened and not by what was predicted.

The budget is only as good as the survivals and step times that it is computed from. This is the
guard over both: a ledger of the seconds that drafting saved or lost against steps without drafts,
which switches drafting off while the loss that cannot be excluded is more than is allowed.

The rule is that of conservative bandits (Wu, Shariff, Lattimore, Szepesvari, ICML 2016): explore
only as long as the lower confidence bound of what was earned stays above ``(1 - a)`` times what the
baseline would have earned. The baseline's earnings are known from randomised steps without drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

TOLERANCE = 0.01
"""Share of the time that drafting may lose for certain, or for lack of evidence."""
ALLOWANCE_STEPS = 24.0
"""What the ledger may be in doubt by before that: about ``z^2 sigma^2 / (4 a)`` with ``sigma``, the
scatter of a step's saving, at half the step. With less, drafting that neither gains nor loses is
switched off by its own scatter."""
CONFIDENCE_Z = 2.0
_LEDGER_MEMORY = 0.998  # 500 steps
_CONTROL_MEMORY = 0.98  # 50 steps
_CREDIT_STEPS, _CREDIT_MIN = 0.02 * 25.0, 0.1
_RATIO_MIN, _RATIO_MAX = 0.25, 4.0  # one hiccup of the machine counts as no more than this


@dataclass
class Controls:
    """How long steps without drafts take, as a multiple of what the model predicts for them."""

    weight: float = 0.0
    mean: float = 1.0
    _square: float = 0.0

    def observe(self, measured_s: float, predicted_s: float) -> None:
        """Book one step without drafts."""
        ratio = min(max(measured_s / predicted_s, _RATIO_MIN), _RATIO_MAX)
        self.weight = _CONTROL_MEMORY * self.weight + 1.0
        delta = ratio - self.mean
        self.mean += delta / self.weight
        self._square += ((ratio - self.mean) * delta - self._square) / self.weight

    @property
    def variance_of_mean(self) -> float:
        """Squared standard error of `mean`; that of one sample is taken as at least 5 %."""
        if self.weight == 0.0:
            return 0.04
        return max(self._square, 0.0025) / self.weight


@dataclass
class Credit:
    """How far budgets are believed at one load: seconds saved over seconds promised.

        share = (S + D) / (P + D), between 0.1 and 1       D = 2 % of 25 steps + sqrt(sum of x^2)

    with ``S`` the sum of ``x``, the seconds that each step saved, and ``P`` that of those promised.
    The best of many promises is the one most overrated (Smith and Winkler, The Optimizer's Curse,
    Management Science 2006), the more so the less there is to gain; but a request that is alone
    gains a step or loses a draft, and it takes many to tell skill from luck. Steps with drafts and
    steps without both forget at 1 in 500, so that who lost his credit is tried again.
    """

    _promised_s: float = 0.0
    _saved_s: float = 0.0
    _squares: float = 0.0
    _step_s: float = 0.0

    def book(self, promised_s: float, saved_s: float, step_s: float) -> None:
        """A step with drafts was run."""
        self.forget()
        self._promised_s += promised_s
        self._saved_s += saved_s
        self._squares += saved_s**2
        self._step_s = step_s

    def forget(self) -> None:
        """A step went by."""
        self._promised_s *= _LEDGER_MEMORY
        self._saved_s *= _LEDGER_MEMORY
        self._squares *= _LEDGER_MEMORY

    @property
    def share(self) -> float:
        """Of what a budget promises to gain, what is to be expected."""
        doubt_s = _CREDIT_STEPS * self._step_s + math.sqrt(self._squares)
        if doubt_s == 0.0:
            return 1.0
        share = (self._saved_s + doubt_s) / (max(self._promised_s, 0.0) + doubt_s)
        return min(max(share, _CREDIT_MIN), 1.0)


@dataclass
class Ledger:
    """Seconds saved by drafting at one load: on while it may pay, off and probed while it does not.

    A drafted step that emitted ``e`` tokens of ``r`` rows in ``t`` seconds saved
    ``x = (e / r) m T0 - t``, with ``m T0`` the seconds of a step without drafts. With the sums
    ``S`` of x, ``V`` of its squared deviations and ``E`` of t, all halved every 350 steps:

        lower = S - z sqrt(V + (sum of e / r T0)^2 var(m))
        off when lower < -(a E + 24 mean steps)

    Off, the ledger is emptied, and after a pause drafting is tried again with a quarter of the
    allowance; each trial that fails doubles the pause.
    """

    tolerance: float = TOLERANCE
    allowance_steps: float = ALLOWANCE_STEPS
    pause_steps: int = 32
    pause_max_steps: int = 2048
    settle_steps: int = 128
    """A trial that is still on after so many drafted steps has succeeded."""
    on: bool = True
    switched_off: int = 0
    _pause: int = 0
    _wait: int = 0
    _trial: bool = False
    _steps: float = 0.0
    _drafted: int = 0
    _saved_s: float = 0.0
    _scatter: float = 0.0
    _elapsed_s: float = 0.0
    _baseline_s: float = 0.0
    controls: Controls = field(default_factory=Controls)
    credit: Credit = field(default_factory=Credit)

    def idle_step(self) -> None:
        """One step at this load went by without drafts: the pause counts in such steps."""
        self.credit.forget()
        if self.on:
            return
        self._wait -= 1
        if self._wait <= 0:
            self.on, self._trial = True, True

    def drafted_step(
        self,
        emitted: int,
        rows: int,
        measured_s: float,
        predicted_s: float,
        undrafted_s: float,
        promised: float = 0.0,
    ) -> None:
        """Book one step with drafts.

        Args:
            emitted: tokens of all rows.
            predicted_s: by the step-time model, of the step as it was.
            undrafted_s: by the same, of the same rows without drafts.
            promised: gain that the budget promised, tokens a second over those without drafts.
        """
        measured = min(measured_s, _RATIO_MAX * predicted_s)
        baseline = emitted / rows * undrafted_s
        saved = baseline * self.controls.mean - measured
        self.credit.book(promised * predicted_s, saved, measured)
        keep = _LEDGER_MEMORY
        mean = self._saved_s / self._steps if self._steps else saved
        self._scatter = keep * self._scatter + (saved - mean) ** 2
        self._saved_s = keep * self._saved_s + saved
        self._elapsed_s = keep * self._elapsed_s + measured
        self._baseline_s = keep * self._baseline_s + baseline
        self._steps = keep * self._steps + 1.0
        self._drafted += 1
        if self._trial and self._drafted >= self.settle_steps:
            self._trial, self._pause = False, 0
        if self.on and self.lower_s < -self._allowed_s:
            self._switch_off()

    @property
    def lower_s(self) -> float:
        """Lower confidence bound of the seconds saved, of those that are remembered."""
        doubt = self._scatter + self._baseline_s**2 * self.controls.variance_of_mean
        return self._saved_s - CONFIDENCE_Z * math.sqrt(doubt)

    @property
    def saved_s(self) -> float:
        """Seconds saved by the drafted steps that are remembered; negative if they lost some."""
        return self._saved_s

    @property
    def gain(self) -> float:
        """Seconds saved per second of drafted steps, as measured; 0 without any."""
        return self._saved_s / self._elapsed_s if self._elapsed_s else 0.0

    @property
    def regret_bound(self) -> float:
        """Share of the time that drafting loses at most, with confidence; 0 if it surely pays."""
        return max(0.0, -self.lower_s / self._elapsed_s) if self._elapsed_s else 0.0

    @property
    def _allowed_s(self) -> float:
        allowance = self.allowance_steps * (0.25 if self._trial else 1.0)
        return self.tolerance * self._elapsed_s + allowance * self._elapsed_s / self._steps

    def _switch_off(self) -> None:
        self.on, self._trial = False, False
        self.switched_off += 1
        self._pause = min(max(2 * self._pause, self.pause_steps), self.pause_max_steps)
        self._wait = self._pause
        self._saved_s = self._scatter = self._elapsed_s = self._baseline_s = self._steps = 0.0
        self._drafted = 0

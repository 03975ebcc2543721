"""Decides whether speculation pays at one load, from measurements and not from predictions.

The budget is only as good as the acceptance probabilities and step times that it is computed from.
Therefore, some of the steps that should verify drafts, chosen at random, run without drafts. These
steps are the controls, and they are compared with the others. For each step the guard knows

    t     its seconds, divided by the seconds predicted for it without drafts
    e     the tokens that it emitted for each row; 1 without drafts
    q     the probability with which it became a control
    m     the mean t of the controls so far

and computes one sample of the time that speculation saves:

    x =  (m e - t) / (1 - q)      a step with drafts: the saved time
    x = -(m - t) / q              a control: the error of m

The mean of x is the time that speculation saves in a step. It does not depend on the models or on
the machine's speed, because the choice of the controls is random (inverse propensity weighting,
with m as control variate: Waudby-Smith, Wu, Ramdas, Karampatziakis and Mineiro, Anytime-valid
off-policy inference for contextual bandits, 2022). A confidence sequence over x holds at all steps
at once: with n samples and V the sum of their squared deviations, the true mean differs from the
mean of the samples by at most

    sqrt((V + r) log((V + r) / (r alpha^2))) / n

(two-sided normal mixture: Robbins 1970; Howard, Ramdas, McAuliffe and Sekhon, Time-uniform,
nonparametric, nonasymptotic confidence sequences, 2021). Speculation is off while the upper bound
is below 0. While it is off, some steps are still tried, and old steps lose weight, so that the
guard notices when speculation begins to pay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALPHA = 0.1
"""Probability that the confidence sequence ever excludes the true mean, if that is constant."""
MIXTURE = 10.0
"""r: about a sixth of the V at which the sequence is tightest."""
DECAY = 0.998
"""Factor by which a step's weight decays with each further step: about 500 steps are remembered."""
CONTROL_WHILE_UNDECIDED, CONTROL_WHILE_DECIDED, CONTROL_WHILE_OFF = 1 / 8, 1 / 64, 1 / 2
"""Probability of a control while it is unknown whether speculation pays, while it surely pays, and
among the few steps that are tried while it surely does not pay."""
PRIOR_CONTROLS = 16.0
"""Number of controls with exactly the predicted time that the guard assumes at its start. They
steady m at first, since an error of m is in every x."""
MAX_RATIO = 4.0
"""Limit of t as a multiple of the tokens a row, so that one hiccup of the machine does not decide.
"""


@dataclass(frozen=True)
class ControlDraw:
    """The random choice whether a step runs without its drafts; it does with `probability`."""

    is_control: bool
    probability: float


class DraftGuard:
    """The guard of one load."""

    def __init__(self) -> None:
        self.switched_off = 0
        """Number of times that speculation was switched off."""
        self._steps = self._sum = self._square = self._seconds = 0.0
        self._controls = self._ratios = PRIOR_CONTROLS
        self._is_on = True

    @property
    def is_on(self) -> bool:
        """Whether steps may verify drafts."""
        return self._is_on

    @property
    def control_probability(self) -> float:
        """Probability that a step that should verify drafts becomes a control."""
        if not self._is_on:
            return CONTROL_WHILE_OFF
        return CONTROL_WHILE_DECIDED if self.bounds[0] > 0.0 else CONTROL_WHILE_UNDECIDED

    def observe(
        self, control_draw: ControlDraw, tokens_a_row: float, seconds: float, undrafted_s: float
    ) -> None:
        """Learn from a step for which the random choice `control_draw` was made.

        Args:
            control_draw: the random choice.
            tokens_a_row: number of tokens that the step emitted for each row.
            seconds: seconds that the step took.
            undrafted_s: seconds predicted for the step without drafts.
        """
        ratio = min(seconds / undrafted_s, MAX_RATIO * tokens_a_row)
        mean = self._ratios / self._controls
        if control_draw.is_control:
            sample = (ratio - mean) / control_draw.probability
            self._controls = DECAY * self._controls + 1.0
            self._ratios = DECAY * self._ratios + ratio
        else:
            sample = (mean * tokens_a_row - ratio) / (1.0 - control_draw.probability)
        deviation = sample - self.saved
        self._steps = DECAY * self._steps + 1.0
        self._seconds = DECAY * self._seconds + undrafted_s * (not control_draw.is_control)
        self._sum = DECAY * self._sum + sample
        self._square = DECAY * self._square + deviation * (sample - self.saved)
        is_on = self.bounds[1] >= 0.0
        self.switched_off += self._is_on and not is_on
        self._is_on = is_on

    @property
    def saved(self) -> float:
        """Time that speculation saves in a step, as a multiple of a step without drafts.

        Below 0, speculation loses time.
        """
        return self._sum / self._steps if self._steps else 0.0

    @property
    def saved_s(self) -> float:
        """Seconds that speculation saved recently; below 0, it lost them."""
        return self.saved * self._seconds

    @property
    def lost_s(self) -> float:
        """Maximum seconds that speculation lost recently, by the lower confidence bound."""
        return max(0.0, -self.bounds[0]) * self._seconds if self._seconds else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Confidence bounds of `saved`."""
        if not self._steps:
            return -math.inf, math.inf
        spread = self._square + MIXTURE
        radius = math.sqrt(spread * math.log(spread / (MIXTURE * ALPHA**2))) / self._steps
        return self.saved - radius, self.saved + radius

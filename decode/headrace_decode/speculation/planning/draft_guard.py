"""Guard: whether drafting pays at one load, judged by what happened and not by what was predicted.

The budget is only as good as the chances and step times that it is computed from. So a step that
is to verify drafts is, at random, run without them instead, and the two kinds are compared. With
seconds ``t`` of a step over those predicted without drafts, tokens a row ``e`` (1 without drafts),
the share of controls ``q``, and ``m`` the mean t of controls so far, a step says

    x =  (m e - t) / (1 - q)      with drafts: what they saved
    x = -(m - t) / q              a control: by how much m is wrong

whose mean is what drafting saves in a step, whatever the models believe and however the machine
behaves, since chance decided which kind it was (inverse propensity weighting, with m as control
variate: Waudby-Smith, Wu, Ramdas, Karampatziakis and Mineiro, Anytime-valid off-policy inference
for contextual bandits, 2022). A confidence sequence over these x holds at all steps at once: with
n their number and V the sum of their squared deviations, the mean is within

    sqrt((V + r) log((V + r) / (r alpha^2))) / n

(two-sided normal mixture: Robbins 1970; Howard, Ramdas, McAuliffe and Sekhon, Time-uniform,
nonparametric, nonasymptotic confidence sequences, 2021). Drafting is off while all of it lies below
0. Old steps fade, so that a change for the better is seen: while off, some steps are tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALPHA = 0.1
"""Chance that the sequence ever misses the mean, were it not to change."""
MIXTURE = 10.0
"""r: about a sixth of the V at which the sequence is tightest."""
MEMORY = 0.998
"""What is left of a step's weight after the next: 500 steps are remembered."""
UNDECIDED, DECIDED, OFF = 1 / 8, 1 / 64, 1 / 2
"""Share of controls while nobody knows whether drafting pays, while it surely does, and among the
few steps that are tried while it surely does not."""
PRIOR_CONTROLS = 16.0
"""So many controls that took what was predicted are taken for seen: m is a price of tokens, and an
error of it an error of all x."""
LONGEST = 4.0
"""A hiccup of the machine counts as no more than so many steps."""


@dataclass(frozen=True)
class Toss:
    """Whether a step that was to verify drafts runs without; `share` of them do."""

    control: bool
    share: float


class Guard:
    """Of one load."""

    def __init__(self) -> None:
        self.switched_off = 0
        """How often drafting was switched off."""
        self._steps = self._sum = self._square = self._seconds = 0.0
        self._controls = self._ratios = PRIOR_CONTROLS
        self._on = True

    @property
    def on(self) -> bool:
        """Whether steps may verify drafts."""
        return self._on

    @property
    def share(self) -> float:
        """Of the steps that are to verify drafts, those that shall run without."""
        if not self._on:
            return OFF
        return DECIDED if self.bounds[0] > 0.0 else UNDECIDED

    def observe(self, toss: Toss, tokens_a_row: float, seconds: float, undrafted_s: float) -> None:
        """A step for which `toss` was thrown was run.

        Args:
            tokens_a_row: that it emitted. seconds: that it took.
            undrafted_s: predicted for it without drafts.
        """
        ratio = min(seconds / undrafted_s, LONGEST * tokens_a_row)
        mean = self._ratios / self._controls
        if toss.control:
            said = (ratio - mean) / toss.share
            self._controls = MEMORY * self._controls + 1.0
            self._ratios = MEMORY * self._ratios + ratio
        else:
            said = (mean * tokens_a_row - ratio) / (1.0 - toss.share)
        away = said - self.saved
        self._steps = MEMORY * self._steps + 1.0
        self._seconds = MEMORY * self._seconds + undrafted_s * (not toss.control)
        self._sum = MEMORY * self._sum + said
        self._square = MEMORY * self._square + away * (said - self.saved)
        on = self.bounds[1] >= 0.0
        self.switched_off += self._on and not on
        self._on = on

    @property
    def saved(self) -> float:
        """What drafting saves in a step, in steps without drafts; below 0: what it loses."""
        return self._sum / self._steps if self._steps else 0.0

    @property
    def saved_s(self) -> float:
        """Seconds that drafting saved of late; below 0: lost."""
        return self.saved * self._seconds

    @property
    def lost_s(self) -> float:
        """Seconds that it lost of late at most."""
        return max(0.0, -self.bounds[0]) * self._seconds if self._seconds else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Of `saved`, the confidence sequence."""
        if not self._steps:
            return -math.inf, math.inf
        spread = self._square + MIXTURE
        radius = math.sqrt(spread * math.log(spread / (MIXTURE * ALPHA**2))) / self._steps
        return self.saved - radius, self.saved + radius

"""The choice between loading KV from a slow tier and computing it, by predicted seconds.

Both predictions are fitted online to the engine's own measurements:

    compute = T(tokens, pairs) - T(0, 0)      by the engine's step times; pairs = sum over the
                                              tokens of the tokens that each attends to
    load    = l + m blocks                    of a load from one medium

Except for its first layer, a load overlaps with the computation of the tokens after it (`tail`),
and the step waits for the rest. So loading a prefix costs the engine

    wait = max(load / layers, load - tail)    instead of    the prefix's part of the step

Deeper blocks take longer to compute, and all take about the same time to load. The total over the
choices "load the first k, compute the rest" is therefore concave within a medium. Its minimum lies
where a medium's blocks end, and only these places are compared.

A step that waits delays all its tokens, those of other requests included. A load ahead of the step
delays no other request, but nothing then hides the load. So KV is loaded ahead of the step if

    wait (1 + others) > load          others: requests that the engine computes at the time

A tier without measurements counts as free, and so is tried. A tier that lost is tried again with a
single block, as soon as its expected loss is within `PROBE_SHARE` of the seconds that declining it
spent on computing. So a disk that has recovered is found, at a bounded price. A load that takes
longer than computing its blocks would have is given up (`LoadChoice.limit_s`). So the choice never
costs more than twice the better of the two (A. Karlin et al., Competitive snoopy caching,
Algorithmica 3, 1988).

Pure: no clocks, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_engine.step_time import StepTime, pairs_of
from headrace_kvstore.least_squares import LinearTime

PROBE_SHARE = 0.02
"""Part of the seconds spent on computing blocks that a tier could have supplied, which may be spent
on trying the tier again."""
CHANGED = 4.0
"""Factor by which a load must leave the plausible range to show that the tier has changed. The
earlier measurements are then dropped. The plausible range follows from the previous load, and
reaches from "only blocks cost" to "only the load costs"."""
LOAD_STD_S = 10.0, 10.0
"""Standard deviations before the first measurement, of a load and of a block in it: so large that
nothing is assumed about a medium."""


@dataclass(frozen=True, slots=True)
class TierRun:
    """Blocks that follow each other and lie in one medium."""

    medium: str
    blocks: int


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The blocks to load.

    Attributes:
        blocks: number of leading blocks of those offered.
        limit_s: seconds after which to give the load up; infinite if no step was measured.
    """

    blocks: int
    limit_s: float


class LoadPrice:
    """One engine's models, and the decision.

    Args:
        block_tokens: tokens a block.
        layers: the model's layers.
        step: the engine's step times, to be fitted here.
    """

    def __init__(self, block_tokens: int, layers: int, step: StepTime) -> None:
        self._block_tokens, self._layers, self._step = block_tokens, layers, step
        self._loads: dict[str, LinearTime] = {}
        self._last: dict[str, tuple[int, float]] = {}
        self._credit_s: dict[str, float] = {}

    def computed(
        self, prompt: int, rows: int, draft: int, context: int, pairs: int, seconds: float
    ) -> None:
        """Learn a step's shape (`store_work.StepShape`) and its seconds, without any waiting for
        KV."""
        self._step.observe(prompt, rows, draft, context, pairs, seconds)

    def loaded(self, medium: str, blocks: int, seconds: float) -> None:
        """Learn the seconds of a load from one medium."""
        if not (0.0 < seconds < math.inf and blocks > 0):
            return
        last_blocks, last_s = self._last.get(medium, (blocks, seconds))
        more = blocks / last_blocks
        changed = not min(1, more) / CHANGED <= seconds / last_s <= max(1, more) * CHANGED
        if changed or medium not in self._loads:
            self._loads[medium] = LinearTime(0.0, 0.0, *LOAD_STD_S)
        self._last[medium] = blocks, seconds
        self._loads[medium].observe(blocks, seconds)

    def load_s(self, medium: str, blocks: int) -> float | None:
        """Return the predicted seconds of a load; None for a medium without measurements."""
        return self._loads[medium].seconds(blocks) if medium in self._loads else None

    def more_s(self, medium: str) -> float | None:
        """Return the predicted seconds of one more block in a load; None for a medium without
        measurements."""
        return self._loads[medium].each_s if medium in self._loads else None

    def compute_s(self, first_token: int, last_token: int) -> float | None:
        """Return the predicted seconds that tokens add to a step, `last_token` not included; None
        before the first measured step."""
        if not self._step.samples:
            return None
        return self._step.added_s(last_token - first_token, pairs_of(first_token, last_token))

    def block_s(self, first_block: int, blocks: int) -> float | None:
        """Return the mean predicted seconds to compute one of these blocks: the limit that a pull
        from a peer or an object must beat (`peers.pull_cost`)."""
        first = first_block * self._block_tokens
        seconds = self.compute_s(first, first + blocks * self._block_tokens)
        return None if seconds is None else seconds / blocks

    def choose(
        self, first_block: int, runs: Sequence[TierRun], tokens: int, ahead: bool = False
    ) -> LoadChoice:
        """Choose how many of the offered blocks to load.

        Args:
            first_block: number of blocks before the first one offered.
            runs: the offered blocks, in the order of the prompt.
            tokens: of the whole prompt; the engine computes the tokens that are not loaded.
            ahead: whether the load is made ahead of the step, so that nothing hides it.
        """
        offered = sum(run.blocks for run in runs)
        size = self._block_tokens
        first = first_block * size
        all_s = self.compute_s(first, tokens)
        if not runs or all_s is None:
            return LoadChoice(offered, math.inf)
        best_s, best, loads_s, taken = all_s, 0, 0.0, 0
        for run in runs:
            taken += run.blocks
            loads_s += self.load_s(run.medium, run.blocks) or 0.0
            tail_s = self.compute_s(first + taken * size, tokens) or 0.0
            wait_s = loads_s if ahead else max(loads_s / self._layers, loads_s - tail_s)
            total_s = tail_s + wait_s
            if total_s <= best_s:
                best_s, best = total_s, taken
        if best == 0 and self._probes(first, runs[0], tokens):
            best = 1
        return self._choice(first, best)

    def ahead(self, runs: Sequence[TierRun], first_token: int, tokens: int, others: int) -> bool:
        """Whether to load ahead of the step that needs it.

        Args:
            runs: the blocks to load; media without measurements count as free.
            first_token, tokens: the prompt is computed from the first to the second.
            others: number of other requests that the engine computes at the time.
        """
        load_s = sum(self.load_s(run.medium, run.blocks) or 0.0 for run in runs)
        tail_s = self.compute_s(first_token, tokens) or 0.0
        return max(load_s / self._layers, load_s - tail_s) * (1 + others) > load_s

    def _choice(self, first: int, blocks: int) -> LoadChoice:
        """Return the choice with its limit; no blocks if they take no time to compute, since no
        load ends within such a limit."""
        limit_s = self.compute_s(first, first + blocks * self._block_tokens) or 0.0
        return LoadChoice(blocks, limit_s) if limit_s > 0 else LoadChoice(0, 0.0)

    def _probes(self, first: int, run: TierRun, tokens: int) -> bool:
        """Whether the seconds saved up for a tier that lost suffice to try it."""
        declined_s = self.compute_s(first, first + run.blocks * self._block_tokens) or 0.0
        one_s = self.compute_s(first, first + self._block_tokens) or 0.0
        credit_s = self._credit_s.get(run.medium, 0.0) + PROBE_SHARE * declined_s
        loss_s = min(self.load_s(run.medium, 1) or 0.0, one_s)  # it is given up after `one_s`
        if credit_s < loss_s:
            self._credit_s[run.medium] = credit_s
            return False
        self._credit_s[run.medium] = 0.0
        return True

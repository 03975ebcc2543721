"""The default: keep what saves the most predicted seconds per byte and second of residence.

For a block b at time t,

    worth(b) = rate(b, t) * (compute_s - load_s) / bytes      saved seconds per byte-second

- ``compute_s - load_s``: what one hit saves, from the fitted prefill and load models
- ``rate(b, t)``: hits per second to expect while it is held: the sum of the rates of all
  conversations whose prompts pass through b and are still waiting (`hazard.best_rate` of what
  `history` knows of each), and of the rate at which others branch off at b or below

Blocks stand or fall with their ancestors, so groups of blocks are compared (`Forest.density`).
What is least worth goes first; its worth is the price of room, and new blocks that are worth
less are not written at all.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from headrace_kvstore.policy.base import Keys, Mask, Policy, Slots, Table, proven_rate
from headrace_kvstore.policy.hazard import AGE_EDGES_S, AGES, CELLS, best_rate, fit
from headrace_kvstore.policy.history import (
    BLOCK,
    PROMPT,
    WAYS,
    age_bin,
    cell_of,
    count_all,
    find,
    last_serial,
    note_prompt,
    repair_rows,
)
from headrace_kvstore.policy.tree import Forest, worst_first

BRANCH_MEMORY_S = 600.0
"""Time over which branches at a block are averaged: `rate` decays by 1/e in it."""

FORGET_S = 24 * 3600.0
"""Counts lose half their weight in this time, so that another kind of traffic gets learned."""

REFIT_SHARE = 0.05
REFIT_PROMPTS, REFIT_MOST = 64, 4096
"""The model is fitted anew after this share of all prompts seen, within these bounds, is new."""

PRICE_HALF_LIFE_S = 60.0
"""What room cost at the last eviction counts for half as much after this time: what is stored has
aged, and without a decay a store full of it would refuse all and never learn so."""

HISTORY_SHARE = 1 / 256
HISTORY_BLOCKS = 1 << 10, 1 << 22
"""Share of a store's bytes that remembers blocks, and how many blocks at least and at most."""

BELIEVABLE_S = 1e12
"""More events, or seconds of waiting, than this in one cell are no count."""


def history_blocks(size_bytes: int) -> int:
    """Blocks to remember beside a store of this size, a power of two."""
    wanted = max(1, int(size_bytes * HISTORY_SHARE) // BLOCK.itemsize)
    least, most = HISTORY_BLOCKS
    return min(most, max(least, 1 << (wanted.bit_length() - 1)))


def state_dtype(slots: int, prompts: int = 1 << 16, blocks: int = 1 << 18) -> np.dtype:
    """All that the policy remembers, as one record, for a table of `slots` slots.

    It follows `prompts` conversations and remembers `blocks` blocks (a multiple of 8): 11 MB as
    they stand, and 28 bytes a slot.
    """
    if slots < 0 or prompts < 1 or blocks < WAYS or blocks % WAYS:
        raise ValueError("slots >= 0, prompts >= 1 and blocks a positive multiple of 8")
    return np.dtype(
        [
            ("prompts", PROMPT, (prompts,)),
            ("blocks", BLOCK, (blocks,)),
            ("events", "f8", (CELLS, AGES)),
            ("exposure_s", "f8", (CELLS, AGES)),
            ("best_rate", "f8", (CELLS, AGES + 1)),
            ("next_serial", "i8", (1,)),
            ("fitted_serials", "i8", (2,)),  # prompts seen now, and at the last fit
            ("fitted_s", "f8", (1,)),
            ("price", "f8", (1,)),
            ("priced_s", "f8", (1,)),  # when that was
            ("serial", "i8", (slots,)),  # of the prompt that passed the slot's block last
            ("passed_s", "f8", (slots,)),  # when that was
            ("branched_s", "f8", (slots,)),  # when the slot's `rate` was last brought up to date
            ("generation", "u4", (slots,)),  # of the slot's block of which the three above tell
        ],
        align=True,
    )


class CostAware(Policy):
    """Predicted seconds saved per byte and second of residence.

    Parameters
    ----------
    state
        One record of `state_dtype`, shape (1,), zeroed when new; may lie in shared memory.
    """

    name = "cost-aware"
    learns = True

    def __init__(self, state: NDArray[np.void]) -> None:
        s = state[0]
        self._prompts, self._blocks = s["prompts"], s["blocks"]
        self._events, self._exposure_s = s["events"], s["exposure_s"]
        self._best_rate = s["best_rate"]
        self._price, self._priced_s = s["price"], s["priced_s"]
        self._next_serial, self._seen = s["next_serial"], s["fitted_serials"]
        self._fitted_s = s["fitted_s"]
        self._serial, self._passed_s = s["serial"], s["passed_s"]
        self._branched_s, self._generation = s["branched_s"], s["generation"]
        self._worth, self._chosen_s = np.zeros(0), 0.0
        if self._next_serial[0] == 0:
            self._next_serial[0] = 1
            self._fit(0.0)

    @classmethod
    def create(cls, slots: int) -> CostAware:
        """With fresh state for a table of `slots` slots."""
        return cls(np.zeros(1, state_dtype(slots)))

    def prompt(self, keys: Keys, now_s: float) -> int:
        serial = note_prompt(
            keys,
            now_s,
            self._prompts,
            self._blocks,
            self._next_serial,
            self._events,
            self._exposure_s,
        )
        self._seen[0] += 1
        return int(serial)

    def ticket(self, keys: Keys) -> int:
        return int(last_serial(keys, self._blocks, self._prompts))

    def rates(self, keys: Keys, rows: Table, now_s: float) -> NDArray[np.float64]:
        """The conversation that passed each block last, and how often it was read so far."""
        used_s = rows["used_s"].astype(np.float64)
        tables = self._blocks, self._prompts, self._best_rate
        waiting = key_rates(keys, used_s, *tables, now_s)
        waiting[~np.isfinite(waiting)] = 0.0
        return waiting + proven_rate(rows, now_s)

    @property
    def price(self) -> float:
        """What room cost last: saved seconds per byte-second of the best block given up."""
        return float(self._price[0])

    def admit(
        self,
        ticket: int,
        compute_s: NDArray[np.float64],
        load_s: NDArray[np.float64],
        nbytes: NDArray[np.float64],
    ) -> int:
        row = self._prompts[ticket % len(self._prompts)]
        if ticket == 0 or row["serial"] != ticket or not compute_s.any():
            return len(compute_s)
        saved_s = np.maximum(compute_s - load_s, 0.0).sum()
        worth = self._best_rate[row["cell"] % CELLS, 0] * saved_s
        age = max(0.0, float(row["seen_s"] - self._priced_s[0]))
        price = self._price[0] * 0.5 ** (age / PRICE_HALF_LIFE_S)
        return len(compute_s) if worth >= price * nbytes.sum() else 0

    def touched(self, table: Table, slots: Slots, ticket: int, now_s: float, hit: bool) -> None:
        if not len(slots):
            return
        at = slots[-1]
        if not hit:
            table["rate"][slots] = 0.0
        elif self._generation[at] == table["generation"][at] and self._serial[at] != ticket:
            # another conversation came this way and left here
            age = max(0.0, now_s - self._branched_s[at])
            kept = table["rate"][at] * math.exp(-age / BRANCH_MEMORY_S)
            table["rate"][at] = kept + 1.0 / BRANCH_MEMORY_S
            self._branched_s[at] = now_s
        self._serial[slots] = ticket
        self._passed_s[slots] = now_s
        self._generation[slots] = table["generation"][slots]

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        new = self._seen[0] - self._seen[1]
        if new >= min(REFIT_MOST, max(REFIT_PROMPTS, REFIT_SHARE * self._seen[1])):
            self._fit(now_s)
        forest = Forest(table)
        self._chosen_s = now_s
        self._worth = self.worth(table, forest, now_s)
        return worst_first(table, forest, self._worth, now_s, need, among, covered=True)

    def given_up(self, table: Table, slots: Slots) -> None:
        worth = self._worth[slots]
        worth = worth[np.isfinite(worth)]
        if len(worth):
            self._price[0], self._priced_s[0] = worth.max(), self._chosen_s

    def worth(self, table: Table, forest: Forest, now_s: float) -> NDArray[np.float64]:
        """Saved seconds per byte-second of each slot's group, shape (slots,)."""
        known = self._generation == table["generation"]
        rate = _rates(
            forest.parents,
            forest.order,
            np.where(known, self._serial, 0),
            np.where(known, self._passed_s, table["used_s"]),
            self._prompts,
            self._best_rate,
            table["rate"],
            self._branched_s,
            now_s,
        )
        rate[~np.isfinite(rate)] = 0.0
        return forest.density(rate * _saved_s(table), table["bytes"].astype(np.float64))

    def repair(self, table: Table, now_s: float) -> None:
        """What could not have been written by a whole call is forgotten."""
        serials = int(self._next_serial[0])
        if not 1 <= serials < 1 << 62:
            self._prompts[:], self._blocks[:] = 0, 0
            self._next_serial[0] = serials = 1
        repair_rows(self._prompts, self._blocks, serials, now_s)
        for counts in (self._events, self._exposure_s):
            counts[~((counts >= 0.0) & (counts < BELIEVABLE_S))] = 0.0
        if not 0.0 <= self._price[0] < np.inf:
            self._price[0] = 0.0
        if not 0 <= self._seen[1] <= self._seen[0] < 1 << 62:
            self._seen[:] = 0
        for when in (self._fitted_s, self._priced_s):
            when[0] = when[0] if 0.0 <= when[0] <= now_s else now_s
        self._serial[(self._serial < 0) | (self._serial >= serials)] = 0
        for times in (self._passed_s, self._branched_s):
            times[~((times >= 0.0) & (times <= now_s))] = 0.0
        rate = table["rate"]
        table["rate"][~((rate >= 0.0) & (rate < np.inf))] = 0.0
        self._fit(now_s)

    def _fit(self, now_s: float) -> None:
        count_all(self._prompts, now_s, self._exposure_s)
        keep = 0.5 ** (max(0.0, now_s - self._fitted_s[0]) / FORGET_S)
        self._events *= keep
        self._exposure_s *= keep
        rates = best_rate(fit(self._events, self._exposure_s))
        self._best_rate[:, :AGES] = rates
        self._best_rate[:, AGES] = rates[:, -1]
        self._seen[1] = self._seen[0]
        self._fitted_s[0] = now_s


def _saved_s(table: Table) -> NDArray[np.float64]:
    """What one hit of each slot saves, (slots,); where nobody said, as much per byte as others."""
    saved_s = np.maximum(table["compute_s"].astype(np.float64) - table["load_s"], 0.0)
    unknown = table["compute_s"] == 0.0
    if unknown.any():
        nbytes = table["bytes"]
        known_bytes = nbytes[~unknown].sum()
        per_byte = saved_s.sum() / known_bytes if known_bytes else 1.0
        saved_s[unknown] = per_byte * nbytes[unknown]
    return saved_s


_EDGES = AGE_EDGES_S.copy()
_UNKNOWN = cell_of(-1.0, 0, 16, 16)  # a first turn of middling length


@njit(cache=True, nogil=True)
def _rate_at(best, cell, age_s):  # type: ignore[no-untyped-def]
    """`best_rate` of a cell at an age, between the bins' edges."""
    age = max(0.0, age_s)
    k = age_bin(age)
    part = min(1.0, (age - _EDGES[k]) / (_EDGES[k + 1] - _EDGES[k]))
    return (1.0 - part) * best[cell, k] + part * best[cell, k + 1]


@njit(cache=True, nogil=True)
def key_rates(keys, used_s, blocks, prompts, best, now_s):  # type: ignore[no-untyped-def]
    """Rate of the conversation that waits at each block; of one not remembered, of a first turn."""
    rate = np.zeros(len(keys))
    for i in range(len(keys)):
        at = find(blocks, keys[i])
        cell, since_s = _UNKNOWN, used_s[i]
        if at >= 0:
            row = prompts[blocks[at].serial % len(prompts)]
            if row.serial == blocks[at].serial and 0 <= row.cell < len(best):
                if blocks[at].seen_s < row.seen_s:  # its last prompt went another way
                    continue
                cell, since_s = row.cell, row.seen_s
        rate[i] = _rate_at(best, cell, now_s - since_s)
    return rate


@njit(cache=True, nogil=True)
def _rates(  # type: ignore[no-untyped-def]
    parents, order, serials, passed_s, prompts, best, branch_rate, branched_s, now_s
):
    """Expected hits per second of each slot in use.

    A conversation counts once, at the deepest block of its that is there, and in all blocks before
    that. Blocks that its last prompt no longer passed through (passed before it came) count for
    nothing. A block of unknown history is taken for that of a first turn. One branch at a block is
    no rate yet, so the first is not counted.
    """
    rate = np.zeros(len(parents))
    carried = np.zeros(len(parents), np.bool_)
    for i in order:
        if not carried[i]:
            row = prompts[serials[i] % len(prompts)]
            cell, since_s, alive = _UNKNOWN, passed_s[i], True
            if serials[i] > 0 and row.serial == serials[i] and 0 <= row.cell < len(best):
                cell, since_s = row.cell, row.seen_s
                alive = passed_s[i] >= row.seen_s
            if alive:
                rate[i] += _rate_at(best, cell, now_s - since_s)
        if branch_rate[i] > 0.0:
            kept = branch_rate[i] * np.exp(-max(0.0, now_s - branched_s[i]) / BRANCH_MEMORY_S)
            rate[i] += max(0.0, kept - 1.0 / BRANCH_MEMORY_S)
        p = parents[i]
        if p >= 0:
            rate[p] += rate[i]
            if serials[p] == serials[i]:
                carried[p] = True
    return rate

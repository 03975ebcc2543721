"""The default policy: keep blocks that save the most predicted seconds per byte-second of
residence.

For a block b at time t,

    worth(b) = rate(b, t) * (compute_s - load_s) / bytes      saved seconds per byte-second

- ``compute_s - load_s``: seconds that one hit saves (`base.saved_s`); ``load_s`` by the loads that
  this machine's engines have measured
- ``rate(b, t)``: hits per second to expect while it is held: the sum of the rates of all
  conversations whose prompts pass through b and are still waiting (`hazard.best_rate` of the
  features that `history` has of each)

A block is of no use without its ancestors, so each is worth at least as much as the blocks that
need it (`tree.worst_first`). The block of least worth is evicted first.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.numba_jit import jit
from headrace_kvstore.policy.base import (
    Keys,
    Mask,
    Policy,
    Slots,
    Table,
    proven_rate,
    saved_s,
    slot_keys,
)
from headrace_kvstore.policy.hazard import AGE_EDGES_S, AGES, CELLS, best_rate, fit
from headrace_kvstore.policy.history import (
    BLOCK,
    PROMPT,
    WAYS,
    age_bin,
    cell_of,
    count_all,
    find,
    record_prompt,
)
from headrace_kvstore.policy.tree import Forest, worst_first

FORGET_S = 24 * 3600.0
"""Time in which counts lose half their weight, so that the policy learns new kinds of traffic."""

REFIT_SHARE = 0.05
REFIT_PROMPTS, REFIT_MOST = 64, 4096
"""The model is fitted again when this share of all prompts seen, within these bounds, is new."""

HISTORY_SHARE = 1 / 256
HISTORY_BLOCKS = 1 << 10, 1 << 22
"""Share of a store's bytes that remembers blocks, and minimum and maximum number of blocks."""


MEDIA = "dram", "nvme"
"""Media whose loads are measured."""


def history_blocks(size_bytes: int) -> int:
    """Return the number of blocks to remember for a store of this size, a power of two."""
    wanted = max(1, int(size_bytes * HISTORY_SHARE) // BLOCK.itemsize)
    least, most = HISTORY_BLOCKS
    return min(most, max(least, 1 << (wanted.bit_length() - 1)))


def state_dtype(prompts: int = 1 << 16, blocks: int = 1 << 18) -> np.dtype:
    """Return the dtype of the policy's state, one record.

    The policy follows `prompts` conversations and remembers `blocks` blocks (a multiple of 8). With
    the defaults the state takes 12 MB.
    """
    if prompts < 1 or blocks < WAYS or blocks % WAYS:
        raise ValueError("prompts >= 1 and blocks a positive multiple of 8")
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
            ("byte_s", "f8", (len(MEDIA),)),  # of loads; 0: not measured
        ],
        align=True,
    )


class CostAware(Policy):
    """Policy by predicted seconds saved per byte and second of residence.

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
        self._next_serial, self._seen = s["next_serial"], s["fitted_serials"]
        self._fitted_s, self._byte_s = s["fitted_s"], s["byte_s"]
        self._bytes = state.view(np.uint8)
        if self._next_serial[0] == 0:
            self.reset_history()

    @classmethod
    def create(cls) -> Self:
        """Return a policy with fresh state."""
        return cls(np.zeros(1, state_dtype()))

    def prompt(self, keys: Keys, now_s: float) -> None:
        record_prompt(
            keys,
            now_s,
            self._prompts,
            self._blocks,
            self._next_serial,
            self._events,
            self._exposure_s,
        )
        self._seen[0] += 1

    def rates(self, keys: Keys, rows: Table, now_s: float) -> NDArray[np.float64]:
        """Return rates from the conversation that passed each block last, and from its hits so
        far."""
        return self._waiting(keys, rows, now_s)[1] + proven_rate(rows, now_s)

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        new = self._seen[0] - self._seen[1]
        if new >= min(REFIT_MOST, max(REFIT_PROMPTS, REFIT_SHARE * self._seen[1])):
            self._fit(now_s)
        forest = Forest(table)
        return worst_first(table, forest, self.worth(table, forest, now_s), now_s, need, among)

    def worth(self, table: Table, forest: Forest, now_s: float) -> NDArray[np.float64]:
        """Return the saved seconds per byte-second of each slot in use, shape (slots,)."""
        rate = _carried(
            *(forest.parents, forest.order), *self._waiting(slot_keys(table), table, now_s)
        )
        worth: NDArray[np.float64] = rate * saved_s(table, self.seconds_per_byte("dram"))
        return worth / np.maximum(table["bytes"], 1)

    def _waiting(
        self, keys: Keys, rows: Table, now_s: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        used_s = rows["used_s"].astype(np.float64)
        serials, rate = waiting(keys, used_s, self._blocks, self._prompts, self._best_rate, now_s)
        rate[~np.isfinite(rate)] = 0.0
        return serials, rate

    def set_load_cost(self, medium: str, seconds_per_byte: float) -> None:
        if medium in MEDIA and 0.0 <= seconds_per_byte < np.inf:
            self._byte_s[MEDIA.index(medium)] = seconds_per_byte

    def seconds_per_byte(self, medium: str) -> float:
        seconds_per_byte = float(self._byte_s[MEDIA.index(medium)])  # others may be writing it
        return seconds_per_byte if 0.0 <= seconds_per_byte < np.inf else 0.0

    def reset_history(self) -> None:
        self._bytes[:] = 0
        self._next_serial[0] = 1
        self._fit(0.0)

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


_EDGES = AGE_EDGES_S.copy()
_UNKNOWN = cell_of(-1.0, 0, 16, 16)  # a first turn of middling length


@jit(nogil=True)
def _rate_at(best, cell, age_s):  # type: ignore[no-untyped-def]
    """Return `best_rate` of a cell at an age, interpolated between the bins' edges."""
    age = max(0.0, age_s)
    k = age_bin(age)
    part = min(1.0, (age - _EDGES[k]) / (_EDGES[k + 1] - _EDGES[k]))
    return (1.0 - part) * best[cell, k] + part * best[cell, k + 1]


@jit(nogil=True)
def waiting(keys, used_s, blocks, prompts, best, now_s):  # type: ignore[no-untyped-def]
    """Return the conversation that passed each block last, 0 if none is remembered, and its rate. A
    block of unknown history gets the rate of a first turn at the time of the block's last use."""
    serials, rate = np.zeros(len(keys), np.int64), np.zeros(len(keys))
    for i in range(len(keys)):
        at = find(blocks, keys[i])
        cell, since_s = _UNKNOWN, used_s[i]
        if at >= 0:
            row = prompts[blocks[at].serial % len(prompts)]
            if row.serial == blocks[at].serial and 0 <= row.cell < len(best):
                serials[i], cell, since_s = row.serial, row.cell, row.seen_s
        rate[i] = _rate_at(best, cell, now_s - since_s)
    return serials, rate


@jit(nogil=True)
def _carried(parents, order, serials, own):  # type: ignore[no-untyped-def]
    """Return the expected hits per second of each slot in use. A conversation counts once in its
    deepest block that is there, and once in each block before it."""
    rate = np.zeros(len(parents))
    counted = np.zeros(len(parents), np.bool_)
    for i in order:
        if not counted[i]:
            rate[i] += own[i]
        p = parents[i]
        if p >= 0:
            rate[p] += rate[i]
            if serials[p] == serials[i]:
                counted[p] = True
    return rate

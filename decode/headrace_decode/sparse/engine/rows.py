"""Which rows of a step attend sparsely, and which blocks hold what they attend to.

A row is sparse if its request asks for it, it computes one token and not of the prompt, it has
many units, and their summaries are right. Rows of prompts, of drafts, of exact requests and short
ones are dense, as is a row whose summaries are still being made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.choosing import choose
from headrace_decode.sparse.engine.counts import RECENT, SINKS, chosen_units
from headrace_decode.sparse.scoring import score

FIELD = "sparse"
"""In a request's extra arguments: its share of units, above 0 and at most 1."""
STEP_WORK = 256
"""Of `Book.bring_up`, in a step: 10 ms at units of 32 tokens, 3 KV heads of 64."""


@dataclass(frozen=True)
class BatchRow:
    """A request's row in a step.

    Attributes:
        request_id: vLLM's.
        share: as `FIELD`; None for an exact request.
        prompt_tokens: of its prompt.
    """

    request_id: str
    share: float | None
    prompt_tokens: int


@dataclass(frozen=True)
class SparseRow:
    """A row that attends sparsely.

    Attributes:
        row: in the batch.
        units: int64 [n], blocks of its full units before the newest.
        newest: block of the newest.
        fill: tokens in the newest, this step's included.
        chosen: units that it attends to, the newest included.
    """

    row: int
    units: NDArray[np.int64]
    newest: int
    fill: int
    chosen: int

    def pick(self, layer: Any, queries: NDArray[np.float32], scale: float) -> NDArray[np.int64]:
        """Choose units; where they lie in the cache: int64 [kv_heads, chosen - 1], each
        `block * kv_heads + head`.

        Args:
            layer: `attention.SparseLayer`.
            queries: float32 [kv_heads, group, head_dim]. scale: of the logits.
        """
        scores = score(layer.summaries, self.units, queries, scale)
        kv_heads = len(scores)
        chosen = choose(scores, self.chosen - 1, SINKS, RECENT - 1)
        return self.units[chosen] * kv_heads + np.arange(kv_heads)[:, None]


class BringsUp(Protocol):
    """As `Book`."""

    def bring_up(self, units: NDArray[np.int64], budget: int) -> tuple[int, int]: ...


class SparseRows:
    """Follows the requests of an engine.

    Args:
        book: of its cache.
        layers: that a unit has summaries in.
        unit_tokens: of a unit.
    """

    def __init__(self, book: BringsUp, layers: int, unit_tokens: int) -> None:
        self._book, self._layers, self._unit_tokens = book, layers, unit_tokens
        self._right: dict[str, int] = {}
        """By request: its first units whose summaries are right."""
        self._moved: frozenset[str] = frozenset()

    def step_begins(self, moved: Collection[str]) -> None:
        """A step of the scheduler begins.

        Args:
            moved: requests whose blocks are new or no longer theirs. KV may still be on its way
                into new ones until the step ends, so nothing of them is looked at in it.
        """
        self._moved = frozenset(moved)
        for name in moved:
            self._right.pop(name, None)

    def of_step(
        self,
        rows: Sequence[BatchRow],
        queries: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        tables: NDArray[np.integer],
    ) -> list[SparseRow]:
        """The sparse rows of a step; makes summaries within the step's work.

        Args:
            rows: the batch.
            queries: int [rows], tokens that each computes.
            kv_tokens: int [rows], KV of each when it has.
            tables: int [rows, most units], blocks of the kernel.
        """
        wanting: list[tuple[int, int, int]] = []
        for number, row in enumerate(rows):
            if row.share is None or row.request_id in self._moved:
                continue
            before = int(kv_tokens[number] - queries[number])
            full = before // self._unit_tokens
            right = self._right.get(row.request_id, 0)
            if right > full:  # KV that did not come is computed again
                right = 0
            wanting.append((full - right, number, full))
        # Those that lack least come first: a row that only filled a unit up stays sparse.
        budget = STEP_WORK + self._layers * (int(queries.sum()) // self._unit_tokens)
        found = []
        for lacking, number, full in sorted(wanting):
            row = rows[number]
            right = full - lacking
            if lacking > 0 and budget > 0:
                units = tables[number, right:full].astype(np.int64)
                done, cost = self._book.bring_up(units, budget)
                self._right[row.request_id] = right = right + done
                budget -= cost
            if right >= full and queries[number] == 1:
                sparse = self._sparse(row, number, int(kv_tokens[number]), full, tables[number])
                found.extend([] if sparse is None else [sparse])
        return sorted(found, key=lambda each: each.row)

    def _sparse(
        self, row: BatchRow, number: int, kv_tokens: int, full: int, table: NDArray[np.integer]
    ) -> SparseRow | None:
        assert row.share is not None
        if kv_tokens <= row.prompt_tokens:
            return None
        chosen = chosen_units(kv_tokens, self._unit_tokens, row.share)
        if chosen is None:
            return None
        units = table[:full].astype(np.int64)
        fill = kv_tokens - full * self._unit_tokens
        return SparseRow(number, units, int(table[full]), fill, chosen)


def share_of(extra_args: Mapping[str, Any] | None) -> float | None:
    """The share that a request's extra arguments ask for; None for an exact one, as is 1."""
    value = (extra_args or {}).get(FIELD)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        return None
    return float(value)

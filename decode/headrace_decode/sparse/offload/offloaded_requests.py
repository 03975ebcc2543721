"""Offloaded requests of an engine on any device, and how their rows attend in a step.

    sparse    rows that are sparse by the rules of `sparse_rows`. Pages are scored by their
              summaries, wherever they lie, and chosen pages are brought into the working set
    staged    all other rows with KV that left the cache: rows of prompts, rows with drafts, rows
              that attend densely. All pages of a layer are copied in order to a buffer of one
              layer, and vLLM's kernel attends to them there: its result is the dense one

vLLM computes the rows whose KV is still all in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace_decode.attention.batch import BatchRow
from headrace_decode.sparse.engine.sparse_rows import (
    STEP_WORK,
    RefreshSummaries,
    RowPlan,
    min_pages,
    plan_of,
)
from headrace_decode.sparse.offload.offloaded_request import OffloadedRequest, TieredMemory

Memory = TypeVar("Memory", bound=TieredMemory)


@dataclass(frozen=True)
class OffloadedPlan:
    """A sparse row of an offloaded request."""

    plan: RowPlan
    held: OffloadedRequest


@dataclass(frozen=True)
class StagedPlan:
    """A row that attends to all its pages.

    Attributes:
        row: index in the batch.
        tokens: slice of the step's tokens.
        kv_tokens: number of tokens of its KV, this step's included.
        held: the request.
    """

    row: int
    tokens: slice
    kv_tokens: int
    held: OffloadedRequest


class OffloadedRequests(Generic[Memory]):
    """Offloaded requests of an engine.

    Args:
        memory: the engine's memory.

    Attributes:
        sparse, staged: numbers of sparse and staged rows so far.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._held: dict[str, OffloadedRequest] = {}
        self.sparse = self.staged = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, request_id: str) -> OffloadedRequest:
        return self._held[request_id]

    def follows(self, request_id: str) -> bool:
        """Return whether a step with this offloaded request has been seen."""
        return request_id in self._held and self._held[request_id].is_seen

    def begin_step(self, left: Collection[str], new: Mapping[str, Sequence[int]]) -> None:
        """Begin a step of the scheduler.

        Args:
            left: requests that ended or are preempted.
            new: the scheduler's blocks of the working set, by request that is offloaded from this
                step on.
        """
        for name in (*left, *new):
            held = self._held.pop(name, None)
            if held is not None:
                held.end()
        for name, slots in new.items():
            self._held[name] = self.memory.hold(slots)

    def save(self, final: Mapping[str, int], blocks: Callable[[str], Sequence[int]]) -> None:
        """Copy full blocks that have not been copied.

        Args:
            final: by request of the step: number of tokens whose KV is final.
            blocks: returns a request's blocks of the scheduler.
        """
        due = [
            held.save_up_to(tokens, blocks(name))
            for name, tokens in final.items()
            if (held := self._held.get(name)) is not None
        ]
        if any(len(pages) for pages, _ in due):
            pages, host_pages = (np.concatenate(each) for each in zip(*due, strict=True))
            self.memory.save(pages, host_pages)

    def select_rows(
        self,
        rows: Sequence[BatchRow],
        starts: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        refresh: RefreshSummaries,
    ) -> tuple[list[OffloadedPlan], list[StagedPlan]]:
        """Return a step's sparse and staged rows, and make summaries within the step's work.

        Args:
            rows: the batch.
            starts: int [rows + 1], first token of each row.
            kv_tokens, refresh: as for `SparseRows.select_rows`.
        """
        sparse, staged = [], []
        budget = STEP_WORK // self.memory.layer_count + int(starts[-1]) // self.memory.page_tokens
        for number, row in enumerate(rows):
            held = self._held.get(row.request_id)
            if held is None:
                continue
            length = int(kv_tokens[number])
            if row.keep_ratio is not None and len(held.slots):
                budget -= held.summarise(max(budget, min_pages(held.copied)))
            tokens = slice(int(starts[number]), int(starts[number + 1]))
            plan = self._plan(number, row, held, length, tokens.stop - tokens.start, refresh)
            if plan is not None:
                sparse.append(OffloadedPlan(plan, held))
            elif held.gone:
                staged.append(StagedPlan(number, tokens, length, held))
        self.sparse += len(sparse)
        self.staged += len(staged)
        return sparse, staged

    def _plan(
        self,
        number: int,
        row: BatchRow,
        held: OffloadedRequest,
        kv_tokens: int,
        queries: int,
        refresh: RefreshSummaries,
    ) -> RowPlan | None:
        plan = plan_of(row, number, queries, kv_tokens, self.memory.page_tokens)
        if plan is None or held.summarised < held.copied or plan.chosen - 1 > len(held.slots):
            return None
        lacking = plan.full - held.copied
        if refresh(number, held.copied, plan.full, STEP_WORK)[0] < lacking:
            return None
        return plan

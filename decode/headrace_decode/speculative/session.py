"""Follows the requests of one engine from step to step: their drafts, and how these turned out.

The session connects a memory, which drafts, a planner, which decides how much of a draft to verify,
and an engine, which passes rows of token ids and takes lists of tokens. It does not depend on a
particular engine.

A draft is judged by the text: the tokens that the engine emitted next are compared with the draft,
whether the draft was verified or not. For greedy decoding this equals verification. For
sampling it has the same distribution: a draft token ``d`` is accepted with its probability ``p(d)``
(Leviathan et al., ICML 2023, with a deterministic draft), and ``p(d)`` is also the probability that
the engine itself samples ``d``. Therefore, the token after the last accepted one counts, too; a
draft that the engine or the planner cut short is no failure; and drafts can be judged without
verifying them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.acceptance_counter import AcceptanceCounter
from headrace_decode.speculative.draft_batch import DraftBatch
from headrace_decode.speculative.jit import jit
from headrace_decode.speculative.planning.draft_budget import best_draft_budget
from headrace_decode.speculative.planning.draft_planner import (
    DraftPlanner,
    StepLimits,
    StepLoad,
    StepRecord,
)
from headrace_decode.speculative.request_info import RequestInfo
from headrace_decode.speculative.retrieval.draft_memory import DraftMemory


@dataclass(frozen=True)
class BatchRows:
    """The batch after a step's tokens have been sampled.

    Attributes:
        request_ids: request id of each row.
        sampled: tokens that each row emitted in this step; none while its prompt is computed.
        num_tokens: int [n], length of prompt and answer of each row, with these tokens.
        token_ids: int [n, *], token ids of prompt and answer of each row.
        kv_headroom: int [n], number of draft tokens for which each row has room in the KV cache;
            None if there is room for all.
        prefill_tokens: number of prompt tokens still to be computed.
    """

    request_ids: Sequence[str]
    sampled: Sequence[Sequence[int]]
    num_tokens: NDArray[np.integer]
    token_ids: NDArray[np.integer]
    kv_headroom: NDArray[np.integer] | None = None
    prefill_tokens: int = 0


@dataclass
class _RequestState:
    handle: int
    info: RequestInfo
    known_tokens: int


@dataclass
class _RunningStep:
    """The step in progress, as far as it is known."""

    started_s: float
    request_ids: frozenset[str]
    step: StepRecord


@dataclass
class _PendingDrafts:
    """Drafts that the engine's next tokens will test.

    Attributes:
        batch: the drafts.
        limits: int32 [n], maximum number of tokens that were looked up for each draft.
        taken: int32 [n], number of tokens of each draft given to the engine.
        place: request id -> index of its draft in the batch.
    """

    batch: DraftBatch
    limits: NDArray[np.int32]
    taken: NDArray[np.int32]
    place: dict[str, int] = field(default_factory=dict)


class SpeculationSession:
    """All requests of one engine, for use by one thread.

    Call `begin` before each step, and `propose` after it.
    """

    def __init__(
        self,
        memory: DraftMemory,
        planner: DraftPlanner,
        *,
        draft_tokens: int,
        model_tokens: int,
        step_tokens: int,
        vocabulary: int,
    ) -> None:
        """Args:
        memory: the memory that drafts.
        planner: decides how many draft tokens to verify.
        draft_tokens: maximum number of tokens that the engine verifies for one row in one step.
        model_tokens: maximum length of a sequence in the engine.
        step_tokens: the engine's token budget for a step.
        vocabulary: number of tokens in the vocabulary.
        """
        self.memory, self.planner = memory, planner
        self.draft_cap: int | None = None
        """Cap on draft tokens of one step, set from outside; None for no cap."""
        self.propose_s = 0.0
        """Seconds spent in `propose` so far."""
        self.draft_tokens, self._model_tokens = draft_tokens, model_tokens
        self._step_tokens, self._vocabulary = step_tokens, vocabulary
        self._requests: dict[str, _RequestState] = {}
        self._running: _RunningStep | None = None
        self._pending: _PendingDrafts | None = None
        self.acceptance_counts = AcceptanceCounter()
        """Counts of drafted and accepted tokens, by source."""

    def begin(
        self,
        tokens: int,
        drafted: int,
        request_ids: Iterable[str],
        finished: Iterable[str] = (),
        now_s: float | None = None,
    ) -> None:
        """Record the start of a step, which is the end of the step before it.

        Args:
            tokens: number of tokens that the step computes.
            drafted: number of draft tokens among them.
            request_ids: requests in the step.
            finished: requests that have ended or been aborted.
            now_s: time of a monotonic clock.
        """
        now = time.perf_counter() if now_s is None else now_s
        ids, before = frozenset(request_ids), self._running
        # Without a common request the engine may have been idle in between.
        if before is not None and before.step.rows and not ids.isdisjoint(before.request_ids):
            self.planner.observe(replace(before.step, seconds=now - before.started_s))
        for request_id in finished:
            request = self._requests.pop(request_id, None)
            if request is not None:
                keep = request.info.drafts and request.info.keeps
                self.memory.close_request(request.handle, keep=keep)
        control_draw, self.planner.control_draw = self.planner.control_draw, None
        step = StepRecord(
            tokens,
            drafted,
            rows=0,
            emitted=0,
            context_tokens=0,
            seconds=0.0,
            control_draw=control_draw,
        )
        self._running = _RunningStep(now, ids, step) if tokens else None

    def propose(
        self, rows: BatchRows, request_info: Callable[[str], RequestInfo]
    ) -> list[list[int]]:
        """Return draft tokens for each row's next step; `request_info` is called once a request."""
        started_s = time.perf_counter()
        live = [row for row, sampled in enumerate(rows.sampled) if len(sampled)]
        requests = [self._request_state(rows, row, request_info) for row in live]
        self._record_outputs(rows, live, requests)
        if self._running is not None:
            self._running.step = replace(
                self._running.step,
                rows=len(live),
                emitted=sum(len(rows.sampled[row]) for row in live),
                context_tokens=int(rows.num_tokens[live].sum()) if live else 0,
            )
        drafts: list[list[int]] = [[] for _ in rows.sampled]
        if live:
            self._draft(rows, live, requests, self._draft_limits(rows, live, requests), drafts)
        self.propose_s += time.perf_counter() - started_s
        return drafts

    def compile(self) -> None:
        """Have numba compile or load the functions used here before the first step.

        Errors of the memory are raised.
        """
        text = np.arange(8, dtype=np.int32) % 3
        handle = self.memory.open_request("compile", text)
        self.memory.extend_many([handle], text, np.array([len(text)], np.int32))
        batch = self.memory.draft_many([handle], np.array([2], np.int32))
        self.memory.feedback_many(batch, np.zeros(1, np.int32), np.zeros(1, np.int32))
        self.memory.close_request(handle, keep=False)
        one, chance = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
        count, places = np.ones(1, np.int32), np.zeros(1, np.int64)
        _gather_tokens(one, places, places, count)
        _count_accepted(one, count, count, count, places)
        best_draft_budget(chance, _valid_lengths(one, count, 1), np.ones(2))

    def _request_state(
        self, rows: BatchRows, row: int, request_info: Callable[[str], RequestInfo]
    ) -> _RequestState:
        request_id = rows.request_ids[row]
        request = self._requests.get(request_id)
        if request is None:
            info = request_info(request_id)
            prompt = rows.token_ids[row, : info.prompt_tokens].astype(np.int32)
            handle = -1
            if info.drafts:
                handle = self.memory.open_request(
                    request_id, prompt, info.tenant, temperature=info.temperature
                )
            request = _RequestState(handle, info, info.prompt_tokens)
            self._requests[request_id] = request
        return request

    def _record_outputs(
        self, rows: BatchRows, live: list[int], requests: list[_RequestState]
    ) -> None:
        """Pass the step's tokens to the memory, and the outcome of the last drafts."""
        if not live:
            return
        at = np.array(live)
        seen = np.array([request.known_tokens for request in requests])
        ends = rows.num_tokens[at].astype(np.int64)
        counts = np.maximum(ends - seen, 0).astype(np.int32)
        tokens = _gather_tokens(rows.token_ids, at, seen, counts)
        pending, self._pending = self._pending, None
        if pending is not None:
            places = np.array([pending.place.get(rows.request_ids[row], -1) for row in live])
            batch = pending.batch
            offered, accepted = _count_accepted(batch.tokens, batch.lengths, tokens, counts, places)
            self.memory.feedback_many(batch, offered, accepted)
            self.acceptance_counts.record(
                batch.source, pending.limits, pending.taken, accepted, places
            )
        self.memory.extend_many([request.handle for request in requests], tokens, counts)
        for end, request in zip(ends.tolist(), requests, strict=True):
            request.known_tokens = end

    def _draft_limits(
        self, rows: BatchRows, live: list[int], requests: list[_RequestState]
    ) -> NDArray[np.int32]:
        """Return the maximum number of useful draft tokens of each live row.

        A step emits one token more than it accepts, so the last of a row's allowed tokens is never
        drafted. Tokens without room in the KV cache are not drafted either.
        """
        num_tokens = rows.num_tokens[live]
        limits = np.minimum(self.draft_tokens, self._model_tokens - num_tokens - 1)
        left = np.fromiter(
            (
                self.draft_tokens
                if r.info.max_tokens is None
                else r.info.prompt_tokens + r.info.max_tokens - r.known_tokens - 1
                for r in requests
            ),
            np.int64,
            len(requests),
        )
        limits = np.minimum(limits, left)
        if rows.kv_headroom is not None:
            limits = np.minimum(limits, rows.kv_headroom[live])
        wanted = np.fromiter((r.info.drafts for r in requests), bool, len(requests))
        return np.where(wanted, np.maximum(limits, 0), 0).astype(np.int32)

    def _draft(
        self,
        rows: BatchRows,
        live: list[int],
        requests: list[_RequestState],
        limits: NDArray[np.int32],
        drafts: list[list[int]],
    ) -> None:
        """Fill in the drafts of the live rows, at most `limits` tokens each."""
        load = StepLoad(
            rows=len(live),
            context_tokens=int(rows.num_tokens[live].sum()),
            prefill_tokens=rows.prefill_tokens,
        )
        step_limits = StepLimits(
            step_tokens=self._step_tokens,
            itl_s=min(request.info.itl_s for request in requests),
            draft_tokens=self.draft_cap,
        )
        purpose = self.planner.plan_lookup(load, step_limits, int(limits.sum()))
        if purpose == "nothing":
            return
        batch = self.memory.draft_many([request.handle for request in requests], limits)
        lengths = _valid_lengths(batch.tokens, np.minimum(batch.lengths, limits), self._vocabulary)
        self._pending = _PendingDrafts(
            batch,
            limits,
            np.zeros(len(live), np.int32),
            {rows.request_ids[row]: place for place, row in enumerate(live)},
        )
        if purpose == "compare":
            self.planner.record_survival(batch.survival, lengths)
            return
        self._pending.taken = self.planner.choose(load, step_limits, batch.survival, lengths)
        take = self._pending.taken.tolist()
        for place, (row, count) in enumerate(zip(live, take, strict=True)):
            if count:
                drafts[row] = batch.tokens[place, :count].tolist()


def kv_headroom(
    num_tokens: NDArray[np.integer],
    blocks: Sequence[NDArray[np.integer]],
    block_tokens: Sequence[int],
    free_blocks: int,
    draft_tokens: int,
) -> NDArray[np.integer] | None:
    """Return the number of draft tokens for which rows have room without a preemption.

    While the free KV blocks suffice for the longest drafts of all rows, there is no limit, and the
    result is None. If they do not suffice, a row may fill the blocks that it has.

    Args:
        num_tokens: int [n], length of each row, with the token sampled last (its KV is computed in
            the next step).
        blocks: of each KV cache group: int [n], number of blocks of each row.
        block_tokens: tokens of a block of each group.
        free_blocks: number of free blocks.
        draft_tokens: maximum number of draft tokens of a row.
    """
    groups = list(zip(blocks, block_tokens, strict=True))
    longest = num_tokens + draft_tokens
    needed = [np.maximum(-(-longest // size) - each, 0).sum() for each, size in groups]
    if int(sum(needed)) <= free_blocks:
        return None
    room = np.min([each * size for each, size in groups], axis=0) - num_tokens
    return np.maximum(room, 0)


@jit
def _gather_tokens(
    token_ids: NDArray[np.integer],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Return token ids of rows from `starts` on, `counts` of each, one row after the other."""
    tokens = np.empty(counts.sum(), np.int32)
    at = 0
    for number in range(len(rows)):
        for place in range(starts[number], starts[number] + counts[number]):
            tokens[at] = token_ids[rows[number], place]
            at += 1
    return tokens


@jit
def _count_accepted(
    drafted: NDArray[np.int32],
    lengths: NDArray[np.int32],
    tokens: NDArray[np.int32],
    counts: NDArray[np.int32],
    places: NDArray[np.int64],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return for each draft the number of tested tokens, and of correct ones among them.

    Args:
        drafted, lengths: [m, K] and [m], the drafts.
        tokens, counts: the tokens that n rows emitted, one row after the other, and the number of
            tokens of each row.
        places: [n], index of the row's draft, -1 for none.
    """
    offered = np.zeros(len(lengths), np.int32)
    accepted = np.zeros(len(lengths), np.int32)
    at = 0
    for row in range(len(counts)):
        place = places[row]
        if place >= 0:
            common = min(counts[row], lengths[place])
            right = 0
            while right < common and drafted[place, right] == tokens[at + right]:
                right += 1
            accepted[place] = right
            offered[place] = min(right + 1, common)
        at += counts[row]
    return offered, accepted


@jit
def _valid_lengths(
    tokens: NDArray[np.int32], lengths: NDArray[np.int32], vocabulary: int
) -> NDArray[np.int32]:
    """Return `lengths`, cut before the first id that is not in the vocabulary."""
    usable = np.zeros(len(lengths), np.int32)
    for row in range(len(lengths)):
        count = 0
        while count < lengths[row] and 0 <= tokens[row, count] < vocabulary:
            count += 1
        usable[row] = count
    return usable

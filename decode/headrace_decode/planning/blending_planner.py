"""Decides which prompts blend stored KV at other positions, and records prompts for that.

A prompt is searched for runs of tokens of earlier prompts of the same tenant. Blending pays if
it computes at most the share `MAX_COST_RATIO` of the rows that are left after the exact prefix:

    exact rows = tokens - tokens of the exact prefix
    blended rows = tokens of no run + recompute ratio * tokens of runs
                   + rows of the probe + placed / 50

The exact prefix is the run that stands at position 0 in both prompts. Its KV needs no correction,
so it counts only as placed. Only runs count whose blocks this machine's DRAM holds now. An engine
that no longer finds them, or is on another machine, serves the prompt without blending. A prompt
that was blended is not recorded, since the store has none of its blocks.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from headrace_decode.planning.prefill_executor import Work
from headrace_engine.kv_transfer.handoff import BLENDED_KEY
from headrace_kvstore.identity.salts import isolated_salt

Output = TypeVar("Output")

MAX_COST_RATIO = 0.8
"""Maximum share of the rows that blending may compute to be worth its error."""
MIN_RUN = 128
"""Minimum tokens of a run that is worth the error at its beginning."""
LAST_TOKENS = 8
"""Number of tokens at the prompt's end in the probe. The answer will attend to the same tokens as
these do."""
DRAFT_ROWS = 128
"""Number of rows of a batch that take as long as the probe's draft of 8 tokens, one by one
(`headrace_prefill.blending.engine.selective_recompute`)."""
PLACED_PER_ROW = 50
"""Number of tokens whose placing takes as long as computing one row
(`headrace_prefill.blending.engine`)."""
THREAD_TOKENS = 4096
"""Length above which prompts are looked up in a thread: 4,096 tokens take 0.2 ms."""


class StoredRun(Protocol):
    """A run of stored tokens in a prompt (`headrace_prefill.blending.finding.finder.Run`)."""

    @property
    def new(self) -> int: ...
    @property
    def old(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def blocks(self) -> tuple[bytes, ...]: ...
    @property
    def offset(self) -> int: ...


class PromptIndex(Protocol):
    """An index of stored prompts (`headrace_prefill.blending.finding.finder.Finder`)."""

    def add(self, tenant: str, tokens: Sequence[int], digests: Sequence[bytes]) -> None: ...
    def find(self, tenant: str, tokens: Sequence[int], min_run: int) -> Sequence[StoredRun]: ...


@dataclass
class BlendingPlan:
    """The stored KV that a request may blend.

    Attributes:
        salt: a salt of this request alone, for its plan.
        params: parameters for the engine that computes the prompt
            (`headrace_prefill.blending.engine.stored_connector`).
        computed: number of tokens whose computation takes as long as the whole blending.
        tokens: number of tokens in the runs.
        is_pulled: whether another engine computes the prompt.
        was_blended: whether the engine made the KV from stored runs.
    """

    salt: str
    params: dict[str, Any]
    computed: int
    tokens: int
    is_pulled: bool = False
    was_blended: bool = False


class BlendingPlanner:
    """The planner of KV blending of one decode replica.

    Args:
        index: index of stored prompts.
        hashes: (token ids, salt) -> hashes of the prompt's full blocks.
        mode, budget: mode and default recompute ratio of the app's `techniques.blending`.

    Attributes:
        holds_blocks: (block hashes) -> whether this machine's DRAM holds each block; None: all
            count as held.
    """

    def __init__(
        self,
        index: PromptIndex,
        hashes: Callable[[Sequence[int], str], list[bytes]],
        mode: str,
        budget: float,
    ) -> None:
        self._index, self._hashes = index, hashes
        self.holds_blocks: Callable[[Sequence[bytes]], Sequence[bool]] | None = None
        self.mode, self.budget = mode, budget
        self.requests = self.blended_tokens = 0

    async def plan(self, salt: str, token_ids: Sequence[int], ratio: float) -> BlendingPlan | None:
        """Choose the stored KV to blend for a prompt; return None if blending does not pay.

        Args:
            ratio: part of the runs' KV that is recomputed.
        """
        if len(token_ids) <= MIN_RUN:
            return None
        wanted = token_ids[:-1]  # the engine computes the last one
        if len(wanted) > THREAD_TOKENS:
            runs = await asyncio.to_thread(self._index.find, salt, wanted, MIN_RUN)
        else:
            runs = self._index.find(salt, wanted, MIN_RUN)
        runs = self._with_all_blocks(runs)
        last = last_rows_of(len(wanted), runs)
        rows = rows_of(len(wanted), runs, last, ratio)
        if not pays(len(wanted), runs, rows):
            return None
        params = {
            "runs": [
                [run.new, run.old, run.length, run.offset, b"".join(run.blocks)] for run in runs
            ],
            "last": last,
            "recompute_ratio": ratio,
        }
        own_salt = isolated_salt(salt, f"blending-{uuid.uuid4().hex}")
        tokens = sum(run.length for run in runs)
        return BlendingPlan(own_salt, params, math.ceil(rows) + 1, tokens)

    async def on_finished(
        self, salt: str, token_ids: Sequence[int], plan: BlendingPlan | None
    ) -> None:
        """Count a prompt that was blended; record one that was computed exactly."""
        if plan is None or not plan.was_blended:
            await self.record_prompt(salt, token_ids)
            return
        self.requests += 1
        self.blended_tokens += plan.tokens

    def _with_all_blocks(self, runs: Sequence[StoredRun]) -> Sequence[StoredRun]:
        """Return the runs of which no block is missing in DRAM."""
        if self.holds_blocks is None or not runs:
            return runs
        is_held = iter(self.holds_blocks([block for run in runs for block in run.blocks]))
        return [run for run in runs if all([next(is_held) for _ in run.blocks])]

    async def record_prompt(self, salt: str, token_ids: Sequence[int]) -> None:
        """Record a prompt that was computed exactly, since its blocks go to the store."""
        if len(token_ids) > THREAD_TOKENS:
            await asyncio.to_thread(self._add_to_index, salt, token_ids)
        else:
            self._add_to_index(salt, token_ids)

    def _add_to_index(self, salt: str, token_ids: Sequence[int]) -> None:
        self._index.add(salt, token_ids, self._hashes(token_ids, salt))


def is_exact(run: StoredRun) -> bool:
    """Return whether a run stands at the beginning of both prompts."""
    return run.new == run.old == 0


def last_rows_of(tokens: int, runs: Sequence[StoredRun]) -> int:
    """Return the position of the first token of the probe at the prompt's end.

    The probe has up to `LAST_TOKENS` tokens, with the one after `tokens`, and none of a run.
    """
    end = runs[-1].new + runs[-1].length if runs else 0
    return max(end, tokens + 1 - LAST_TOKENS)


def rows_of(tokens: int, runs: Sequence[StoredRun], last: int, ratio: float) -> float:
    """Return the cost of blending in rows: placing the runs, the probe, and the rows computed."""
    placed = sum(run.length for run in runs)
    moved = placed - _exact(runs)
    probe = tokens - last + 1 + DRAFT_ROWS if last < tokens else 0
    return tokens - placed + ratio * moved + probe + placed / PLACED_PER_ROW


def pays(tokens: int, runs: Sequence[StoredRun], rows: float) -> bool:
    """Return whether blending costs at most `MAX_COST_RATIO` of computing all rows."""
    exact = _exact(runs)
    return sum(run.length for run in runs) > exact and rows <= MAX_COST_RATIO * (tokens - exact)


def _exact(runs: Sequence[StoredRun]) -> int:
    return sum(run.length for run in runs if is_exact(run))


def blending_work(work: Work[Output], plan: BlendingPlan) -> Work[Output]:
    """Return the work of a request that may blend stored KV.

    If the request does, vLLM counts all but one of the prompt's tokens as cached. The request is
    planned under its own salt, since planners expect planned prompts in the prefix cache.
    """
    prompt_tokens = len(work.token_ids)
    cached = prompt_tokens - plan.computed

    def submit(
        engine_request_id: str, kv_params: dict[str, Any] | None
    ) -> AsyncGenerator[Output, None]:
        plan.is_pulled = kv_params is not None
        plan.was_blended = bool(kv_params and kv_params.get(BLENDED_KEY))
        return work.submit(engine_request_id, kv_params)

    def cached_tokens(output: Output) -> int:
        reported = work.cached_tokens(output)
        if not plan.is_pulled:  # with an exact prefix, the engine computes at least the last block
            plan.was_blended = reported >= prompt_tokens - 1
        return min(cached, reported) if plan.was_blended else reported

    return replace(
        work,
        salt=plan.salt,
        computed=plan.computed,
        submit=submit,
        cached_tokens=cached_tokens,
    )

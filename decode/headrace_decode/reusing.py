"""Decides which prompts reuse stored KV at other positions, and remembers prompts for later reuse.

A prompt is searched for runs of tokens of earlier prompts of the same tenant. Reuse pays if it
computes at most the share `SAVES` of the rows that are left after the exact prefix:

    exact rows = tokens - tokens of the exact prefix
    reused rows = tokens of no run + share * tokens of runs + rows of the probe + placed / 50

The exact prefix is the run that stands at position 0 in both prompts. Its KV needs no correction,
so it counts only as placed. Only runs count whose blocks this machine's DRAM holds now. An engine
that no longer finds them, or is on another machine, serves the prompt without reuse. A prompt that
reused KV is not remembered, since the store has none of its blocks.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from headrace_decode.orchestrate import Work
from headrace_engine.handoff import REUSED_KEY
from headrace_kvstore.salts import marked

Output = TypeVar("Output")

SAVES = 0.8
"""Maximum share of the rows that reuse may compute to be worth its error."""
MIN_RUN = 128
"""Minimum tokens of a run that is worth the error at its beginning."""
LAST_TOKENS = 8
"""Number of tokens at the prompt's end in the probe. The answer will attend to the same tokens as
these do."""
DRAFT_ROWS = 128
"""Number of rows of a batch that take as long as the probe's draft of 8 tokens, one by one
(`headrace_prefill.blending.engine.side_pass`)."""
PLACED_PER_ROW = 50
"""Number of tokens whose placing takes as long as computing one row
(`headrace_prefill.blending.engine`)."""
THREAD_TOKENS = 4096
"""Length above which prompts are looked up in a thread: 4,096 tokens take 0.2 ms."""


class FoundRun(Protocol):
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


class Texts(Protocol):
    """An index of stored prompts (`headrace_prefill.blending.finding.finder.Finder`)."""

    def add(self, tenant: str, tokens: Sequence[int], digests: Sequence[bytes]) -> None: ...
    def find(self, tenant: str, tokens: Sequence[int], least: int) -> Sequence[FoundRun]: ...


@dataclass
class Reuse:
    """The stored KV that a request may reuse.

    Attributes:
        salt: a salt of this request alone, for its plan.
        params: parameters for the engine that computes the prompt
            (`headrace_prefill.blending.engine.stored`).
        computed: number of tokens whose computation takes as long as the whole reuse.
        tokens: number of tokens in the runs.
        pulls: whether another engine computes the prompt.
        happened: whether the engine made the KV from stored runs.
    """

    salt: str
    params: dict[str, Any]
    computed: int
    tokens: int
    pulls: bool = False
    happened: bool = False


class Reusing:
    """The reuse decisions of one decode replica.

    Args:
        texts: index of stored prompts.
        hashes: (token ids, salt) -> hashes of the prompt's full blocks.
        mode, budget: mode and default share of the app's `techniques.reuse`.
        held: (block hashes) -> whether this machine's DRAM holds each block; None: all count as
            held.
    """

    def __init__(
        self,
        texts: Texts,
        hashes: Callable[[Sequence[int], str], list[bytes]],
        mode: str,
        budget: float,
        held: Callable[[Sequence[bytes]], Sequence[bool]] | None = None,
    ) -> None:
        self._texts, self._hashes = texts, hashes
        self.held = held
        self.mode, self.budget = mode, budget
        self.requests = self.reused_tokens = 0

    async def plan(self, salt: str, token_ids: Sequence[int], share: float) -> Reuse | None:
        """Choose the stored KV to reuse for a prompt; return None if reuse does not pay."""
        if len(token_ids) <= MIN_RUN:
            return None
        wanted = token_ids[:-1]  # the engine computes the last one
        if len(wanted) > THREAD_TOKENS:
            runs = await asyncio.to_thread(self._texts.find, salt, wanted, MIN_RUN)
        else:
            runs = self._texts.find(salt, wanted, MIN_RUN)
        runs = self._held(runs)
        last = last_rows_of(len(wanted), runs)
        rows = rows_of(len(wanted), runs, last, share)
        if not pays(len(wanted), runs, rows):
            return None
        params = {
            "runs": [
                [run.new, run.old, run.length, run.offset, b"".join(run.blocks)] for run in runs
            ],
            "last": last,
            "share": share,
        }
        mine = marked(salt, f"reuse-{uuid.uuid4().hex}")
        tokens = sum(run.length for run in runs)
        return Reuse(mine, params, math.ceil(rows) + 1, tokens)

    async def finished(self, salt: str, token_ids: Sequence[int], reuse: Reuse | None) -> None:
        """Count a prompt that reused KV; remember one that was computed exactly."""
        if reuse is None or not reuse.happened:
            await self.heard(salt, token_ids)
            return
        self.requests += 1
        self.reused_tokens += reuse.tokens

    def _held(self, runs: Sequence[FoundRun]) -> Sequence[FoundRun]:
        """Return the runs of which no block is missing in DRAM."""
        if self.held is None or not runs:
            return runs
        held = iter(self.held([block for run in runs for block in run.blocks]))
        return [run for run in runs if all([next(held) for _ in run.blocks])]

    async def heard(self, salt: str, token_ids: Sequence[int]) -> None:
        """Remember a prompt that was computed exactly, since its blocks go to the store."""
        if len(token_ids) > THREAD_TOKENS:
            await asyncio.to_thread(self._remember, salt, token_ids)
        else:
            self._remember(salt, token_ids)

    def _remember(self, salt: str, token_ids: Sequence[int]) -> None:
        self._texts.add(salt, token_ids, self._hashes(token_ids, salt))


def is_exact(run: FoundRun) -> bool:
    """Return whether a run stands at the beginning of both prompts."""
    return run.new == run.old == 0


def last_rows_of(tokens: int, runs: Sequence[FoundRun]) -> int:
    """Return the position of the first token of the probe at the prompt's end.

    The probe has up to `LAST_TOKENS` tokens, with the one after `tokens`, and none of a run.
    """
    end = runs[-1].new + runs[-1].length if runs else 0
    return max(end, tokens + 1 - LAST_TOKENS)


def rows_of(tokens: int, runs: Sequence[FoundRun], last: int, share: float) -> float:
    """Return the cost of reuse in rows: placing the runs, the probe, and the rows computed."""
    placed = sum(run.length for run in runs)
    moved = placed - _exact(runs)
    probe = tokens - last + 1 + DRAFT_ROWS if last < tokens else 0
    return tokens - placed + share * moved + probe + placed / PLACED_PER_ROW


def pays(tokens: int, runs: Sequence[FoundRun], rows: float) -> bool:
    """Return whether reuse computes at most `SAVES` of the rows that the exact prefix leaves."""
    exact = _exact(runs)
    return sum(run.length for run in runs) > exact and rows <= SAVES * (tokens - exact)


def _exact(runs: Sequence[FoundRun]) -> int:
    return sum(run.length for run in runs if is_exact(run))


def reusing_work(work: Work[Output], reuse: Reuse) -> Work[Output]:
    """Return the work of a request that may reuse KV.

    If the request reuses KV, vLLM counts all but one of the prompt's tokens as cached. The request
    is planned under its own salt, since planners expect planned prompts in the prefix cache.
    """
    prompt_tokens = len(work.token_ids)
    cached = prompt_tokens - reuse.computed

    def submit(
        engine_request_id: str, kv_params: dict[str, Any] | None
    ) -> AsyncGenerator[Output, None]:
        reuse.pulls = kv_params is not None
        reuse.happened = bool(kv_params and kv_params.get(REUSED_KEY))
        return work.submit(engine_request_id, kv_params)

    def cached_tokens(output: Output) -> int:
        found = work.cached_tokens(output)
        if not reuse.pulls:  # with an exact prefix, the engine computes at least the last block
            reuse.happened = found >= prompt_tokens - 1
        return min(cached, found) if reuse.happened else found

    return replace(
        work,
        salt=reuse.salt,
        computed=reuse.computed,
        submit=submit,
        cached_tokens=cached_tokens,
    )

"""Decides which prompts reuse stored KV at other places, and remembers what others may reuse.

A prompt's tokens are looked for in those of earlier prompts of the same tenant. Reuse pays if it
computes fewer rows than the exact prefix leaves to compute:

    exact rows = tokens - those of the exact prefix
    reused rows = tokens of no run + share * tokens of runs + rows of the probe + placed / 50

The exact prefix is the run that stands at position 0 in both prompts; its KV needs no correction,
so it counts as placed only. Only runs count whose blocks this machine's DRAM holds now. An engine
that does not find them any more, or is on another machine, serves the prompt as if it had not
asked. A prompt that reused KV is not remembered, since the store has none of its blocks.
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
"""Reuse is worth its error if it computes at most this share of the rows."""
LEAST_RUN = 128
"""Tokens of a run that is worth the error at its beginning."""
LAST_TOKENS = 8
"""Of the prompt, in the probe: what they attend to is what the answer will look at."""
DRAFT_ROWS = 128
"""Rows of a batch that take as long as the probe's draft, 8 tokens one by one
(`headrace_prefill.reuse.engine.side_pass`)."""
PLACED_PER_ROW = 50
"""Tokens whose placing takes as long as computing one row (`headrace_prefill.reuse.engine`)."""
THREAD_TOKENS = 4096
"""Longer prompts are looked up in a thread: 4,096 tokens take 0.2 ms."""


class FoundRun(Protocol):
    """As `headrace_prefill.reuse.finding.finder.Run`."""

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
    """As `headrace_prefill.reuse.finding.finder.Finder`."""

    def add(self, tenant: str, tokens: Sequence[int], digests: Sequence[bytes]) -> None: ...
    def find(self, tenant: str, tokens: Sequence[int], least: int) -> Sequence[FoundRun]: ...


@dataclass
class Reuse:
    """The stored KV that a request's KV may be made from.

    Attributes:
        salt: the request's own, for its plan.
        params: for the engine that computes the prompt (`headrace_prefill.reuse.engine.stored`).
        computed: tokens whose computation takes as long as all that is to be done.
        tokens: of its runs.
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
    """The prompts of one decode replica.

    Args:
        texts: stored prompts.
        hashes: (token ids, salt) -> hashes of the prompt's full blocks.
        mode, budget: of the app's `techniques.reuse`.
        held: which of some blocks, by hash, this machine's DRAM holds; None: all are taken to be.
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
        """What to reuse for a prompt; None if that does not pay."""
        if len(token_ids) <= LEAST_RUN:
            return None
        wanted = token_ids[:-1]  # the engine computes the last one
        if len(wanted) > THREAD_TOKENS:
            runs = await asyncio.to_thread(self._texts.find, salt, wanted, LEAST_RUN)
        else:
            runs = self._texts.find(salt, wanted, LEAST_RUN)
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
        """A prompt has been computed exactly: its blocks go to the store."""
        if len(token_ids) > THREAD_TOKENS:
            await asyncio.to_thread(self._remember, salt, token_ids)
        else:
            self._remember(salt, token_ids)

    def _remember(self, salt: str, token_ids: Sequence[int]) -> None:
        self._texts.add(salt, token_ids, self._hashes(token_ids, salt))


def is_exact(run: FoundRun) -> bool:
    """Whether all that stands before a run is the same in both prompts: nothing."""
    return run.new == run.old == 0


def last_rows_of(tokens: int, runs: Sequence[FoundRun]) -> int:
    """First of the prompt's last tokens, which are probed: none of a run, and `LAST_TOKENS` of them
    with the one behind `tokens`."""
    end = runs[-1].new + runs[-1].length if runs else 0
    return max(end, tokens + 1 - LAST_TOKENS)


def rows_of(tokens: int, runs: Sequence[FoundRun], last: int, share: float) -> float:
    """Rows that take as long as all that reuse does: placing runs, the probe, rows computed."""
    placed = sum(run.length for run in runs)
    moved = placed - _exact(runs)
    probe = tokens - last + 1 + DRAFT_ROWS if last < tokens else 0
    return tokens - placed + share * moved + probe + placed / PLACED_PER_ROW


def pays(tokens: int, runs: Sequence[FoundRun], rows: float) -> bool:
    """Whether reuse computes at most `SAVES` of the rows that the exact prefix leaves."""
    exact = _exact(runs)
    return sum(run.length for run in runs) > exact and rows <= SAVES * (tokens - exact)


def _exact(runs: Sequence[FoundRun]) -> int:
    return sum(run.length for run in runs if is_exact(run))


def reusing_work(work: Work[Output], reuse: Reuse) -> Work[Output]:
    """Return the work of a request that may reuse KV.

    vLLM counts all but one of the prompt's tokens as cached if it does. It is planned under a salt
    of its own: planners count on prompts that the prefix cache gets.
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
        if not reuse.pulls:  # of an exact prefix at least the last block is computed
            reuse.happened = found >= prompt_tokens - 1
        return min(cached, found) if reuse.happened else found

    return replace(
        work,
        salt=reuse.salt,
        computed=reuse.computed,
        submit=submit,
        cached_tokens=cached_tokens,
    )

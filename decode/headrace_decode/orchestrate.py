"""Carries a plan out: remote prefill when the plan says so, and local prefill whenever that fails.

What the client must never see: a prefill replica that is gone, slow or answers nonsense, or KV
that does not arrive. The rules:

* The remote call and the arrival of its KV together get the plan's time-out. When the call fails
  or the time runs out, the prompt is prefilled locally.
* KV that came and is not proved to be the prompt's (docs/integrity.md) is not used: the engine
  computes the prompt itself, and the replica that sent it counts as failed.
* When it is the KV that does not arrive, a second, local, submission races the first; whichever
  yields a token first is kept and the other aborted. An engine takes KV in between its steps, so
  one that is busy with a long step makes nothing late: it must also have had some steps since.
* Prompts that this engine computes take turns (`headrace_engine.gate`).
* Only before the first token can anything be repeated; after it the stream is the engine's own.
* A prefill that nobody waits for any more (the client left, the time is up) is called off; KV that
  was made for nobody all the same is released, not left to its lease.

Pure asyncio: the engine, the prefill call and the planner come in from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from headrace_decode.distrust import Distrust
from headrace_engine.handoff import PrefillResult
from headrace_engine.meter import Unproven
from headrace_engine.tracing import record

logger = logging.getLogger("headrace.decode")

Output = TypeVar("Output")


class Plan(Protocol):
    """What of a plan is carried out here."""

    @property
    def prefill(self) -> str | None: ...
    @property
    def replica(self) -> str: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def compute_tokens(self) -> int: ...
    @property
    def plan_id(self) -> str: ...


class Planner(Protocol):
    """Makes plans and learns from what came of them (`headrace.router`, bound by the app)."""

    async def plan(
        self,
        request_id: str,
        token_ids: Sequence[int],
        salt: str,
        local_only: str | None,
        given: bytes | None,
        computed: int | None,
    ) -> Plan: ...
    def remote_failed(self, request_id: str, why: str) -> Plan: ...
    def prefill_members(self, replicas: Collection[str]) -> None: ...
    def prefill_done(self, request_id: str, result: PrefillResult, call_s: float) -> None: ...
    def first_token(
        self, request_id: str, seconds_from_plan: float, cached_tokens: int
    ) -> None: ...
    def attributes(self, request_id: str) -> Mapping[str, str | int | float]: ...
    def finished(
        self, request_id: str, output_token_ids: Sequence[int] = (), shared: bool = True
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Work(Generic[Output]):
    """One request, as the orchestrator sees it."""

    request_id: str
    token_ids: Sequence[int]
    salt: str
    local_only: str | None
    """Why the prompt must be prefilled here, if it must."""
    submit: Callable[[str, dict[str, Any] | None], AsyncGenerator[Output, None]]
    """Start the request on the own engine, under this id, pulling KV with these parameters."""
    prefill: Callable[[Plan], Awaitable[PrefillResult]]
    """Have the prompt prefilled remotely, by the replica that the plan names."""
    release: Callable[[dict[str, Any]], Awaitable[None]]
    """Tell the prefill engine that nobody will pull this KV."""
    cached_tokens: Callable[[Output], int]
    new_tokens: Callable[[Output], Sequence[int]]
    """The tokens of one output: those that it adds (streams yield deltas)."""
    trace_headers: Mapping[str, str] | None = None
    """Of the request's span, if it is traced."""
    plan: bytes | None = None
    """The plan that came with the request, if one did; the planner checks it."""
    said: Sequence[int] = ()
    """The answer's tokens of another replica, which this engine computes behind the prompt."""
    computed: int | None = None
    """Tokens to compute where the request says what its KV is made from; None where the caches do.
    """
    private_answer: bool = False
    """Whether no other request can use the KV of the answer."""
    turn: Callable[[int], AbstractAsyncContextManager[None]] = lambda tokens: nullcontext()
    """Held while the own engine computes a prompt of so many tokens."""
    engine_steps: Callable[[], int] = lambda: 0
    """Steps that the own engine has done since it started."""
    engine_busy: Callable[[], bool] = lambda: False
    """Whether it has anything else to compute."""


@dataclass(slots=True)
class _Pull:
    """A request whose KV comes from elsewhere."""

    replica: str
    refused: bool = False
    """Its KV was not proved; the engine computes it."""


LATE_STEPS = 3
"""Steps of the own engine, one each to start the pull, to see it done and to compute the token."""
LOOK_S = 0.02


class Orchestrator:
    """Runs requests by the planner's plans."""

    def __init__(self, planner: Planner):
        self.planner = planner
        self.own_seconds_total = 0.0
        """Time spent planning, summed over all requests."""
        self.requests_total = 0
        self.distrust = Distrust()
        """The prefill replicas whose KV is to be checked byte for byte."""
        self._active: set[str] = set()
        self._calls: dict[asyncio.Future[Any], str] = {}
        """Remote prefills that are waited for, with the replicas asked."""
        self._pulls: dict[str, _Pull] = {}
        """Requests whose KV comes from elsewhere, until they end."""
        self._cleanups: set[asyncio.Task[None]] = set()

    async def run(self, work: Work[Output]) -> AsyncGenerator[Output, None]:
        """Yield the request's outputs; the first comes from whichever way of prefilling worked."""
        planner, started = self.planner, time.perf_counter()
        work = self._with_unique_id(work)
        stream: AsyncGenerator[Output, None] | None = None
        answered = list(work.said)
        try:
            plan = await planner.plan(
                *(work.request_id, work.token_ids, work.salt),
                *(work.local_only, work.plan, work.computed),
            )
            self.own_seconds_total += time.perf_counter() - started
            kv_params = None
            if plan.prefill is not None:
                kv_params, plan = await self._prefill_remotely(work, plan)
            if kv_params is None:
                async with work.turn(plan.compute_tokens + len(work.said)):
                    stream = work.submit(work.request_id, None)
                    first = await anext(stream, None)
            else:
                left_s = plan.timeout_s - (time.perf_counter() - started)
                self._pulls[work.request_id] = _Pull(plan.replica)
                stream, first = await self._race_kv_arrival(work, kv_params, max(0.0, left_s))
            if first is None:
                return
            pull = self._pulls.get(work.request_id)
            if pull is not None and not pull.refused:
                self.distrust.right(pull.replica)
            waited_s = time.perf_counter() - started
            planner.first_token(work.request_id, waited_s, work.cached_tokens(first))
            record(
                *("plan", work.trace_headers, waited_s),
                lambda: planner.attributes(work.request_id),
            )
            answered.extend(work.new_tokens(first))
            yield first
            async for output in stream:
                answered.extend(work.new_tokens(output))
                yield output
        finally:
            if work.private_answer:
                planner.finished(work.request_id, answered, shared=False)
            else:
                planner.finished(work.request_id, answered)
            self._active.discard(work.request_id)
            self._pulls.pop(work.request_id, None)
            if stream is not None:
                await stream.aclose()

    def unproved(self, pull: Unproven) -> None:
        """The engine does not use the KV that it pulled for a request, and computes the prompt."""
        ours = self._pulls.get(pull.request_id)
        if ours is None or ours.refused:
            return
        ours.refused = True
        if pull.kind == "content":
            self.distrust.wrong(ours.replica)
        self.planner.remote_failed(pull.request_id, f"KV not used ({pull.kind}): {pull.why}")

    def prefill_members(self, replicas: frozenset[str]) -> None:
        """These prefill replicas run. Prompts that wait for others are prefilled here."""
        self.planner.prefill_members(replicas)
        self.distrust.members(replicas)
        for call, replica in self._calls.items():
            if replica and replica not in replicas:
                call.cancel()

    def _with_unique_id(self, work: Work[Output]) -> Work[Output]:
        """Keep requests apart whose clients gave them the same id."""
        self.requests_total += 1
        if work.request_id in self._active:
            work = replace(work, request_id=f"{work.request_id}-{self.requests_total}")
        self._active.add(work.request_id)
        return work

    async def _prefill_remotely(
        self, work: Work[Output], plan: Plan
    ) -> tuple[dict[str, Any] | None, Plan]:
        """The parameters to pull the KV with, or None if the prompt must be prefilled here; and the
        plan that holds now."""
        called = time.perf_counter()
        task = asyncio.ensure_future(work.prefill(plan))
        self._calls[task] = plan.replica
        try:
            done, _ = await asyncio.wait({task}, timeout=plan.timeout_s)
        except asyncio.CancelledError:
            self._call_off(work, task)
            raise
        finally:
            del self._calls[task]
        if not done:
            self._call_off(work, task)
            why = f"no answer in {plan.timeout_s:.2f} s"
        elif task.cancelled():
            why = f"{plan.replica} has gone"
        elif (error := task.exception()) is not None:
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        else:
            result = task.result()
            self.planner.prefill_done(work.request_id, result, time.perf_counter() - called)
            return result.kv_params, plan
        plan = self.planner.remote_failed(work.request_id, why)
        logger.warning(
            "remote prefill failed, prefilling locally: %s",
            why,
            extra={"request_id": work.request_id},
        )
        return None, plan

    async def _race_kv_arrival(
        self, work: Work[Output], kv_params: dict[str, Any], patience_s: float
    ) -> tuple[AsyncGenerator[Output, None], Output | None]:
        """First output of the request that pulls KV, or of a local one if the KV is late."""
        pulling = work.submit(work.request_id, kv_params)
        pulled: asyncio.Future[Output | None] = asyncio.ensure_future(_first(pulling))
        local: AsyncGenerator[Output, None] | None = None
        computed: asyncio.Future[Output | None] | None = None
        winner: AsyncGenerator[Output, None] | None = None
        try:
            late = await self._is_late(work, pulled, patience_s)
            if not late and pulled.exception() is None:
                winner = pulling
                return pulling, pulled.result()
            why = f"no KV {patience_s:.2f} s after the call" if late else str(pulled.exception())
            self._pulls.pop(work.request_id, None)
            self.planner.remote_failed(work.request_id, why)
            logger.warning(
                "prefilling locally as well: %s", why, extra={"request_id": work.request_id}
            )
            local = work.submit(f"{work.request_id}-local", None)
            computed = asyncio.ensure_future(_first(local))
            racers = {computed, pulled} if late else {computed}
            while racers:
                finished, racers = await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
                for racer in finished:
                    if racer.exception() is None:
                        winner = local if racer is computed else pulling
                        return winner, racer.result()
            return local, computed.result()
        finally:
            for future, stream in ((pulled, pulling), (computed, local)):
                if stream is not None and stream is not winner:
                    await _stop(future, stream)

    async def _is_late(
        self, work: Work[Output], pulled: asyncio.Future[Output | None], patience_s: float
    ) -> bool:
        """Wait for the first output; True if it is overdue though the engine could have made it."""
        await asyncio.wait({pulled}, timeout=patience_s)
        seen, pull = work.engine_steps(), self._pulls.get(work.request_id)
        while not pulled.done():
            if pull is not None and pull.refused:
                await asyncio.wait({pulled})  # the engine computes it: nothing is on its way
                return False
            if not work.engine_busy() or work.engine_steps() - seen >= LATE_STEPS:
                return True
            await asyncio.wait({pulled}, timeout=LOOK_S)
        return False

    def _call_off(self, work: Work[Output], task: asyncio.Future[PrefillResult]) -> None:
        """Stop a remote prefill that nobody waits for; KV that it made all the same is released."""
        task.cancel()

        async def release() -> None:
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
                with contextlib.suppress(Exception):
                    await work.release(task.result().kv_params)

        cleanup = asyncio.ensure_future(release())
        self._cleanups.add(cleanup)
        cleanup.add_done_callback(self._cleanups.discard)


async def _first(stream: AsyncIterator[Output]) -> Output | None:
    return await anext(stream, None)


async def _stop(
    racer: asyncio.Future[Output | None] | None, stream: AsyncGenerator[Output, None]
) -> None:
    """Abort a losing submission; closing the engine's generator aborts the engine's request."""
    if racer is not None and not racer.done():
        racer.cancel()
    if racer is not None:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await racer
    with contextlib.suppress(Exception):
        await stream.aclose()

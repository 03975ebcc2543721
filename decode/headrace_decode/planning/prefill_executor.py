"""Carries out a plan: remote prefill if the plan says so, and local prefill if that fails.

A client never sees a prefill replica that is missing, slow or answers incorrectly, nor KV that does
not arrive. The rules:

* The remote call and the arrival of its KV together have the plan's time-out, and more if the
  prompt has media. When the call fails or the time runs out, the prompt is prefilled locally.
* KV that arrives but is not proved to be the prompt's (docs/integrity.md) is not used: the engine
  computes the prompt itself, and the replica that sent the KV counts as failed.
* If the call succeeds but the KV does not arrive, a second, local submission races the first. The
  one that yields a token first is kept, and the other is aborted. An engine takes KV in between its
  steps. KV is therefore late only if the engine is idle or has done `LATE_STEPS` steps since the
  time-out.
* Prompts that this engine computes take turns (`headrace_engine.prefill_admission`).
* A prefill can be repeated only before the first token; after it the stream is the engine's own.
* A remote prefill that is no longer needed (the client left, the time is up) is cancelled. If it
  made KV anyway, the KV is released at once and not when its lease ends.

Pure asyncio: the engine, the prefill call and the planner are passed in.
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

from headrace_decode.planning.verification_policy import VerificationPolicy
from headrace_engine.kv_transfer.handoff import PrefillResult
from headrace_engine.meter import Unproven
from headrace_engine.tracing import record

logger = logging.getLogger("headrace.decode")

Output = TypeVar("Output")


class Plan(Protocol):
    """The part of a plan that the prefill executor carries out."""

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
    """A planner that learns from the outcome of its plans (`headrace.router`, bound by the app)."""

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
    """One request, as the prefill executor sees it."""

    request_id: str
    token_ids: Sequence[int]
    """The prompt's tokens for the planner, with others at the places of media
    (`headrace_engine.kv_transfer.media.planning_tokens`)."""
    salt: str
    local_only: str | None
    """Reason why the prompt must be prefilled here; None if it may be prefilled elsewhere."""
    submit: Callable[[str, dict[str, Any] | None], AsyncGenerator[Output, None]]
    """Start the request on this replica's engine, with this id and these parameters to pull KV."""
    prefill: Callable[[Plan], Awaitable[PrefillResult]]
    """Prefill the prompt remotely, at the replica that the plan names."""
    release: Callable[[dict[str, Any]], Awaitable[None]]
    """Tell the prefill engine that this KV will not be pulled."""
    cached_tokens: Callable[[Output], int]
    new_tokens: Callable[[Output], Sequence[int]]
    """The tokens that one output adds (streams yield deltas)."""
    trace_headers: Mapping[str, str] | None = None
    """Trace headers of the request's span, if it is traced."""
    plan: bytes | None = None
    """The plan that came with the request, if one did; the planner checks it."""
    resumed_tokens: Sequence[int] = ()
    """Answer tokens of another replica, which this engine computes after the prompt."""
    computed: int | None = None
    """Number of prompt tokens to compute if the request names the KV that it reuses; None if the
    caches determine the number."""
    private_answer: bool = False
    """Whether the KV of the answer is of no use to other requests."""
    turn: Callable[[int], AbstractAsyncContextManager[None]] = lambda tokens: nullcontext()
    """Context held while this replica's engine computes a prompt of so many tokens."""
    min_timeout_s: float = 0.0
    """Minimum time-out of a remote prefill, for work that plans do not predict."""
    engine_steps: Callable[[], int] = lambda: 0
    """Number of steps that this replica's engine has done since it started."""
    engine_busy: Callable[[], bool] = lambda: False
    """Whether this replica's engine is running requests."""


@dataclass(slots=True)
class _Pull:
    """A request whose KV comes from a prefill replica."""

    replica: str
    rejected: bool = False
    """Whether the KV was not proved, so that the engine computes it."""


LATE_STEPS = 3
"""Engine steps for a pull: one to start it, one to notice its end, one to compute the token."""
POLL_INTERVAL_S = 0.02


class PrefillExecutor:
    """An executor of requests that follows the planner's plans."""

    def __init__(self, planner: Planner):
        self.planner = planner
        self.own_seconds_total = 0.0
        """Time spent planning, summed over all requests."""
        self.requests_total = 0
        self.verification = VerificationPolicy()
        """Prefill replicas whose KV must be checked byte for byte."""
        self._active: set[str] = set()
        self.calls: dict[asyncio.Future[None], str] = {}
        """Pending remote prefills: a future that ends the wait for it, and its replica."""
        self._pulls: dict[str, _Pull] = {}
        """Requests whose KV comes from a prefill replica, until they end."""
        self.cleanups: set[asyncio.Task[None]] = set()

    async def run(self, work: Work[Output]) -> AsyncGenerator[Output, None]:
        """Yield the request's outputs; the first comes from the prefill that succeeded."""
        planner, started = self.planner, time.perf_counter()
        work = self._with_unique_id(work)
        stream: AsyncGenerator[Output, None] | None = None
        answered = list(work.resumed_tokens)
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
                async with work.turn(plan.compute_tokens + len(work.resumed_tokens)):
                    stream = work.submit(work.request_id, None)
                    first = await anext(stream, None)
            else:
                left_s = _timeout_s(work, plan) - (time.perf_counter() - started)
                self._pulls[work.request_id] = _Pull(plan.replica)
                stream, first = await self._race_kv_arrival(work, kv_params, max(0.0, left_s))
            if first is None:
                return
            pull = self._pulls.get(work.request_id)
            if pull is not None and not pull.rejected:
                self.verification.record_correct(pull.replica)
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
        """Record that the engine rejected the KV it pulled for a request and computes the prompt.

        If the content was wrong, all KV of its prefill replica is checked from now on.
        """
        known = self._pulls.get(pull.request_id)
        if known is None or known.rejected:
            return
        known.rejected = True
        if pull.kind == "content":
            self.verification.record_wrong(known.replica)
        self.planner.remote_failed(pull.request_id, f"KV not used ({pull.kind}): {pull.why}")

    def prefill_members(self, replicas: frozenset[str]) -> None:
        """Set the running prefill replicas; prefill prompts that wait for other replicas here."""
        self.planner.prefill_members(replicas)
        self.verification.retain(replicas)
        for stopped, replica in self.calls.items():
            if replica and replica not in replicas:
                stopped.cancel()

    def _with_unique_id(self, work: Work[Output]) -> Work[Output]:
        """Give the request another id if an active request has the same one."""
        self.requests_total += 1
        if work.request_id in self._active:
            work = replace(work, request_id=f"{work.request_id}-{self.requests_total}")
        self._active.add(work.request_id)
        return work

    async def _prefill_remotely(
        self, work: Work[Output], plan: Plan
    ) -> tuple[dict[str, Any] | None, Plan]:
        """Prefill the prompt at the plan's replica.

        Returns:
            The parameters to pull the KV with, or None if the prompt must be prefilled here; and
            the plan that now applies.
        """
        called, timeout_s = time.perf_counter(), _timeout_s(work, plan)
        task = asyncio.ensure_future(work.prefill(plan))
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls[stopped] = plan.replica
        either: set[asyncio.Future[Any]] = {task, stopped}
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._cancel_prefill(work, task)
            raise
        finally:
            del self.calls[stopped]
        if not task.done():
            self._cancel_prefill(work, task)
            late = f"no answer in {timeout_s:.2f} s"
            why = f"{plan.replica} has stopped" if stopped.done() else late
        elif task.cancelled():
            why = "the call was cancelled"
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
        """Submit the request to pull its KV, and a second time to prefill locally if KV is late.

        Returns:
            The submission that yielded first, and its first output.
        """
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
        """Wait for the first output; return whether it is late.

        It is late if the time is up and the engine is idle or has done `LATE_STEPS` steps since.
        """
        await asyncio.wait({pulled}, timeout=patience_s)
        steps_before, pull = work.engine_steps(), self._pulls.get(work.request_id)
        while not pulled.done():
            if pull is not None and pull.rejected:
                await asyncio.wait({pulled})  # the engine computes the prompt: no KV is expected
                return False
            if not work.engine_busy() or work.engine_steps() - steps_before >= LATE_STEPS:
                return True
            await asyncio.wait({pulled}, timeout=POLL_INTERVAL_S)
        return False

    def _cancel_prefill(self, work: Work[Output], task: asyncio.Future[PrefillResult]) -> None:
        """Cancel a remote prefill that is no longer needed; release its KV if it made any."""
        task.cancel()

        async def release() -> None:
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
                with contextlib.suppress(Exception):
                    await work.release(task.result().kv_params)

        cleanup = asyncio.ensure_future(release())
        self.cleanups.add(cleanup)
        cleanup.add_done_callback(self.cleanups.discard)


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


def _timeout_s(work: Work[Any], plan: Plan) -> float:
    return max(plan.timeout_s, work.min_timeout_s)

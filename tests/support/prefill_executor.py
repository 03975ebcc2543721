"""The sides of a prefill executor, as fakes: the decode engine, the prefill side and the planner.

Each does as a test says and keeps what it was asked; time-outs are real but short.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from headrace_decode.planning.prefill_executor import Plan, PrefillExecutor, Work
from headrace_engine.kv_transfer.handoff import PrefillResult
from headrace_engine.meter import EngineMeter, Step
from headrace_engine.prefill_admission import PrefillAdmission

PULL = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
RESULT = PrefillResult(PULL, queue_s=0.0, compute_s=0.1, cached_tokens=0, computed_tokens=5)
LATE_S = 0.03
"""A time-out that passes within a test."""
NEVER_S = 30.0
"""A time-out that no test reaches."""


def gate_for_one() -> PrefillAdmission:
    """A gate for one prompt at a time: a step of this engine costs nothing beside its tokens."""
    meter = EngineMeter()
    for tokens in (1, 2, 4, 8, 16, 64) * 10:
        meter.step(Step(tokens, 0, 0, 0, 0, 0.01 * tokens))
    return PrefillAdmission(meter)


@dataclass(frozen=True)
class Output:
    tokens: tuple[int, ...]
    cached_tokens: int = 0


class Submission:
    """One request on the fake engine: yields what the test puts, until `end` or `fail`."""

    def __init__(self, engine_id: str, kv_params: dict[str, Any] | None) -> None:
        self.engine_id = engine_id
        self.kv_params = kv_params
        self.started = False
        self.ended_by: str | None = None
        self._queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue()
        self.stream = self._run()

    def put(self, *tokens: int, cached_tokens: int = 0) -> Submission:
        self._queue.put_nowait(Output(tokens, cached_tokens))
        return self

    def end(self) -> Submission:
        self._queue.put_nowait(None)
        return self

    def fail(self, error: BaseException) -> Submission:
        self._queue.put_nowait(error)
        return self

    async def _run(self) -> AsyncGenerator[Output, None]:
        self.started = True
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
            self.ended_by = "itself"
        except (asyncio.CancelledError, GeneratorExit):
            self.ended_by = "abort"
            raise
        except Exception:
            self.ended_by = "error"
            raise


@dataclass
class Engine:
    """Hands out submissions; `script` prepares each as it is made."""

    script: dict[str, Any] = field(default_factory=dict)
    submissions: list[Submission] = field(default_factory=list)

    def submit(
        self, engine_id: str, kv_params: dict[str, Any] | None
    ) -> AsyncGenerator[Output, None]:
        submission = Submission(engine_id, kv_params)
        self.submissions.append(submission)
        kind = "local" if kv_params is None else "pull"
        if kind in self.script:
            self.script[kind](submission)
        return submission.stream

    @property
    def kinds(self) -> list[str]:
        return ["local" if s.kv_params is None else "pull" for s in self.submissions]

    @property
    def ends(self) -> list[str | None]:
        return [s.ended_by for s in self.submissions]


@dataclass(frozen=True)
class FakePlan:
    prefill: str | None
    timeout_s: float = NEVER_S
    replica: str = ""
    compute_tokens: int = 3
    plan_id: str = ""


class Planner:
    """Plans as told and records what it hears."""

    def __init__(self, prefill: str | None, timeout_s: float = NEVER_S) -> None:
        self.answer = FakePlan(prefill, timeout_s)
        self.planned: list[tuple[str, Sequence[int], str, str | None]] = []
        self.failures: list[tuple[str, str]] = []
        self.done: list[tuple[str, PrefillResult, float]] = []
        self.first: list[tuple[str, float, int]] = []
        self.over: list[tuple[str, list[int]]] = []
        self.given: list[bytes | None] = []
        self.computed: list[int | None] = []
        self.refuse: Exception | None = None

    async def plan(
        self,
        request_id: str,
        token_ids: Sequence[int],
        salt: str,
        local_only: str | None,
        given: bytes | None,
        computed: int | None,
    ) -> FakePlan:
        if self.refuse is not None:
            raise self.refuse
        self.planned.append((request_id, token_ids, salt, local_only))
        self.given.append(given)
        self.computed.append(computed)
        return self.answer

    def remote_failed(self, request_id: str, why: str) -> FakePlan:
        self.failures.append((request_id, why))
        return FakePlan(None)

    def prefill_members(self, replicas: Collection[str]) -> None:
        self.members = replicas

    def prefill_done(self, request_id: str, result: PrefillResult, call_s: float) -> None:
        self.done.append((request_id, result, call_s))

    def attributes(self, request_id: str) -> dict[str, str | int | float]:
        return {"of": request_id}

    def first_token(self, request_id: str, seconds_from_plan: float, cached_tokens: int) -> None:
        self.first.append((request_id, seconds_from_plan, cached_tokens))

    def finished(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None:
        self.over.append((request_id, list(output_token_ids)))


class Prefill:
    """The remote side: answers when told, can be called off, and hears which KV nobody wants."""

    def __init__(self, *, heeds_cancel: bool = True) -> None:
        self.calls = 0
        self.aborted = 0
        self.heeds_cancel = heeds_cancel
        self.answer: asyncio.Future[PrefillResult] = asyncio.get_running_loop().create_future()
        self.released: list[dict[str, Any]] = []

    async def call(self, plan: Plan) -> PrefillResult:
        self.calls += 1
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.aborted += 1
            if self.heeds_cancel:
                raise
        return await self.answer

    async def release(self, kv_params: dict[str, Any]) -> None:
        self.released.append(kv_params)


def work(
    engine: Engine, prefill: Prefill, request_id: str = "r", local_only: str | None = None
) -> Work[Output]:
    return Work(
        request_id=request_id,
        token_ids=[1, 2, 3],
        salt="tenant",
        local_only=local_only,
        submit=engine.submit,
        prefill=prefill.call,
        release=prefill.release,
        cached_tokens=lambda output: output.cached_tokens,
        new_tokens=lambda output: output.tokens,
    )


async def answer(executor: PrefillExecutor, request: Work[Output]) -> list[int]:
    """All tokens of a request that is read to its end."""
    tokens: list[int] = []
    async with aclosing(executor.run(request)) as outputs:
        async for output in outputs:
            tokens += output.tokens
    return tokens


async def until(true: Any, limit_s: float = 2.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.001)


def ready(*tokens: int) -> Any:
    """Script: a submission that yields these tokens one by one, then ends."""

    def script(submission: Submission) -> None:
        for token in tokens:
            submission.put(token)
        submission.end()

    return script


def broken(error: Exception) -> Any:
    """Script: a submission that fails."""
    return lambda submission: submission.fail(error)


async def assert_no_task_left() -> None:
    """Nothing runs on but the test itself."""
    for _ in range(5):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {left}"


async def hang_up(task: asyncio.Task[Any]) -> None:
    """What the HTTP server does: cancel the request's task."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def assert_forgotten(executor: PrefillExecutor) -> None:
    """Nothing of finished requests is kept."""
    assert not executor._active
    assert not executor.cleanups
    assert not executor._pulls

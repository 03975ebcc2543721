"""Tries each grammar in another process, and caches the results.

A grammar is a program of a client's: compiling or following it can take minutes, use all memory, or
crash. The replica therefore asks a worker process (`worker`) to check and compile it within the
limits of `limits`. Only grammars that passed reach its engine, in the form that the check returned.
Nothing is parsed on the replica's event loop.

A few grammars are tried at the same time (`limits.MAX_TRIALS`), so that a slow one delays no other;
one tenant may have fewer at the same time. Together they take no more of the machine than one.
Equal grammars are tried once. A trial that did not finish shows nothing about its grammar: its
requests fail with an error that says to ask again, and the next request tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import multiprocessing.spawn
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from headrace_decode.grammars.limits import (
    ANSWER_BYTES,
    COMPILE_WALL_S,
    MAX_TENANT_TRIALS,
    MAX_TRIALS,
)

logger = logging.getLogger("headrace.decode")

START_S = 120.0
MAX_CACHED_BYTES = 32 * 2**20

Spec = Mapping[str, Any]


class GrammarRefused(Exception):
    """Error: the grammar cannot be used; the message gives the client the reason."""


class TrialUnfinished(RuntimeError):
    """Error: the trial failed for reasons outside of the grammar; it may be repeated."""


class _Trial:
    """The trial of one grammar, for all requests that use it.

    Attributes:
        waiting: number of requests that still wait for the trial.
        has_begun: whether the worker has the grammar; before that the trial ends with its last
            request.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[dict[str, Any]] | None = None
        self.waiting, self.has_begun = 0, False

    async def answer(self) -> dict[str, Any]:
        """Wait for the answer. A client that disconnects does not interrupt a trial that began."""
        assert self.task is not None
        self.waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self.waiting -= 1
            if not self.waiting and not self.has_begun:
                self.task.cancel()


class GrammarTrials:
    """The worker process and the answers of its trials. Used from one event loop.

    Args:
        config: vLLM's pickled configuration, from which the worker makes its `Compiler`.
        command: command that starts the worker, for tests. None: run it with the interpreter with
            which multiprocessing would start a process.
    """

    def __init__(
        self,
        config: bytes,
        command: tuple[str, ...] | None = None,
    ) -> None:
        python = os.fsdecode(multiprocessing.spawn.get_executable())
        self._config = config
        self._command = command or (python, "-m", "headrace_decode.grammars.worker")
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(MAX_TRIALS)
        self._tenants: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """Pending answers of the worker, by the number of the trial."""
        self._trials: dict[bytes, _Trial] = {}
        self._cached: OrderedDict[bytes, dict[str, Any]] = OrderedDict()
        self._cached_bytes = 0
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.trials_total = 0

    def start(self) -> None:
        """Start the worker in the background, so that the first grammar need not wait for it."""
        self._spawn(self._warm())

    async def passed(self, spec: Spec, tenant: str) -> dict[str, Any]:
        """Return the answer of a grammar's passed trial (`worker.Compiler`), tried now if needed.

        Args:
            spec: the fields of vLLM's `StructuredOutputsParams` that are set.
            tenant: the tenant of the request.

        Raises:
            GrammarRefused: the grammar exceeds a limit, or is not a grammar.
            TrialUnfinished: the trial did not finish.
        """
        job = json.dumps(spec).encode()
        key = hashlib.sha256(job).digest()
        answer = self._cached_answer(key)
        if answer is None:
            trial = self._trials.get(key)
            if trial is None:
                trial = self._trials[key] = _Trial()
                trial.task = self._spawn(self._try(trial, key, job, tenant))
            answer = await trial.answer()
        if "refused" in answer:
            raise GrammarRefused(answer["refused"])
        return answer

    def close(self) -> None:
        """End the worker."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._end()

    async def aclose(self) -> None:
        """End the worker, and return when it has ended."""
        process, tasks = self._process, list(self._tasks)
        self.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        if process is not None:
            await process.wait()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here, too, since its requests may all have left

    async def _warm(self) -> None:
        with contextlib.suppress(Exception):
            await self._worker()

    async def _try(self, trial: _Trial, key: bytes, job: bytes, tenant: str) -> dict[str, Any]:
        of_tenant = self._tenants.setdefault(tenant, asyncio.Semaphore(MAX_TENANT_TRIALS))
        try:
            async with of_tenant, self._slots:
                trial.has_begun = True
                answer = await self._ask(job)
        finally:
            del self._trials[key]
        if "unfinished" in answer:
            raise TrialUnfinished(answer["unfinished"])
        self._cache_answer(key, answer)
        return answer

    async def _ask(self, job: bytes) -> dict[str, Any]:
        """Return the worker's answer."""
        self.trials_total += 1
        number, pending = self.trials_total, self._pending
        try:
            process = await self._worker()
            assert process.stdin is not None
            pending, answer = self._pending, asyncio.get_running_loop().create_future()
            pending[number] = answer
            process.stdin.write(b'{"id": %d, "spec": %s}\n' % (number, job))
            await process.stdin.drain()
            async with asyncio.timeout(2 * COMPILE_WALL_S):
                return await answer
        except Exception as error:
            self._end()
            raise TrialUnfinished(f"the grammar could not be tried ({error!r})") from error
        finally:
            pending.pop(number, None)

    async def _read(
        self,
        process: asyncio.subprocess.Process,
        pending: dict[int, asyncio.Future[dict[str, Any]]],
    ) -> None:
        """Pass on each answer of a worker. When the worker ends, trials without an answer fail."""
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                answer = dict(json.loads(line))
                waiting = pending.get(answer.pop("id"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
            why = "the worker for grammars has ended"
        except Exception as error:
            why = f"the worker for grammars answers incorrectly: {error!r}"
        if process is self._process:
            self._end()
        for waiting in pending.values():
            if not waiting.done():
                waiting.set_exception(RuntimeError(why))

    async def _worker(self) -> asyncio.subprocess.Process:
        """Return the running worker; start it again if it has ended."""
        async with self._starting:
            if self._closed:
                raise RuntimeError("the replica ends")
            if self._process is None or self._process.returncode is not None:
                self._process, self._pending = await self._started(), {}
                self._spawn(self._read(self._process, self._pending))
            return self._process

    async def _started(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2 * ANSWER_BYTES,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(len(self._config).to_bytes(8) + self._config)
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
            if line != b"ready\n":
                raise RuntimeError("the worker for grammars did not start; its log says why")
        except BaseException:
            _kill(process)
            await process.wait()
            raise
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)

    def _cached_answer(self, key: bytes) -> dict[str, Any] | None:
        answer = self._cached.get(key)
        if answer is not None:
            self._cached.move_to_end(key)
        return answer

    def _cache_answer(self, key: bytes, answer: dict[str, Any]) -> None:
        self._cached[key] = answer
        self._cached_bytes += _bytes(answer)
        while self._cached_bytes > MAX_CACHED_BYTES:
            _, oldest = self._cached.popitem(last=False)
            self._cached_bytes -= _bytes(oldest)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _bytes(answer: dict[str, Any]) -> int:
    """Return the approximate size of an answer in memory."""
    return 512 + int(answer.get("bytes", 0))

"""Has each grammar tried in another process, and remembers which passed.

A grammar is a program of a client's: compiling one can take minutes, all memory, or crash, and so
can following it. So the replica asks a worker process (`worker`) to check and compile it within the
limits of `limits`, and gives only those that passed to its engine, in the form that the check left.
Nothing is parsed on the replica's event loop.

One grammar is tried at a time, on one core, and each tenant has at most one in the queue, so one
tenant's grammars delay another's by one trial. Equal grammars are tried once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from headrace_decode.grammars.limits import ANSWER_BYTES, COMPILE_WALL_S

logger = logging.getLogger("headrace.decode")

START_S = 120.0
REMEMBERED_BYTES = 32 * 2**20

Spec = Mapping[str, Any]


class GrammarRefused(Exception):
    """The grammar cannot be used; the message says why, for the client."""


class GrammarTrials:
    """The worker process and what it has found. Used from one event loop.

    Args:
        config: what the worker's `Compiler` is made of, pickled: vLLM's configuration.
        command: starts the worker; another one in tests.
    """

    def __init__(
        self,
        config: bytes,
        command: tuple[str, ...] = (sys.executable, "-m", "headrace_decode.grammars.worker"),
    ) -> None:
        self._config, self._command = config, command
        self._process: asyncio.subprocess.Process | None = None
        self._busy = asyncio.Lock()
        self._tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._found: OrderedDict[bytes, dict[str, Any]] = OrderedDict()
        self._found_bytes = 0
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.trials_total = 0

    def start(self) -> None:
        """Start the worker in the background, so that the first grammar need not wait for it."""
        self._spawn(self._warm())

    async def passed(self, spec: Spec, tenant: str) -> dict[str, Any]:
        """What the trial of a grammar that passed answered (`worker.Compiler`).

        Args:
            spec: the fields of vLLM's `StructuredOutputsParams` that are set.
            tenant: whose it is.

        Raises:
            GrammarRefused: it passes a limit, or is not a grammar.
            RuntimeError: it could not be tried.
        """
        job = json.dumps(spec).encode()
        key = hashlib.sha256(job).digest()
        answer = self._remembered(key)
        if answer is None:
            # A client that hangs up leaves the exchange with the worker whole.
            trial: asyncio.Task[dict[str, Any]] = self._spawn(self._try(key, job, tenant))
            answer = await asyncio.shield(trial)
        if "refused" in answer:
            raise GrammarRefused(answer["refused"])
        return answer

    def close(self) -> None:
        """End the worker."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._end()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _warm(self) -> None:
        async with self._busy:
            with contextlib.suppress(Exception):
                await self._worker()

    async def _try(self, key: bytes, job: bytes, tenant: str) -> dict[str, Any]:
        lock = self._tenants.setdefault(tenant, asyncio.Lock())
        async with lock, self._busy:
            answer = self._remembered(key)
            if answer is None:
                answer = await self._ask(job)
                self._remember(key, answer)
            return answer

    async def _ask(self, job: bytes) -> dict[str, Any]:
        """The worker's answer."""
        self.trials_total += 1
        try:
            process = await self._worker()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(job + b"\n")
            await process.stdin.drain()
            line = await asyncio.wait_for(process.stdout.readline(), 2 * COMPILE_WALL_S)
            return dict(json.loads(line))
        except Exception as error:
            self._end()
            raise RuntimeError(f"the grammar could not be tried ({error!r})") from error
        except asyncio.CancelledError:
            self._end()
            raise

    async def _worker(self) -> asyncio.subprocess.Process:
        """The running worker, started anew where it has ended."""
        if self._closed:
            raise RuntimeError("the replica ends")
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2 * ANSWER_BYTES,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(len(self._config).to_bytes(8) + self._config)
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
        except BaseException:
            self._end()
            raise
        if line != b"ready\n":
            self._end()
            raise RuntimeError("the worker for grammars did not start; its log says why")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _remembered(self, key: bytes) -> dict[str, Any] | None:
        answer = self._found.get(key)
        if answer is not None:
            self._found.move_to_end(key)
        return answer

    def _remember(self, key: bytes, answer: dict[str, Any]) -> None:
        self._found[key] = answer
        self._found_bytes += _bytes(answer)
        while self._found_bytes > REMEMBERED_BYTES:
            _, oldest = self._found.popitem(last=False)
            self._found_bytes -= _bytes(oldest)


def _bytes(answer: dict[str, Any]) -> int:
    """About what an answer takes in memory."""
    return 512 + int(answer.get("bytes", 0))

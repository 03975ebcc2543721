"""The engine's worker inside the engine's own process, for CPU engines of one worker.

vLLM runs a CPU engine's worker in a process of its own and passes each step through shared memory.
The side that waits spins: an engine that computes with one thread keeps two cores busy, so that two
engines on a laptop compete for the cores that should compute. In one process neither side waits.
It also saves one import of vLLM and 0.7 GB per engine. vLLM's reason for two processes is that the
worker's OpenMP environment must be set before it starts. The replica's environment sets it here
(`OMP_NUM_THREADS`, no thread binding).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from headrace_engine.timer_slack import coarse_timers


class Deferred(Future[Any]):
    """A future that does its work when it is asked for the result.

    The engine core measures a step from asking for the result to having it. It would not measure
    work that is done before.
    """

    def __init__(self, work: Callable[[], Any]):
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        """Do the work once, in the calling thread; `timeout` has no effect."""
        if not self.done():
            try:
                self.set_result(self._work())
            except Exception as error:
                self.set_exception(error)
        return super().result()


class InProcessExecutor(UniProcExecutor):
    """Runs the worker in the engine core's process, each step when its result is asked for."""

    def _init_executor(self) -> None:
        with coarse_timers():  # Gloo's threads
            super()._init_executor()

    def execute_model(  # type: ignore[override]
        self, scheduler_output: Any, non_block: bool = False
    ) -> Any:
        """Run one step now, or return it as a future."""
        if not non_block:
            return super().execute_model(scheduler_output, non_block=False)
        run = super().execute_model
        return Deferred(lambda: run(scheduler_output, non_block=False))

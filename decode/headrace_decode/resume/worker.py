"""Has vLLM's first model runner resume a request after its earlier output tokens.

That runner has output tokens only of requests that it has run. A new request with output tokens is
therefore added to the runner's states here, and then scheduled like a preempted request. The second
model runner receives all tokens of a new request, and needs none of this.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.resume.scheduler import resume_tokens_of
from headrace_engine.extensions.extension import WorkerPart
from headrace_engine.vllm.resumed_requests import add_to_runner


class ResumeWorkerPart(WorkerPart):
    """Resumed requests of a worker with the first model runner."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def transform_step(self, step: Any) -> Any:
        """Return the step with new requests that have output tokens as preempted requests."""
        runner = self._worker.model_runner
        resumed = {
            new.req_id: tokens
            for new in step.scheduled_new_reqs
            if (tokens := resume_tokens_of(new.sampling_params))
            and new.req_id not in runner.requests
        }
        return add_to_runner(runner, step, resumed) if resumed else step

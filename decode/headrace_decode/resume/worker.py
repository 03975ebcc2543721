"""A worker with which vLLM's first model runner resumes a request after its earlier output tokens.

That runner has output tokens only of requests that it has run. A new request with output tokens is
therefore added to the runner's states here, and then scheduled like a preempted request. The second
model runner receives all tokens of a new request, and needs none of this.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.resume.scheduler import resume_tokens_of
from headrace_engine.vllm.resumed_requests import add_to_runner
from headrace_engine.vllm.worker import PlatformWorker


class ResumeWorker(PlatformWorker):  # type: ignore[misc]
    """vLLM's worker for the platform, with support for resumed requests."""

    resumes_requests = True
    """Marks workers that can resume requests."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step as vLLM does, after preparing its resumed requests."""
        if not self.use_v2_model_runner:
            scheduler_output = self._with_resumed_requests(scheduler_output)
        return super().execute_model(scheduler_output)

    def _with_resumed_requests(self, step: Any) -> Any:
        """Return the step with new requests that have output tokens as preempted requests."""
        runner = self.model_runner
        resumed = {
            new.req_id: tokens
            for new in step.scheduled_new_reqs
            if (tokens := resume_tokens_of(new.sampling_params))
            and new.req_id not in runner.requests
        }
        return add_to_runner(runner, step, resumed) if resumed else step

"""The worker class that tells the proposer which request is in which row, and when steps begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_decode.resume.worker import ResumeWorker
from headrace_decode.speculative.proposer import HeadraceProposer
from headrace_decode.speculative.runner_view import RunnerView
from headrace_engine.vllm.sampling import (
    drafter_of,
    is_drafting_worker,
    prepare_for_drafter,
    scheduled_step,
)


class SpeculativeWorker(ResumeWorker):
    """vLLM's worker for the platform, connected to the proposer.

    Only the first of the workers that share a model drafts, since the scheduler uses only its
    drafts.
    """

    _proposer: HeadraceProposer | None = None

    def load_model(self, **kwargs: Any) -> None:
        """Load the model as vLLM does, then bind the proposer if it is a `HeadraceProposer`."""
        super().load_model(**kwargs)
        proposer = drafter_of(self)
        if isinstance(proposer, HeadraceProposer):
            prepare_for_drafter(self)
            self._proposer = proposer
            if is_drafting_worker():
                draft_tokens = self.speculative_config.num_speculative_tokens
                proposer.bind(RunnerView(self.model_runner, draft_tokens))

    def execute_model(self, scheduler_output: Any) -> Any:
        """Announce the step to the proposer, then run it as vLLM does."""
        if self._proposer is not None:
            self._proposer.begin_step(*scheduled_step(scheduler_output))
        return super().execute_model(scheduler_output)

    def headrace_speculation(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run `HeadraceProposer.command`, for `collective_rpc`; {} with another proposer."""
        return {} if self._proposer is None else self._proposer.command(command)

    def headrace_corpus(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run `HeadraceProposer.corpus_command`, for `collective_rpc`; {} with another proposer."""
        return {} if self._proposer is None else self._proposer.corpus_command(command)

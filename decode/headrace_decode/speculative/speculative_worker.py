"""Connects the proposer to a worker: which request is in which row, and when steps begin."""

from __future__ import annotations

from typing import Any

from headrace_decode.speculative.proposer import HeadraceProposer
from headrace_decode.speculative.runner_view import RunnerView
from headrace_engine.extensions.extension import WorkerPart
from headrace_engine.vllm.sampling import (
    drafter_of,
    is_drafting_worker,
    prepare_for_drafter,
    scheduled_step,
)


class SpeculativeWorkerPart(WorkerPart):
    """The proposer of a worker, if that is a `HeadraceProposer`.

    Only the first of the workers that share a model drafts, since the scheduler uses only its
    drafts.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._proposer: HeadraceProposer | None = None

    def after_load(self) -> None:
        """Bind the proposer."""
        proposer = drafter_of(self._worker)
        if isinstance(proposer, HeadraceProposer):
            prepare_for_drafter(self._worker)
            self._proposer = proposer
            self.commands = {"speculation": proposer.command, "corpus": proposer.corpus_command}
            if is_drafting_worker():
                draft_tokens = self._worker.speculative_config.num_speculative_tokens
                proposer.bind(RunnerView(self._worker.model_runner, draft_tokens))

    def begin_step(self, step: Any) -> None:
        """Announce the step to the proposer."""
        if self._proposer is not None:
            self._proposer.begin_step(*scheduled_step(step))

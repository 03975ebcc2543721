"""The worker class that tells the proposer which request is in which row, and when steps begin.

It is not in `headrace_decode._vllm_compat`, since engine processes load it and do not need the
server's imports. `tests/unit/test_contracts_speculation.py` checks the parts of vLLM that are used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from headrace_decode.resume.worker import TakingUpWorker
from headrace_decode.speculative.proposer import HeadraceProposer, RunnerView

if current_platform.is_cpu():
    from headrace_decode.speculative.cpu_sampler import CpuRejectionSampler


class SpeculatingWorker(TakingUpWorker):
    """vLLM's worker for the platform, connected to the proposer.

    Only the first of the workers that share a model drafts, since the scheduler uses only its
    drafts.
    """

    _proposer: HeadraceProposer | None = None

    def load_model(self, **kwargs: Any) -> None:
        """Load the model as vLLM does, then bind the proposer if it is a `HeadraceProposer`.

        In a step in which one row has less than the maximum number of draft tokens left to the
        maximum length, vLLM does not draft, and has every row verify that many zeros. The proposer
        itself respects the maximum length row by row, so the runner's limit for the drafter is set
        to infinity. On CPUs the runner gets a rejection sampler that can spread temperatures.
        """
        super().load_model(**kwargs)
        proposer = getattr(self.model_runner, "drafter", None)
        if isinstance(proposer, HeadraceProposer):
            self.model_runner.effective_drafter_max_model_len = sys.maxsize
            if current_platform.is_cpu():
                self.model_runner.rejection_sampler = CpuRejectionSampler(
                    self.model_runner.sampler, self.speculative_config, self.device
                )
            self._proposer = proposer
            if get_tp_group().is_first_rank:
                view = RunnerView(self.model_runner, self.speculative_config.num_speculative_tokens)
                proposer.bind(view)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Announce the step to the proposer, then run it as vLLM does."""
        if self._proposer is not None:
            self._proposer.step_begins(
                scheduler_output.num_scheduled_tokens,
                scheduler_output.scheduled_spec_decode_tokens,
                scheduler_output.finished_req_ids,
            )
        return super().execute_model(scheduler_output)

    def headrace_speculation(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run `HeadraceProposer.command`, for `collective_rpc`; {} with another proposer."""
        return {} if self._proposer is None else self._proposer.command(command)

    def headrace_memory(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run `HeadraceProposer.memory_command`, for `collective_rpc`; {} with another proposer."""
        return {} if self._proposer is None else self._proposer.memory_command(command)

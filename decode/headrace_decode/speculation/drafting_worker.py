"""The worker class that shows our proposer which request is in which row, and when steps begin.

Apart from `headrace_decode._vllm_compat`, since engine processes load this one and have no use for
the server's imports. `tests/unit/test_contracts_speculation.py` pins what is used of vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from headrace_decode.replay.worker import TakingUpWorker
from headrace_decode.speculation.proposer import HeadraceProposer, RunnerView

if current_platform.is_cpu():
    from headrace_decode.speculation.cpu_sampler import CpuRejectionSampler


class SpeculatingWorker(TakingUpWorker):
    """vLLM's worker of the platform, with a line to the proposer.

    Of the workers that share a model only the first one drafts: the scheduler asks no other.
    """

    _proposer: HeadraceProposer | None = None

    def load_model(self, **kwargs: Any) -> None:
        """As vLLM's; then binds the proposer, if it is ours.

        vLLM leaves drafting out, and has every row verify its most zeros, in any step in which one
        row is closer than that to the longest length. Our proposer keeps to that length row by row,
        so the runner takes its length for endless. On CPUs the runner gets a rejection sampler that
        can spread temperatures.
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
        """As vLLM's."""
        if self._proposer is not None:
            self._proposer.step_begins(
                scheduler_output.num_scheduled_tokens,
                scheduler_output.scheduled_spec_decode_tokens,
                scheduler_output.finished_req_ids,
            )
        return super().execute_model(scheduler_output)

    def headrace_speculation(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """`HeadraceProposer.command`, for `collective_rpc`; empty if the proposer is another."""
        return {} if self._proposer is None else self._proposer.command(command)

    def headrace_memory(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """`HeadraceProposer.memory_command`, likewise."""
        return {} if self._proposer is None else self._proposer.memory_command(command)

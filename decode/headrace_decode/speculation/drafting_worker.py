"""The worker class that tells our proposer which request stands in which row, and when steps begin.

Apart from `headrace_decode._vllm_compat`, since engine processes load this one and have no use for
the server's imports. `tests/unit/test_contracts_speculation.py` pins what is used of vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from headrace_decode.speculation.proposer import HeadraceProposer
from headrace_decode.speculation.request import Facts, facts_of
from headrace_decode.speculation.session import Rows, kv_room

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker

    from headrace_decode.speculation.cpu_sampler import CpuRejectionSampler
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class SpeculatingWorker(PlatformWorker):  # type: ignore[misc]
    """vLLM's worker of the platform, with a line to the proposer.

    Of the workers that share a model only the first one drafts: the scheduler asks no other.
    """

    _proposer: HeadraceProposer | None = None

    def load_model(self, **kwargs: Any) -> None:
        """As vLLM's; then binds the proposer, if it is ours.

        vLLM leaves drafting out, and has every row verify its most zeros, in any step in which one
        row is closer than that to the longest length. Our proposer keeps to that length row by row,
        so it is told that its own is endless. On CPUs the runner gets a rejection sampler that can
        spread temperatures.
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


class RunnerView:
    """A model runner as a proposer sees it (`proposer.Engine`)."""

    def __init__(self, runner: Any, draft_tokens: int) -> None:
        self._runner, self._draft_tokens = runner, draft_tokens

    def rows(
        self,
        sampled: Sequence[Sequence[int]],
        num_tokens: NDArray[np.integer],
        token_ids: NDArray[np.integer],
        scheduled: Mapping[str, int],
    ) -> Rows:
        """The batch of the step that has just been sampled.

        Args:
            sampled, num_tokens, token_ids: as vLLM hands them to `propose`.
            scheduled: tokens of each request in this step.
        """
        batch, count = self._runner.input_batch, len(sampled)
        request_ids = batch.req_ids[:count]
        lengths = num_tokens[:count]
        computed = batch.num_computed_tokens_cpu
        prefill = sum(
            max(int(lengths[row]) - int(computed[row]) - scheduled.get(request_ids[row], 0), 0)
            for row, tokens in enumerate(sampled)
            if not tokens
        )
        return Rows(request_ids, sampled, lengths, token_ids, self._kv_tokens(lengths), prefill)

    def facts(self, request_id: str) -> Facts:
        """What a request brings along."""
        request = self._runner.requests[request_id]
        params = request.sampling_params
        return facts_of(
            request.num_prompt_tokens,
            None if params is None else params.max_tokens,
            None if params is None else params.extra_args,
            0.0 if params is None else params.temperature,
        )

    def _kv_tokens(self, num_tokens: NDArray[np.integer]) -> NDArray[np.integer] | None:
        """Room for drafts, by the blocks of the rows in the batch: shared ones count once, those of
        requests outside it not at all."""
        table = self._runner.input_batch.block_table[0]
        blocks = table.num_blocks_per_row[: len(num_tokens)]
        # Block 0 is nobody's. Attention kernels may cut the scheduler's blocks into smaller ones.
        total = (self._runner.kv_cache_config.num_blocks - 1) * table.blocks_per_kv_block
        room = kv_room(
            num_tokens, blocks, table.block_size, total - int(blocks.sum()), self._draft_tokens
        )
        if room is None:
            return None
        held = {int(b) for row, n in enumerate(blocks) for b in table.block_table.np[row, :n]}
        free = total - len(held)
        return kv_room(num_tokens, blocks, table.block_size, free, self._draft_tokens)

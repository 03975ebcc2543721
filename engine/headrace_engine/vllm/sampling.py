"""vLLM's sampling with drafts: the runner's state for a drafter, and rejection samplers.

They correct three faults of vLLM 0.32.

First, an engine with a drafter verifies in every step, also in one without a draft: it copies the
logits once more and computes log-probabilities of the whole vocabulary. And a request that names
the tokens whose log-probabilities it wants (`logprob_token_ids`) does not get them. Here a step
without drafts is sampled as in an engine without a drafter. A step with such a request is sampled
in the same way, and drops the drafts of the others.

Second, on CPUs vLLM spreads a request's temperature, top_k and top_p over its draft tokens with a
function that writes into a copy of its output (`cpu_triton_utils._expand_kernel_impl` converts all
arguments to int64, and back only the input). The logits are then divided by uninitialised memory:
sampled answers follow another distribution, a greedy request in the batch may get a wrong token,
and top_k may crash the engine. Here the three values are applied without that function.

Third, one draft token in a batch costs every row time. All logits are copied once more in case a
request wants log-probabilities, and random numbers are drawn for each row and each word of the
vocabulary, most of them for rows without drafts. On a GPU that is hidden; on a CPU it is as much
arithmetic as several steps. Here it is done only for rows with drafts, or if a request wants
log-probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import (
    PLACEHOLDER_TOKEN_ID,
    RejectionSampler,
    rejection_sample,
)
from vllm.v1.sample.sampler import SamplerOutput


class ScheduledStep(NamedTuple):
    """The part of a step's schedule that a drafter needs.

    Attributes:
        tokens: number of tokens of each request in the step.
        drafts: draft tokens of each request in the step.
        finished: requests that have ended.
    """

    tokens: Mapping[str, int]
    drafts: Mapping[str, Sequence[int]]
    finished: set[str]


class BlockTable(NamedTuple):
    """The KV blocks of the batch's rows in one KV cache group.

    Attributes:
        blocks: int [rows or more, any], block numbers of each row; block 0 stands for blocks that
            have left a window.
        counts: int [rows or more], number of blocks of each row.
        block_tokens: tokens of a block.
        table_size: all block numbers are below this.
        usable_blocks: number of blocks that rows may have in all groups together.
    """

    blocks: NDArray[np.integer]
    counts: NDArray[np.integer]
    block_tokens: int
    table_size: int
    usable_blocks: int


class RunnerState:
    """The requests and KV blocks in the batch of vLLM's model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def request_ids(self, rows: int) -> list[str]:
        """Return the request of each of the first rows."""
        return list(self._runner.input_batch.req_ids[:rows])

    @property
    def computed_tokens(self) -> NDArray[np.integer]:
        """Number of tokens of each row that were computed before the step, int [rows or more]."""
        computed: NDArray[np.integer] = self._runner.input_batch.num_computed_tokens_cpu
        return computed

    def request(self, request_id: str) -> tuple[int, Any]:
        """Return the length of a request's prompt, and its sampling parameters or None."""
        request = self._runner.requests[request_id]
        return request.num_prompt_tokens, request.sampling_params

    def block_tables(self) -> list[BlockTable]:
        """Return the blocks of each KV cache group."""
        size = self._runner.kv_cache_config.num_blocks
        return [
            BlockTable(
                *(table.block_table.np, table.num_blocks_per_row),
                *(table.block_size, size, size - 1),
            )
            for table in self._runner.input_batch.block_table.block_tables
        ]


def scheduled_step(scheduler_output: Any) -> ScheduledStep:
    """Return the part of the scheduler's output that a drafter needs."""
    return ScheduledStep(
        scheduler_output.num_scheduled_tokens,
        scheduler_output.scheduled_spec_decode_tokens,
        scheduler_output.finished_req_ids,
    )


def drafter_of(worker: Any) -> Any:
    """Return the drafter of a worker whose model is loaded; None without one."""
    return getattr(worker.model_runner, "drafter", None)


def prepare_for_drafter(worker: Any) -> None:
    """Have a worker's runner draft near the maximum length, and sample by our samplers.

    In a step in which one row has less than the maximum number of draft tokens left to the maximum
    length, vLLM does not draft, and has every row verify that many zeros. A drafter that respects
    the maximum length row by row does not need this limit, so it is set to infinity.
    """
    runner = worker.model_runner
    runner.effective_drafter_max_model_len = sys.maxsize
    sampler = CpuRejectionSampler if current_platform.is_cpu() else DraftedStepSampler
    runner.rejection_sampler = sampler(runner.sampler, worker.speculative_config, worker.device)


def repeat_draws(runner: Any, generator: torch.Generator, tokens: int) -> None:
    """Draw from the generator of a request with a seed what the runner's sampler drew for its first
    tokens. What a token draws depends on the device."""
    draw = runner.sampler.topk_topp_sampler
    shape = (1, runner.input_batch.vocab_size)
    logits = torch.zeros(shape, dtype=torch.float32, device=runner.device)
    for _ in range(tokens):
        draw(logits, {0: generator}, None, None)


def is_drafting_worker() -> bool:
    """Return whether the scheduler uses the drafts of this worker among those of its model."""
    return bool(get_tp_group().is_first_rank)


class DraftedStepSampler(RejectionSampler):  # type: ignore[misc]
    """vLLM's sampler for steps whose drafts are verified, and its plain sampler for other steps."""

    def forward(
        self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        """Sample a step's tokens, with the interface of vLLM's sampler.

        Args:
            logits: [draft tokens + rows, vocabulary].
        """
        if metadata.max_spec_len and not sampling_metadata.logprob_token_ids:
            return self.verify(metadata, draft_probs, logits, sampling_metadata)
        if metadata.max_spec_len:
            counts = torch.tensor(metadata.num_draft_tokens, device=logits.device)
            logits = logits[metadata.bonus_logits_indices - counts]
        return self.sampler(logits=logits, sampling_metadata=sampling_metadata)

    def verify(
        self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        """Sample and verify the tokens of a step with drafts; arguments as for `forward`."""
        return super().forward(metadata, draft_probs, logits, sampling_metadata)


class CpuRejectionSampler(DraftedStepSampler):
    """A sampler for CPUs that uses vLLM's rules of acceptance and drawing."""

    def verify(
        self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        """Sample and verify the tokens of a step with drafts."""
        wanted = sampling_metadata.max_num_logprobs
        processed = self.is_processed_logprobs_mode
        bonus = self.sampler(
            logits=logits[metadata.bonus_logits_indices],
            sampling_metadata=replace(
                sampling_metadata, max_num_logprobs=None if wanted is None else -1
            ),
            predict_bonus_token=True,
            logprobs_mode_override="processed_logits" if processed else "raw_logits",
        )
        raw = logits[metadata.target_logits_indices].to(torch.float32)
        target = raw if processed or wanted is None else raw.clone()
        target = self.apply_logits_processors(target, sampling_metadata, metadata)
        if not sampling_metadata.all_greedy:
            target = _constrained(target, metadata.num_draft_tokens, sampling_metadata)
        tokens = self._tokens(
            metadata, draft_probs, target, bonus.sampled_token_ids, sampling_metadata
        )
        logprobs = None
        if wanted is not None:
            logprobs = self._get_logprobs_tensors(
                wanted,
                metadata,
                logits,
                target if processed else raw,
                bonus.logprobs_tensors.logprobs,
                tokens,
            )
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def _tokens(
        self,
        metadata: Any,
        draft_probs: Any,
        target: torch.Tensor,
        bonus: torch.Tensor,
        sampling_metadata: Any,
    ) -> torch.Tensor:
        """Return each row's tokens, int32 [rows, longest draft + 1], padded with placeholders.

        Args:
            target: [draft tokens, vocabulary], logits after all processing that requests ask for.
            bonus: [rows, 1], the token after a draft that is accepted whole.
        """
        counts = metadata.num_draft_tokens
        drafted = [row for row, count in enumerate(counts) if count]
        place = {row: at for at, row in enumerate(drafted)}
        generators = sampling_metadata.generators
        temperature = sampling_metadata.temperature
        of_drafted = replace(
            sampling_metadata,
            temperature=None if temperature is None else temperature[drafted],
            generators={place[row]: g for row, g in generators.items() if row in place},
        )
        shape = (len(counts), metadata.max_spec_len + 1)
        tokens = torch.full(shape, PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
        tokens[:, :1] = bonus
        tokens[drafted] = rejection_sample(
            metadata.draft_token_ids,
            [counts[row] for row in drafted],
            metadata.max_spec_len,
            metadata.cu_num_draft_tokens[drafted],
            draft_probs,
            target,
            bonus[drafted],
            of_drafted,
            use_fp64_gumbel=self.use_fp64_gumbel,
        )
        return tokens


def _constrained(
    logits: torch.Tensor, num_draft_tokens: list[int], sampling_metadata: Any
) -> torch.Tensor:
    """Apply temperature, top_k and top_p of each draft token's request to the logits, in place.

    Args:
        logits: [draft tokens, vocabulary].
    """
    counts = torch.tensor(num_draft_tokens)

    def spread(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.repeat_interleave(counts)

    temperature = spread(sampling_metadata.temperature)
    assert temperature is not None
    logits.div_(torch.where(temperature == 0, 1.0, temperature).unsqueeze(-1))
    top_k, top_p = spread(sampling_metadata.top_k), spread(sampling_metadata.top_p)
    return apply_top_k_top_p(logits, top_k, top_p)

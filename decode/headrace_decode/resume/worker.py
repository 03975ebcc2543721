"""A worker with which vLLM's first model runner resumes a request after its earlier output tokens.

That runner knows output tokens only of requests that it has seen. Thus a new request with output
tokens is added to the runner's states here, and then scheduled like a request that was preempted.
The second model runner receives all tokens of a new request, and needs none of this.

`tests/unit/test_contracts_replay.py` checks the parts of vLLM that this module uses.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingType
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from headrace_decode.resume.scheduler import said_by

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class TakingUpWorker(PlatformWorker):  # type: ignore[misc]
    """vLLM's worker for the platform, with support for resumed requests."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step as vLLM does, after preparing its resumed requests."""
        if not self.use_v2_model_runner:
            scheduler_output = self._taking_up(scheduler_output)
        return super().execute_model(scheduler_output)

    def _taking_up(self, step: Any) -> Any:
        """Return the step with new requests that have output tokens as preempted requests."""
        known = self.model_runner.requests
        back = [
            (new, said)
            for new in step.scheduled_new_reqs
            if (said := said_by(new.sampling_params)) and new.req_id not in known
        ]
        if not back:
            return step
        for new, said in back:
            known[new.req_id] = self._state(new, said)
        told = copy.copy(step)
        names = {new.req_id for new, _ in back}
        told.scheduled_new_reqs = [
            new for new in step.scheduled_new_reqs if new.req_id not in names
        ]
        cached = step.scheduled_cached_reqs
        nothing_new: list[list[int]] = [[] for _ in back] if cached.new_token_ids else []
        told.scheduled_cached_reqs = replace(
            cached,
            req_ids=[*cached.req_ids, *(new.req_id for new, _ in back)],
            resumed_req_ids={*cached.resumed_req_ids, *names},
            new_token_ids=[*cached.new_token_ids, *nothing_new],
            all_token_ids={
                **cached.all_token_ids,
                **{new.req_id: [*new.prompt_token_ids, *said] for new, said in back},
            },
            new_block_ids=[*cached.new_block_ids, *(new.block_ids for new, _ in back)],
            num_computed_tokens=[
                *cached.num_computed_tokens,
                *(new.num_computed_tokens for new, _ in back),
            ],
            num_output_tokens=[*cached.num_output_tokens, *(len(said) for _, said in back)],
        )
        return told

    def _state(self, new: Any, said: list[int]) -> CachedRequestState:
        """Return the request's state as if the runner had sampled the earlier tokens itself."""
        runner, params = self.model_runner, new.sampling_params
        generator = None
        if params.sampling_type == SamplingType.RANDOM_SEED:
            generator = torch.Generator(device=runner.device)
            generator.manual_seed(params.seed)
            drawn = torch.empty(
                runner.input_batch.vocab_size, dtype=torch.float32, device=runner.device
            )
            for _ in said:  # vLLM draws like this for each token
                drawn.exponential_(generator=generator)
        state = CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            prompt_embeds=new.prompt_embeds,
            prompt_is_token_ids=new.prompt_is_token_ids,
            mm_features=new.mm_features,
            sampling_params=params,
            pooling_params=None,
            generator=generator,
            block_ids=new.block_ids,
            num_computed_tokens=new.num_computed_tokens,
            output_token_ids=list(said),
            lora_request=new.lora_request,
        )
        if runner.uses_mrope:
            runner._init_mrope_positions(state)
        return state

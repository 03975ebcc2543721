"""vLLM has the parts that resuming streams uses.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from headrace_decode.resume.output_replay import emitted_output, with_resume_tokens
from headrace_decode.resume.scheduler import RESUME_TOKENS, resume_tokens_of
from headrace_engine.vllm.engine_outputs import core_output, logprobs_lists
from tests.support.contracts import assert_fields, assert_takes, find

OUTPUTS = "engine/headrace_engine/vllm/engine_outputs.py"
LLM = "decode/headrace_decode/resume/resumable_llm.py"
SCHEDULER = "engine/headrace_engine/vllm/resumed_requests.py"
WORKER = "engine/headrace_engine/vllm/resumed_requests.py"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"


def test_a_scheduler_takes_requests_and_leads_grammars_as_ours_expects() -> None:
    vllms = "vllm.v1.core.sched.scheduler:Scheduler"
    assert_takes(f"{vllms}.add_request", SCHEDULER, "request")
    assert_takes(f"{vllms}._try_promote_blocked_waiting_request", SCHEDULER, "request")
    manager = "vllm.v1.structured_output:StructuredOutputManager"
    assert_takes(f"{manager}.should_advance", SCHEDULER, "request", "new_token_ids")
    find(f"{manager}.trim_reasoning_for_advance", SCHEDULER)
    find("vllm.v1.request:Request.append_output_token_ids", SCHEDULER)
    source = inspect.getsource(find(f"{vllms}.schedule", SCHEDULER))
    assert "request.num_tokens - num_computed_tokens" in source, f"mend {SCHEDULER}"


def test_the_first_runner_takes_up_what_comes_back_from_a_preemption() -> None:
    assert_fields(
        *("vllm.v1.core.sched.output:CachedRequestData", WORKER),
        *("req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids", "new_block_ids"),
        *("num_computed_tokens", "num_output_tokens"),
    )
    assert_fields(
        *("vllm.v1.core.sched.output:NewRequestData", WORKER),
        *("req_id", "prompt_token_ids", "sampling_params", "block_ids", "num_computed_tokens"),
    )
    assert_fields(
        *("vllm.v1.worker.gpu_input_batch:CachedRequestState", WORKER),
        *("req_id", "prompt_token_ids", "generator", "block_ids", "output_token_ids"),
    )
    source = inspect.getsource(find(f"{RUNNER}._update_states", WORKER))
    for part in ("self.requests[req_id]", "req_state.block_ids = new_block_ids"):
        assert part in source, f"the runner's states have changed: mend {WORKER}"


def test_a_seed_draws_one_row_of_the_vocabulary_a_token() -> None:
    source = inspect.getsource(find("vllm.v1.sample.ops.topk_topp_sampler:random_sample", WORKER))
    assert "q[i].exponential_(generator=generator)" in source, f"mend {WORKER}"


def test_the_frontend_can_be_led() -> None:
    assert_takes(
        *("vllm.v1.engine.async_llm:AsyncLLM._add_request", LLM),
        *("request", "prompt", "parent_req", "index", "queue"),
    )
    processor = "vllm.v1.engine.output_processor:OutputProcessor"
    assert_takes(
        f"{processor}.add_request", LLM, "request", "prompt", "parent_req", "request_index", "queue"
    )
    assert_takes(f"{processor}.process_outputs", OUTPUTS, "engine_core_outputs")
    find(f"{processor}.get_num_unfinished_requests", "headrace_engine/vllm/engine.py")
    for name in ("get_nowait", "put"):
        find(f"vllm.v1.engine.output_processor:RequestOutputCollector.{name}", OUTPUTS)
    find("vllm.outputs:STREAM_FINISHED", LLM)
    fields = {field.name for field in msgspec.structs.fields(EngineCoreOutput)}
    assert {"request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason"} <= fields


def test_only_tokens_that_were_put_there_are_brought_along() -> None:
    params = SamplingParams(max_tokens=9)
    assert resume_tokens_of(params) == resume_tokens_of(None) == []
    told = with_resume_tokens(params, (3, 4))
    assert resume_tokens_of(told) == [3, 4] and not params.extra_args
    assert told.extra_args == {RESUME_TOKENS: [3, 4]}


@pytest.mark.parametrize("likely", [0, 1, 3])
@pytest.mark.parametrize("sampled", [0, 2, 5])
def test_log_probabilities_come_back_as_they_were(likely: int, sampled: int) -> None:
    rng = np.random.default_rng(likely)
    ranked = np.sort(rng.standard_normal(likely + 6).astype(np.float32))[::-1]
    ids = rng.permutation(100)[: likely + 6].astype(np.int32)
    row = [sampled, *range(likely)]  # the engine puts the sampled one first
    core = LogprobsLists(ids[row][None], ranked[row][None], np.array([sampled + 1], np.int32))
    token = int(ids[sampled])
    first = processed(core, token, likely)
    choice = SimpleNamespace(
        index=0, token_ids=[token], logprobs=first.logprobs, finish_reason=None, stop_reason=None
    )
    [emitted] = emitted_output(SimpleNamespace(outputs=[choice]))  # type: ignore[arg-type]
    assert emitted.logprobs is not None
    again = processed(logprobs_lists(emitted.logprobs), token, likely)
    assert again.logprobs == first.logprobs
    assert again.cumulative_logprob == first.cumulative_logprob


def processed(lists: LogprobsLists, token: int, likely: int) -> LogprobsProcessor:
    """A request's log-probabilities after one token."""
    one = LogprobsProcessor(
        tokenizer=None,
        logprobs=[],
        prompt_logprobs=None,
        cumulative_logprob=0.0,
        num_logprobs=likely,
        num_prompt_logprobs=None,
    )
    one.update_from_output(EngineCoreOutput("r", [token], lists))
    return one


def test_a_stop_string_is_left_to_the_frontend_to_find() -> None:
    by_text = core_output("r", (1,), None, "stop", "END")
    by_token = core_output("r", (1,), None, "stop", 7)
    by_length = core_output("r", (1,), None, "length", None)
    assert by_text.finish_reason is None and by_text.stop_reason is None
    assert str(by_token.finish_reason) == "stop" and by_token.stop_reason == 7
    assert str(by_length.finish_reason) == "length"


def test_a_generator_that_drew_again_goes_on_as_the_first_one() -> None:
    def drawn(times: int) -> torch.Generator:
        made = torch.Generator().manual_seed(5)
        row = torch.empty(64)
        for _ in range(times):
            row.exponential_(generator=made)
        return made

    first = torch.Generator().manual_seed(5)
    rows = [torch.empty(64).exponential_(generator=first) for _ in range(4)]
    assert torch.equal(torch.empty(64).exponential_(generator=drawn(3)), rows[3])

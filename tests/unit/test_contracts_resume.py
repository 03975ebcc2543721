"""vLLM has the parts that resuming streams uses.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from headrace_decode.resume.output_replay import emitted_output, with_resume_tokens
from headrace_decode.resume.scheduler import RESUME_TOKENS, resume_tokens_of
from headrace_engine.extensions.scheduler import ExtensibleScheduler
from headrace_engine.vllm.engine_outputs import core_output, logprobs_lists
from headrace_engine.vllm.sampling import repeat_draws
from tests.support.contracts import assert_fields, assert_takes, find
from tests.support.scheduled import Scheduled

OUTPUTS = "engine/headrace_engine/vllm/engine_outputs.py"
LLM = "decode/headrace_decode/resume/resumable_llm.py"
FRONTEND = "engine/headrace_engine/vllm/llm.py"
SCHEDULER = "engine/headrace_engine/vllm/resumed_requests.py"
WORKER = "engine/headrace_engine/vllm/resumed_requests.py"
SAMPLING = "engine/headrace_engine/vllm/sampling.py"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"


def test_a_scheduler_takes_requests_and_leads_grammars_as_ours_expects() -> None:
    vllms = "vllm.v1.core.sched.scheduler:Scheduler"
    assert_takes(f"{vllms}.add_request", SCHEDULER, "request")
    assert_takes(f"{vllms}._handle_blocked_waiting_request", SCHEDULER, "request")
    manager = "vllm.v1.structured_output:StructuredOutputManager"
    assert_takes(f"{manager}.accept_tokens", SCHEDULER, "request", "new_token_ids")
    find("vllm.v1.request:Request.append_output_token_ids", SCHEDULER)
    source = inspect.getsource(find(f"{vllms}.schedule", SCHEDULER))
    assert "request.num_tokens - num_computed_tokens" in source, f"mend {SCHEDULER}"
    assert "self._handle_blocked_waiting_request(request)" in source, f"mend {SCHEDULER}"


def test_a_grammar_has_accepted_a_resumed_requests_tokens_before_its_first_step(
    tmp_path: Path,
) -> None:
    engine = Scheduled(tmp_path, scheduler=ExtensibleScheduler)
    accepted: list[list[int]] = []
    grammar = SimpleNamespace(
        accept_tokens=lambda name, tokens: accepted.append(tokens) or True,
        is_terminated=lambda: False,
        fill_bitmask=lambda bitmask, row: None,
    )
    params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="a+"))
    resumed = Request("r", [5, 6, 7], with_resume_tokens(params, (30, 31)), None)
    engine.scheduler.add_request(resumed)
    engine.step()
    assert engine.steps == [{}], "the grammar is being compiled"
    assert resumed.structured_output_request is not None
    resumed.structured_output_request.grammar = grammar  # type: ignore[assignment]
    engine.step()
    assert engine.steps[-1] == {"r": 5} and accepted == [[30, 31], [30]]
    assert list(resumed.output_token_ids) == [30, 31, 30]
    engine.close()


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


def test_the_frontend_can_be_led() -> None:
    processor = "vllm.v1.engine.output_processor:OutputProcessor"
    assert_takes(
        f"{processor}.add_request", LLM, "request", "prompt", "parent_req", "request_index", "queue"
    )
    state = inspect.getsource(find("vllm.v1.engine.output_processor:RequestState", LLM).__init__)
    for name in ("parent_req", "request_index", "queue"):
        assert f"self.{name} = {name}" in state, f"mend {LLM}"
    for name in ("add_request", "_add_request"):  # several choices, and one
        source = inspect.getsource(find(f"vllm.v1.engine.async_llm:AsyncLLM.{name}", LLM))
        first = source.index("self.output_processor.add_request(")
        assert source.index("await self.engine_core.add_request_async(") > first, f"mend {FRONTEND}"
    assert_takes(f"{processor}.process_outputs", OUTPUTS, "engine_core_outputs")
    source = inspect.getsource(find(f"{processor}.process_outputs", OUTPUTS))
    assert "if self.tracing_enabled:" in source, f"mend {OUTPUTS}"
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


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_generator_that_drew_again_goes_on_as_the_first_one(on_cpu: bool) -> None:
    """GPUs draw a row of the vocabulary for a token, and CPUs a number."""
    draw = TopKTopPSampler()
    draw.forward = draw.forward_cpu if on_cpu else draw.forward_native
    logits = torch.randn(2, 64)
    first, drawn = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    sampled = [draw(logits.clone(), {1: first}, None, None)[0][1].item() for _ in range(12)]
    runner = SimpleNamespace(
        sampler=SimpleNamespace(topk_topp_sampler=draw),
        input_batch=SimpleNamespace(vocab_size=64),
        device="cpu",
    )
    repeat_draws(runner, drawn, 4)
    again = [draw(logits.clone(), {1: drawn}, None, None)[0][1].item() for _ in range(8)]
    assert again == sampled[4:]
    assert torch.equal(first.get_state(), drawn.get_state())


def test_a_runner_samples_each_token_by_the_sampler_that_is_asked_to_draw_again() -> None:
    made = inspect.getsource(find(f"{RUNNER}.__init__", SAMPLING))
    assert "self.sampler = Sampler(" in made, f"mend {SAMPLING}"
    sample = inspect.getsource(find("vllm.v1.sample.sampler:Sampler.sample", SAMPLING))
    assert " ".join(sample.split()).count("self.topk_topp_sampler(") == 1, f"mend {SAMPLING}"
    sampler = "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler"
    for name in ("forward_native", "forward_cpu", "forward_cuda"):
        assert_takes(f"{sampler}.{name}", SAMPLING, "logits", "generators", "k", "p")

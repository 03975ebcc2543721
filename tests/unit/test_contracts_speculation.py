"""What the proposer and its worker class take from vLLM is there, as they expect it.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.test_contracts import assert_fields, assert_takes, find

COMPAT = "decode/headrace_decode/speculation/_vllm_compat.py"
PROPOSER = "decode/headrace_decode/speculation/proposer.py"
SETTINGS = "decode/headrace_decode/speculation/settings.py"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def test_the_worker_class_is_the_platforms_own_with_two_methods_more() -> None:
    worker = find("headrace_decode.speculation._vllm_compat:SpeculatingWorker", COMPAT)
    assert_takes("vllm.v1.worker.gpu_worker:Worker.load_model", COMPAT, "load_dummy_weights")
    assert_takes("vllm.v1.worker.gpu_worker:Worker.execute_model", COMPAT, "scheduler_output")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        assert issubclass(worker, find("vllm.v1.worker.cpu_worker:CPUWorker", COMPAT))


def test_a_custom_class_is_made_and_asked_as_ours_expects() -> None:
    create = "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer"
    assert "user_class(vllm_config)" in inspect.getsource(find(create, PROPOSER))
    source = inspect.getsource(find(f"{RUNNER}.propose_draft_token_ids", PROPOSER))
    at = source.index('== "custom_class"')
    call = " ".join(source[at : at + 600].split())
    assert (
        "propose( sampled_token_ids, self.input_batch.num_tokens_no_spec, "
        "self.input_batch.token_ids_cpu, slot_mappings=slot_mappings, )"
    ) in call, f"propose is called otherwise: mend {PROPOSER}"


def test_drafting_is_left_out_near_a_length_that_can_be_moved() -> None:
    source = inspect.getsource(find(f"{RUNNER}._input_fits_in_drafter", COMPAT))
    assert "self.effective_drafter_max_model_len" in source, f"mend {COMPAT}"
    assert "self.effective_drafter_max_model_len = " in inspect.getsource(
        find(f"{RUNNER}.__init__", COMPAT)
    )


def test_a_step_tells_its_requests_and_drafts() -> None:
    assert_fields(
        "vllm.v1.core.sched.output:SchedulerOutput",
        COMPAT,
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "finished_req_ids",
    )


def test_the_batch_tells_rows_and_blocks() -> None:
    batch = "vllm.v1.worker.gpu_input_batch"
    source = inspect.getsource(find(f"{batch}:InputBatch", COMPAT))
    for name in ("def req_ids", "self.num_computed_tokens_cpu", "self.block_table"):
        assert name in source, f"InputBatch has no {name}: mend {COMPAT}"
    assert_fields(f"{batch}:CachedRequestState", COMPAT, "sampling_params", "prompt_token_ids")
    state = inspect.getsource(find(f"{batch}:CachedRequestState.__post_init__", COMPAT))
    assert "self.num_prompt_tokens" in state, f"mend {COMPAT}"
    table = inspect.getsource(find("vllm.v1.worker.block_table:BlockTable.__init__", COMPAT))
    for name in ("num_blocks_per_row", "blocks_per_kv_block", "block_size", "block_table"):
        assert f"self.{name} = " in table, f"BlockTable has no {name}: mend {COMPAT}"
    find("vllm.v1.worker.block_table:MultiGroupBlockTable.__getitem__", COMPAT)


def test_a_schedule_by_batch_size_keeps_joining_requests_from_being_padded() -> None:
    source = inspect.getsource(find(f"{SCHEDULER}.schedule", SETTINGS))
    condition = "self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None"
    assert condition in source, f"padding is decided otherwise: mend {SETTINGS}"


def test_the_first_worker_of_those_that_share_a_model_is_the_one_that_is_asked() -> None:
    find("vllm.distributed.parallel_state:get_tp_group", COMPAT)
    find("vllm.distributed.parallel_state:GroupCoordinator.is_first_rank", COMPAT)
    executor = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
    source = inspect.getsource(find(f"{executor}.take_draft_token_ids", COMPAT))
    assert "self.output_rank" in source, f"mend {COMPAT}"


def test_requests_extra_arguments_and_additional_configuration_reach_us() -> None:
    find("vllm:SamplingParams", SETTINGS)
    assert "extra_args" in find("vllm:SamplingParams", SETTINGS).__struct_fields__
    assert_fields("vllm.config:VllmConfig", SETTINGS, "additional_config", "compilation_config")


def sampled(sampler: Any, rounds: int) -> tuple[list[int], Counter[int], Counter[int]]:
    """Rows: greedy with a draft, sampled at temperature 0.5 with a draft, top_k 2 with a draft, and
    sampled without one. First tokens of the greedy row, and of the second and third."""
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    rows, vocabulary = 4, 5
    one = torch.tensor(LOGITS).repeat(2 * rows - 1, 1)
    greedy, hot, cut = [], Counter[int](), Counter[int]()
    none = torch.zeros(rows)
    sampling = SamplingMetadata(
        temperature=torch.tensor([0.0, 0.5, 1.0, 1.0]),
        all_greedy=False,
        all_random=False,
        top_p=None,
        top_k=torch.tensor([vocabulary, vocabulary, 2, vocabulary], dtype=torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    for _ in range(rounds):
        drafts = SpecDecodeMetadata.make_dummy([[1], [1], [1], []], torch.device("cpu"))
        ids = sampler(drafts, None, one.clone(), sampling).sampled_token_ids
        greedy.append(int(ids[0, 0]))
        hot[int(ids[1, 0])] += 1
        cut[int(ids[2, 0])] += 1
    return greedy, hot, cut


LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0]


def test_on_cpus_drafted_requests_are_sampled_as_they_asked() -> None:
    """The token in a draft's place has the distribution that the request asked for."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM's own sampler is right on other platforms")
    runner = importlib.import_module("vllm.v1.worker.cpu_model_runner")
    runner.CPUModelRunner._postprocess_triton(None)
    from vllm.v1.sample.sampler import Sampler

    from headrace_decode.speculation._vllm_cpu import CpuRejectionSampler

    torch.manual_seed(0)
    rounds = 1500
    with torch.compiler.set_stance("force_eager"):
        greedy, hot, cut = sampled(CpuRejectionSampler(Sampler()), rounds)
    assert set(greedy) == {0}
    wanted = torch.softmax(torch.tensor(LOGITS) / 0.5, 0).tolist()
    assert [hot[token] / rounds for token in range(5)] == pytest.approx(wanted, abs=0.05)
    both = torch.softmax(torch.tensor(LOGITS[:2]), 0).tolist()
    assert [cut[token] / rounds for token in range(5)] == pytest.approx([*both, 0, 0, 0], abs=0.05)


def test_vllms_own_way_of_spreading_a_temperature_is_still_wrong_on_cpus() -> None:
    """When this fails, vLLM has mended it: drop `_vllm_cpu.py` and its use."""
    source = inspect.getsource(
        find("vllm.utils.cpu_triton_utils:_expand_kernel_impl", "_vllm_cpu.py")
    )
    assert "_ensure_int64(output)" in source
    assert "copy_" not in source


def runner(blocks: list[list[int]], pool_blocks: int) -> Any:
    """A model runner with these KV blocks a row, of 16 tokens, and prompts of 20 tokens."""
    table = np.zeros((len(blocks), 8), np.int32)
    for row, ids in enumerate(blocks):
        table[row, : len(ids)] = ids
    block_table = SimpleNamespace(
        num_blocks_per_row=np.array([len(ids) for ids in blocks]),
        block_size=16,
        blocks_per_kv_block=1,
        block_table=SimpleNamespace(np=table),
    )
    params = SimpleNamespace(max_tokens=9, extra_args={"headrace": {"tenant": "blue"}})
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=[f"r{row}" for row in range(len(blocks))],
            num_computed_tokens_cpu=np.full(len(blocks), 4),
            block_table=[block_table],
        ),
        requests={"r0": SimpleNamespace(num_prompt_tokens=20, sampling_params=params)},
        kv_cache_config=SimpleNamespace(num_blocks=pool_blocks),
    )


def view(blocks: list[list[int]], pool_blocks: int) -> Any:
    from headrace_decode.speculation._vllm_compat import RunnerView

    return RunnerView(runner(blocks, pool_blocks), 8)


def test_a_runner_tells_what_is_left_of_prompts() -> None:
    seen = view([[1, 2], [3, 4]], 100).rows(
        [[5], []], np.array([21, 20]), np.zeros((2, 40)), {"r0": 1, "r1": 10}
    )
    assert seen.request_ids == ["r0", "r1"]
    assert seen.prefill_tokens == 20 - 4 - 10
    assert seen.kv_tokens is None


def test_blocks_that_rows_share_count_once() -> None:
    """Two rows at the end of their last block, 5 blocks of which they hold 3, one of them both."""
    lengths, tokens = np.array([32, 32]), np.zeros((2, 40))
    shared = view([[1, 2], [1, 3]], 6).rows([[5], [5]], lengths, tokens, {})
    assert shared.kv_tokens is None
    apart = view([[1, 2], [3, 4]], 6).rows([[5], [5]], lengths, tokens, {})
    assert apart.kv_tokens.tolist() == [0, 0]


def test_a_request_tells_its_tenant_and_how_long_it_may_get() -> None:
    facts = view([[1]], 10).facts("r0")
    assert (facts.prompt_tokens, facts.max_tokens, facts.tenant) == (20, 9, "blue")

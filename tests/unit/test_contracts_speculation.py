"""What the proposer and its worker class take from vLLM is there, as they expect it.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect

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

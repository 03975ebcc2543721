"""What the proposer and its worker class take from vLLM is there, as they expect it.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.contracts import assert_fields, assert_takes, find

COMPAT = "engine/headrace_engine/vllm/sampling.py"
PROPOSER = "decode/headrace_decode/speculative/proposer.py"
SETTINGS = "decode/headrace_decode/speculative/settings.py"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def test_the_worker_class_is_the_platforms_own_with_two_methods_more() -> None:
    worker = find("headrace_engine.extensions.worker:ExtensibleWorker", COMPAT)
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
    for name in ("num_blocks_per_row", "block_size", "block_table"):
        assert f"self.{name} = " in table, f"BlockTable has no {name}: mend {COMPAT}"
    appended = inspect.getsource(find("vllm.v1.worker.block_table:BlockTable.append_row", COMPAT))
    assert "= block_ids\n" in appended, f"rows no longer have the scheduler's blocks: mend {COMPAT}"
    groups = inspect.getsource(
        find("vllm.v1.worker.block_table:MultiGroupBlockTable.__init__", COMPAT)
    )
    assert "self.block_tables = [" in groups, f"groups no longer have a table each: mend {COMPAT}"


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


LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0]


@pytest.fixture
def eager() -> Iterator[None]:
    """vLLM's kernels for CPUs in place of Triton's, and nothing compiled."""
    import torch
    from vllm.platforms import current_platform

    from headrace_engine.vllm.platforms import let_scan_pass

    if not current_platform.is_cpu():
        pytest.skip("vLLM's own sampler is right on other platforms")
    let_scan_pass()
    current_platform.register_triton_kernel_overrides()
    with torch.compiler.set_stance("force_eager"):
        yield


def sampling(temperature: list[float], **changed: Any) -> Any:
    """vLLM's sampling metadata of a row for each temperature."""
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    rows, greedy = len(temperature), not any(temperature)
    none = torch.zeros(rows)
    fields: dict[str, Any] = {
        "temperature": None if greedy else torch.tensor(temperature),
        "all_greedy": greedy,
        "all_random": all(temperature),
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": none,
        "presence_penalties": none,
        "repetition_penalties": none,
        "output_token_ids": [[] for _ in range(rows)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**(fields | changed))


def drafted(tokens: list[list[int]]) -> Any:
    """A batch with these drafts; each row's logits follow one another, its bonus token's last."""
    import torch
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    metadata = SpecDecodeMetadata.make_dummy(tokens, torch.device("cpu"))
    ends = metadata.cu_num_sampled_tokens.long()
    metadata.bonus_logits_indices = ends - 1
    others = torch.ones(int(ends[-1]), dtype=torch.bool)
    others[ends - 1] = False
    metadata.target_logits_indices = others.nonzero().flatten()
    return metadata


def cpu_rejection_sampler() -> Any:
    from vllm.v1.sample.sampler import Sampler

    from headrace_engine.vllm.sampling import CpuRejectionSampler

    return CpuRejectionSampler(Sampler())


@pytest.mark.usefixtures("eager")
def test_on_cpus_drafted_requests_are_sampled_as_they_asked() -> None:
    """The token in a draft's place has the distribution that the request asked for.

    Rows: greedy with a draft, sampled at temperature 0.5 with a draft, top_k 2 with a draft, and
    sampled without one."""
    import torch

    torch.manual_seed(0)
    rounds, sampler = 1500, cpu_rejection_sampler()
    top_k = torch.tensor([5, 5, 2, 5], dtype=torch.int32)
    asked = sampling([0.0, 0.5, 1.0, 1.0], top_k=top_k)
    greedy, hot, cut, free = (Counter[int]() for _ in range(4))
    for _ in range(rounds):
        logits = torch.tensor(LOGITS).repeat(7, 1)
        ids = sampler(drafted([[1], [1], [1], []]), None, logits, asked).sampled_token_ids
        for count, first in zip((greedy, hot, cut, free), ids[:, 0].tolist(), strict=True):
            count[first] += 1
        assert ids[3, 1] == -1
    assert set(greedy) == {0}

    def wanted(logits: list[float]) -> list[float]:
        shares: list[float] = torch.softmax(torch.tensor(logits), 0).tolist()
        return shares + [0.0] * (5 - len(shares))

    for count, logits in (
        (hot, [2 * logit for logit in LOGITS]),
        (cut, LOGITS[:2]),
        (free, LOGITS),
    ):
        assert [count[t] / rounds for t in range(5)] == pytest.approx(wanted(logits), abs=0.05)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("logprobs", [None, 2])
def test_greedy_requests_get_what_vllms_own_sampler_gives_them(logprobs: int | None) -> None:
    import torch
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    torch.manual_seed(0)
    logits = torch.randn(8, 6)
    best = logits.argmax(1).tolist()
    # Right to the end, wrong from the second on, and none at all.
    drafts = [best[0:2], [best[3], (best[4] + 1) % 6, best[5]], []]
    asked = sampling([0.0, 0.0, 0.0], max_num_logprobs=logprobs)
    ours = cpu_rejection_sampler()(drafted(drafts), None, logits.clone(), asked)
    theirs = RejectionSampler(Sampler())(drafted(drafts), None, logits.clone(), asked)
    assert ours.sampled_token_ids.tolist() == theirs.sampled_token_ids.tolist()
    assert ours.sampled_token_ids[0].tolist() == [*best[:3], -1]
    if logprobs is None:
        assert ours.logprobs_tensors is None
    else:
        assert torch.equal(ours.logprobs_tensors.logprobs, theirs.logprobs_tensors.logprobs)


def rejection_samplers() -> list[Any]:
    from vllm.v1.sample.sampler import Sampler

    from headrace_engine.vllm.sampling import DraftedStepSampler

    return [cpu_rejection_sampler(), DraftedStepSampler(Sampler())]


@pytest.mark.usefixtures("eager")
def test_a_step_without_drafts_is_sampled_as_in_an_engine_without_a_drafter() -> None:
    import torch
    from vllm.v1.sample.sampler import Sampler

    made = inspect.getsource(find(f"{RUNNER}._prepare_inputs", COMPAT))
    assert "use_spec_decode = self.speculative_config is not None" in made, f"mend {COMPAT}"
    logits = torch.randn(2, 6)
    for changed in ({}, {"max_num_logprobs": 3}, {"logprob_token_ids": {1: [3]}}):
        asked = sampling([0.0, 0.0], **changed)
        plain = Sampler()(logits.clone(), asked)
        for sampler in rejection_samplers():
            ours = sampler(drafted([[], []]), None, logits.clone(), asked)
            assert torch.equal(ours.sampled_token_ids, plain.sampled_token_ids)
            assert (ours.logprobs_tensors is None) == (not changed)
            if changed:
                found, wanted = ours.logprobs_tensors, plain.logprobs_tensors
                assert torch.equal(found.logprobs, wanted.logprobs)
                assert torch.equal(found.logprob_token_ids, wanted.logprob_token_ids)


@pytest.mark.usefixtures("eager")
def test_a_request_that_names_tokens_gets_their_log_probabilities_beside_drafts() -> None:
    import torch

    logits = torch.randn(6, 6)
    best = logits.argmax(1).tolist()
    asked = sampling([0.0, 0.0], logprob_token_ids={1: [3, 4]})
    for sampler in rejection_samplers():
        found = sampler(drafted([[5, 5, 5], [2]]), None, logits.clone(), asked)
        assert found.sampled_token_ids.tolist() == [[best[0]], [best[4]]], "one token each"
        logprobs = found.logprobs_tensors
        assert logprobs.logprob_token_ids[1].tolist() == [best[4], 3, 4]
        wanted = logits[4].log_softmax(0)[[best[4], 3, 4]]
        torch.testing.assert_close(logprobs.logprobs[1], wanted)
    runner = inspect.getsource(find(f"{RUNNER}._bookkeeping_sync", COMPAT))
    assert "max_gen_len = sampled_token_ids.shape[-1]" in runner, f"mend {COMPAT}"


@pytest.mark.usefixtures("eager")
def test_a_seeded_request_gets_its_tokens_whoever_runs_beside_it() -> None:
    import torch

    def emitted(beside: list[int]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(7)
        asked = sampling([1.0, 1.0], generators={1: generator})
        ids = []
        for _ in range(20):
            logits = torch.tensor(LOGITS).repeat(len(beside) + 3, 1)
            ids.append(cpu_rejection_sampler()(drafted([beside, [1]]), None, logits, asked))
        return [each.sampled_token_ids[1, :2].tolist() for each in ids]

    assert emitted([]) == emitted([2])


def test_vllms_own_way_of_spreading_a_temperature_is_still_wrong_on_cpus() -> None:
    """When this fails, vLLM has mended it: let `CpuRejectionSampler` use it again."""
    source = inspect.getsource(find("vllm.utils.cpu_triton_utils:_expand_kernel_impl", COMPAT))
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
        block_table=SimpleNamespace(np=table),
    )
    extra = {"headrace": {"tenant": "blue"}}
    params = SimpleNamespace(max_tokens=9, temperature=0.7, extra_args=extra)
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=[f"r{row}" for row in range(len(blocks))],
            num_computed_tokens_cpu=np.full(len(blocks), 4),
            block_table=SimpleNamespace(block_tables=[block_table]),
        ),
        requests={"r0": SimpleNamespace(num_prompt_tokens=20, sampling_params=params)},
        kv_cache_config=SimpleNamespace(num_blocks=pool_blocks),
    )


def view(blocks: list[list[int]], pool_blocks: int) -> Any:
    from headrace_decode.speculative.runner_view import RunnerView

    return RunnerView(runner(blocks, pool_blocks), 8)


def test_a_runner_tells_what_is_left_of_prompts() -> None:
    seen = view([[1, 2], [3, 4]], 100).rows(
        [[5], []], np.array([21, 20]), np.zeros((2, 40)), {"r0": 1, "r1": 10}
    )
    assert seen.request_ids == ["r0", "r1"]
    assert seen.prefill_tokens == 20 - 4 - 10
    assert seen.kv_headroom is None


def test_blocks_that_rows_share_count_once() -> None:
    """Two rows at the end of their last block, 5 blocks of which they hold 3, one of them both."""
    lengths, tokens = np.array([32, 32]), np.zeros((2, 40))
    shared = view([[1, 2], [1, 3]], 6).rows([[5], [5]], lengths, tokens, {})
    assert shared.kv_headroom is None
    apart = view([[1, 2], [3, 4]], 6).rows([[5], [5]], lengths, tokens, {})
    assert apart.kv_headroom.tolist() == [0, 0]


def test_a_request_tells_its_tenant_how_long_it_may_get_and_that_it_is_sampled() -> None:
    facts = view([[1]], 10).request_info("r0")
    assert (facts.prompt_tokens, facts.max_tokens, facts.tenant) == (20, 9, "blue")
    assert facts.temperature

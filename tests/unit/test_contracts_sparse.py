"""What sparse attention needs of vLLM is there, as it expects it.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.utils import select_common_block_size

from headrace_decode.attention.calibration_file import ModelShape
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.attention_backend import worker
from headrace_decode.attention_backend.cpu import SparseBackend
from headrace_decode.attention_backend.extension import AttentionExtension
from headrace_decode.attention_backend.runtime import RUNTIME
from headrace_engine.extensions.worker import WorkerWithExtensions
from headrace_engine.vllm.attention.cpu import (
    CPUAttentionBackend,
    register_cpu_backend,
    unsupported_cpu_engine,
)
from headrace_engine.vllm.attention.layers import model_fields, unsupported_kv_cache
from headrace_engine.vllm.scheduling import requests_moved
from tests.support.contracts import assert_fields, assert_takes, find
from tests.support.tiny import tiny_llama

COMPAT = "engine/headrace_engine/vllm/attention/cpu.py"
BACKEND = "decode/headrace_decode/attention_backend/cpu.py"
WORKER = "decode/headrace_decode/attention_backend/worker.py"
CPU = "vllm.v1.attention.backends.cpu_attn"


def test_the_cpu_backend_can_be_overridden_and_is_looked_up_by_its_name() -> None:
    register_cpu_backend(worker.BACKEND)
    try:
        assert AttentionBackendEnum.CPU_ATTN.get_class() is SparseBackend
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
    assert SparseBackend.get_name() == "CPU_ATTN"
    platform = inspect.getsource(
        find("vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls", COMPAT)
    )
    assert "AttentionBackendEnum.CPU_ATTN.get_path()" in platform, f"mend {COMPAT}"


@pytest.mark.parametrize("page", [16, 32])
def test_the_kernels_block_is_a_page_while_the_schedulers_is_128(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RUNTIME, "page_tokens", page)
    assert select_common_block_size(128, [SparseBackend]) == page, f"mend {BACKEND}"


def test_the_builder_and_the_layers_attention_are_what_we_subclass() -> None:
    builder = f"{CPU}:CPUAttentionMetadataBuilder"
    assert_takes(
        f"{builder}.build", BACKEND, "common_prefix_len", "common_attn_metadata", "fast_build"
    )
    made = inspect.getsource(find(f"{builder}.__init__", BACKEND))
    for name in ("num_kv_heads", "num_heads", "head_dim", "dtype", "block_size", "isa"):
        assert f"self.{name} = " in made, f"no {name}: mend {BACKEND}"
    impl = f"{CPU}:CPUAttentionBackendImpl"
    assert_takes(
        *(f"{impl}.forward", BACKEND, "layer", "query", "key", "value", "kv_cache"),
        *("attn_metadata", "output", "output_scale", "output_block_scale"),
    )
    for name in ("sinks", "alibi_slopes", "logits_soft_cap", "scale"):
        assert f"self.{name} = " in inspect.getsource(find(f"{impl}.__init__", COMPAT))
    assert_fields(f"{CPU}:CPUAttentionMetadata", BACKEND, "seq_lens", "scheduler_metadata")


def test_the_kernel_and_its_schedule_take_requests_of_our_own() -> None:
    assert_takes(
        *("vllm._custom_ops:cpu_attn_get_scheduler_metadata", COMPAT, "num_reqs", "num_heads"),
        *("num_kv_heads", "head_dim", "seq_lens", "dtype", "query_start_loc", "causal"),
        *("sliding_window_size", "isa", "enable_kv_split"),
    )
    assert_takes(
        *("vllm._custom_ops:cpu_attention_with_kv_cache", COMPAT, "query", "key_cache"),
        *("value_cache", "output", "query_start_loc", "seq_lens", "scale", "causal"),
        *("alibi_slopes", "sliding_window", "block_table", "softcap", "scheduler_metadata"),
        "s_aux",
    )


def test_metadata_is_built_within_a_step_and_rows_of_others_are_marked() -> None:
    runner = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
    build = inspect.getsource(find(f"{runner}._build_attention_metadata", COMPAT))
    for part in ("seq_lens=self.seq_lens", "query_start_loc=self.query_start_loc", "num_reqs="):
        assert part in build, f"mend {BACKEND}"
    drafting = inspect.getsource(
        find("vllm.v1.attention.backend:AttentionMetadataBuilder.build_for_drafting", BACKEND)
    )
    assert "fast_build=True" in drafting, f"mend {BACKEND}"
    fields = find("vllm.v1.worker.gpu_input_batch:CachedRequestState", COMPAT).__annotations__
    assert {"sampling_params", "prompt_token_ids", "block_ids"} <= set(fields)
    assert hasattr(find("vllm.v1.worker.gpu_input_batch:InputBatch", COMPAT), "req_ids")
    state = find("vllm.v1.worker.gpu_input_batch:CachedRequestState.__post_init__", COMPAT)
    assert "self.num_prompt_tokens" in inspect.getsource(state)


def test_a_step_says_which_requests_have_new_blocks() -> None:
    output = "vllm.v1.core.sched.output"
    assert_fields(
        *(f"{output}:SchedulerOutput", COMPAT, "scheduled_new_reqs", "scheduled_cached_reqs"),
        *("finished_req_ids", "preempted_req_ids"),
    )
    assert_fields(f"{output}:CachedRequestData", COMPAT, "resumed_req_ids")
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new")],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"back"}),
        finished_req_ids={"done"},
        preempted_req_ids=None,
    )
    assert requests_moved(step) == {"new", "back", "done"}


def test_the_settings_reach_the_worker() -> None:
    assert "additional_config" in find("vllm.engine.arg_utils:EngineArgs", WORKER).__annotations__
    assert "additional_config" in find("vllm.config:VllmConfig", WORKER).__annotations__


def config(**changed: Any) -> Any:
    """Of an engine that can attend sparsely, but for what is changed."""
    facts: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "use_mla": False,
        "sliding_window": None,
        "cache_dtype": "auto",
        "block_size": 128,
        "head_size": 64,
        "dtype": torch.bfloat16,
        "v2": False,
        **changed,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=facts["use_mla"],
            is_hybrid=False,
            is_encoder_decoder=False,
            dtype=facts["dtype"],
            get_sliding_window=lambda: facts["sliding_window"],
            get_head_size=lambda: facts["head_size"],
        ),
        cache_config=SimpleNamespace(
            cache_dtype=facts["cache_dtype"], block_size=facts["block_size"]
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=facts["tensor_parallel_size"],
            pipeline_parallel_size=facts["pipeline_parallel_size"],
        ),
        use_v2_model_runner=facts["v2"],
    )


def test_an_engine_of_a_plain_model_attends_sparsely() -> None:
    if torch.cpu._is_amx_tile_supported():
        assert "amx" in str(unsupported_cpu_engine(config(), 32))
    else:
        assert unsupported_cpu_engine(config(), 32) is None
    assert unsupported_cpu_engine(config(), 16) is None
    assert unsupported_cpu_engine(config(tensor_parallel_size=2), 16) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"use_mla": True}, "MLA"),
        ({"sliding_window": 512}, "sliding window"),
        ({"cache_dtype": "fp8"}, "quantised"),
        ({"v2": True}, "second model runner"),
        ({"block_size": 80}, "block_size 80"),
        ({"head_size": 72}, "heads of 72"),
    ],
)
def test_what_an_engine_lacks_is_named(changed: dict[str, Any], named: str) -> None:
    assert named in str(unsupported_cpu_engine(config(**changed), 32))


def test_an_instruction_set_whose_order_of_keys_is_not_known_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compat = "headrace_engine.vllm.attention.cpu._get_attn_isa"
    monkeypatch.setattr(compat, lambda *arguments: "amx")
    assert "order of keys for amx is not known" in str(unsupported_cpu_engine(config(), 32))


def test_several_cache_groups_are_named() -> None:
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace())] * 2
    cache: Any = SimpleNamespace(kv_cache_groups=groups)
    assert "KV cache groups" in str(unsupported_kv_cache(cache))


class PlainWorker:
    """Stands for vLLM's."""

    def __init__(self, additional: dict[str, Any], **changed: Any) -> None:
        self.vllm_config = config(**changed)
        self.vllm_config.additional_config = additional
        self.loaded = 0

    def load_model(self, **kwargs: Any) -> None:
        self.loaded += 1

    def execute_model(self, step: Any) -> Any:
        return step


class Worker(WorkerWithExtensions, PlainWorker):
    pass


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has no other extension."""
    monkeypatch.setattr(
        "headrace_engine.extensions.worker.installed_extensions", lambda: [AttentionExtension()]
    )


@pytest.mark.parametrize(
    ("additional", "changed", "said"),
    [
        ({}, {}, False),
        (SparseSettings().additional_config(), {"cache_dtype": "fp8"}, True),
    ],
)
def test_an_engine_without_it_has_vllms_own_backend_and_says_why(
    additional: dict[str, Any],
    changed: dict[str, Any],
    said: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Worker(additional, **changed)
    one.load_model()
    assert one.loaded == 1 and not AttentionBackendEnum.CPU_ATTN.is_overridden()
    assert ("attends densely: KV is quantised (fp8)" in caplog.text) == said
    assert one.execute_model("step") == "step" and not RUNTIME.in_step


def test_vllm_and_the_models_folder_tell_the_same_shape() -> None:
    config: Any = SimpleNamespace(model_config=ModelConfig(str(tiny_llama())))
    its = json.loads((tiny_llama() / "config.json").read_text("utf-8"))
    assert ModelShape.of(model_fields(config)) == ModelShape.of(its), f"mend {COMPAT}"


def test_vllms_kernels_for_gpus_take_one_kv_heads_tables() -> None:
    mend = "engine/headrace_engine/vllm/attention/paged_kernels.py"
    assert_takes(
        "vllm.v1.attention.ops.triton_unified_attention:unified_attention",
        mend,
        *("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k"),
        *("softmax_scale", "causal", "window_size", "block_table", "softcap", "q_descale"),
        *("k_descale", "v_descale", "seq_threshold_3D", "num_par_softmax_segments"),
        *("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"),
    )
    find("vllm.v1.attention.backends.fa_utils:get_flash_attn_version", mend)

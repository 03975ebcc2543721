"""What sparse attention on CUDA GPUs needs of vLLM is there, as it expects it.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import select_common_block_size

pytest.importorskip("triton")

from headrace_decode.attention.batch import BatchRow, batch_row
from headrace_decode.attention.calibration_file import ModelShape
from headrace_decode.attention.offload.block_manager import OffloadSpec
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.attention_backend import cuda_runtime, worker
from headrace_decode.attention_backend.cuda import SparseBackend, SparseBuilder, SparseImpl
from headrace_decode.attention_backend.cuda_runtime import CudaSparseRuntime
from headrace_decode.attention_backend.extension import AttentionExtension
from headrace_decode.attention_backend.runtime import RUNTIME
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.engine.calibration import Calibration, write
from headrace_decode.sparse.kernels.page_selection import MAX_PAGES
from headrace_decode.sparse.summaries import RANK_BESIDE
from headrace_decode.sparse.summary_layout import SummaryLayout
from headrace_engine.extensions.scheduler import ExtensibleScheduler
from headrace_engine.extensions.worker import WorkerWithExtensions
from headrace_engine.vllm.attention import cuda as attention_cuda
from headrace_engine.vllm.worker import FollowedRows
from tests.support.contracts import assert_fields, assert_takes, find

COMPAT = "engine/headrace_engine/vllm/attention/cuda.py"
BACKEND = "decode/headrace_decode/attention_backend/cuda.py"
TRITON = "vllm.v1.attention.backends.triton_attn"
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def card_of_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(has_device_capability=lambda least: least <= 90)
    monkeypatch.setattr(attention_cuda, "current_platform", platform)
    monkeypatch.setattr(RUNTIME, "page_tokens", 32)


@pytest.fixture
def file(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    shapes = [(2, 32), (2, 32, 8), (2, 8, 32)]
    bases = [Basis(*(rng.normal(size=s).astype(np.float32) for s in shapes)) for _ in range(2)]
    path = tmp_path / "model.safetensors"
    write(path, Calibration("m", ModelShape.of(MODEL), 32, {0.1: 0.01}, 0.02, 0.1), bases)
    return str(path)


def config(**changed: Any) -> Any:
    """Of an engine on a GPU that can attend sparsely, but for what is changed."""
    facts: dict[str, Any] = {
        **{"tensor_parallel_size": 1, "sliding_window": None, "cache_dtype": "auto"},
        **{"backend": None, "backend_per_kind": {}, "block_size": None, "head_size": 32},
        **{"max_model_len": 131072, "speculative": None, "enable_dbo": False},
        **{"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE, **changed},
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=False,
            is_hybrid=False,
            is_encoder_decoder=False,
            get_sliding_window=lambda: facts["sliding_window"],
            get_head_size=lambda: facts["head_size"],
            max_model_len=facts["max_model_len"],
            hf_text_config=SimpleNamespace(to_dict=lambda: MODEL),
        ),
        cache_config=SimpleNamespace(
            cache_dtype=facts["cache_dtype"],
            block_size=facts["block_size"] or 16,
            user_specified_block_size=facts["block_size"] is not None,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=facts["tensor_parallel_size"], enable_dbo=facts["enable_dbo"]
        ),
        attention_config=SimpleNamespace(
            backend=facts["backend"], backend_per_kind=facts["backend_per_kind"]
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=facts["cudagraph_mode"]),
        speculative_config=facts["speculative"],
    )


def test_vllms_custom_backend_is_ours_once_it_is_registered() -> None:
    one = config()
    attention_cuda.register_cuda_backend(one, cuda_runtime.BACKEND)
    try:
        assert one.attention_config.backend.get_class() is SparseBackend
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
    assert AttentionBackendEnum[SparseBackend.get_name()] is AttentionBackendEnum.CUSTOM
    for name in ("backend", "backend_per_kind"):
        assert_fields("vllm.config:AttentionConfig", COMPAT, name)
    assert_fields("vllm.config:CacheConfig", COMPAT, "user_specified_block_size")
    assert_fields("vllm.config:ParallelConfig", COMPAT, "enable_dbo")


@pytest.mark.parametrize("page", [16, 32])
def test_the_schedulers_block_becomes_the_page(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUNTIME, "page_tokens", page)
    assert SparseBackend.get_preferred_block_size(16) == page, f"mend {BACKEND}"
    assert select_common_block_size(page, [SparseBackend]) == page, f"mend {BACKEND}"


def test_vllm_takes_the_backend_for_plain_models() -> None:
    plain: dict[str, Any] = {
        **{"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None},
        **{"use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False},
        **{"use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0)},
        **{"attn_type": "decoder", "use_kv_connector": True},
    }
    assert SparseBackend.validate_configuration(**plain) == []
    assert SparseBackend.validate_configuration(**plain | {"block_size": 64}) == [
        "block_size not supported"
    ]


def test_cuda_graphs_become_piecewise() -> None:
    assert SparseBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER  # type: ignore[arg-type]
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    found = compilation.resolve_cudagraph_mode_and_sizes(AttentionCGSupport.NEVER, "ours")
    assert found is CUDAGraphMode.PIECEWISE, f"mend {BACKEND}"


def test_the_builder_and_the_layers_attention_are_what_we_subclass() -> None:
    builder = f"{TRITON}:TritonAttentionMetadataBuilder"
    assert_takes(
        f"{builder}.build", BACKEND, "common_prefix_len", "common_attn_metadata", "fast_build"
    )
    assert_takes(
        *(f"{TRITON}:TritonAttentionImpl.forward", BACKEND, "layer", "query", "key", "value"),
        *("kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale"),
    )
    assert_fields(f"{TRITON}:TritonAttentionMetadata", BACKEND, "seq_lens")
    given = (4, 32, 1.0, 2, None, None, "auto")
    assert not SparseImpl(*given).fused_output_quant_supported(None)
    made = inspect.getsource(find(f"{TRITON}:TritonAttentionImpl.__init__", BACKEND))
    for name in ("sinks", "alibi_slopes", "logits_soft_cap", "scale"):
        assert f"self.{name} = " in made, f"mend {COMPAT}"


def test_both_runners_tell_the_host_how_long_rows_are() -> None:
    for build in (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
        "vllm.v1.worker.gpu.attn_utils:build_attn_metadata",
    ):
        source = inspect.getsource(find(build, BACKEND))
        assert "seq_lens_cpu_upper_bound=seq_lens_cpu_upper_bound" in source, f"mend {BACKEND}"
    worker_class = "vllm.v1.worker.gpu_worker:Worker"
    for name in ("determine_available_memory", "get_kv_cache_spec", "initialize_from_config"):
        find(f"{worker_class}.{name}", "decode/headrace_decode/attention_backend/worker.py")


def test_the_second_runners_rows_follow_from_the_schedulers_steps() -> None:
    def step(
        new: Any = (), tokens: Any = (), gone: Any = (), preempted: Any = None, more: Any = ()
    ) -> Any:
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name,
                    sampling_params=SimpleNamespace(extra_args={"sparse": share}),
                    prompt_len=9,
                    block_ids=([7, 8],),
                )
                for name, share in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _ in more], new_block_ids=[blocks for _, blocks in more]
            ),
            num_scheduled_tokens=dict(tokens),
            finished_req_ids=set(gone),
            preempted_req_ids=preempted,
        )

    rows = FollowedRows(batch_row)
    rows.begin_step(step([("a", 0.1), ("b", 1.0)], [("a", 9), ("b", 5)]))
    assert rows.rows() == [BatchRow("b", None, 9), BatchRow("a", 0.1, 9)], "the shorter first"
    grown = [("a", ([4],)), ("b", None)]
    rows.begin_step(step([("c", 0.2)], [("a", 1), ("c", 9)], more=grown))
    assert (rows.blocks("a"), rows.blocks("b"), rows.blocks("c")) == ([7, 8, 4], [7, 8], [7, 8])
    rows.begin_step(step((), [("a", 1), ("c", 9)], gone={"b"}))
    assert [row.request_id for row in rows.rows()] == ["a", "c"]
    rows.begin_step(step((), [("c", 1)], preempted={"a"}))
    assert [row.request_id for row in rows.rows()] == ["c"] and rows.blocks("a") == [7, 8, 4]
    rows.begin_step(step([("a", 0.3)], [("a", 9), ("c", 1)]))
    assert rows.rows()[1] == BatchRow("a", 0.3, 9) and rows.blocks("a") == [7, 8], "it came back"
    runner = "vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state"
    mend = "engine/headrace_engine/vllm/worker.py"
    source = inspect.getsource(find(runner, mend))
    assert "req_ids = sort_batch_req_ids(" in source, f"mend {mend}"
    update = "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests"
    assert "req_new_block_ids, overwrite=False" in inspect.getsource(find(update, mend))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sliding_window": 512}, "sliding window"),
        ({"cache_dtype": "fp8"}, "quantised"),
        ({"backend": AttentionBackendEnum.FLASH_ATTN}, "attention_backend FLASH_ATTN"),
        ({"backend_per_kind": {"full": AttentionBackendEnum.TRITON_ATTN}}, "each kind"),
        ({"block_size": 64}, "block_size 64"),
        ({"head_size": 80}, "heads of 80"),
        ({"max_model_len": 2**21}, "max_model_len 2097152"),
        ({"speculative": SimpleNamespace(method="eagle3")}, "eagle3"),
        ({"enable_dbo": True}, "enable_dbo"),
        ({"cudagraph_mode": CUDAGraphMode.FULL}, "cudagraph_mode is FULL"),
    ],
)
def test_what_an_engine_on_a_gpu_lacks_is_named(changed: dict[str, Any], named: str) -> None:
    assert named in str(attention_cuda.unsupported_cuda_engine(config(**changed), 32, MAX_PAGES))


def test_an_engine_of_a_plain_model_on_a_gpu_attends_sparsely(file: str) -> None:
    draft = SimpleNamespace(method="custom_class")
    assert (
        attention_cuda.unsupported_cuda_engine(
            config(block_size=32, speculative=draft), 32, MAX_PAGES
        )
        is None
    )
    found, why = CudaSparseRuntime.of(config(), SparseSettings(calibration=file))
    assert why is None and found is not None
    assert (found.heads, found.max_pages, len(found.bases)) == (4, 4096, 2)


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(has_device_capability=lambda least: least <= 75)
    monkeypatch.setattr(attention_cuda, "current_platform", platform)
    assert "compute capability" in str(
        attention_cuda.unsupported_cuda_engine(config(), 32, MAX_PAGES)
    )


class PlainWorker:
    """Stands for vLLM's."""

    device = "cpu"

    def __init__(self, settings: SparseSettings) -> None:
        self.vllm_config = config()
        self.vllm_config.additional_config = settings.additional_config()

    def load_model(self, **kwargs: Any) -> None:
        self.backend = self.vllm_config.attention_config.backend

    def get_kv_cache_spec(self) -> dict[str, Any]:
        page = 2 * 2 * 32 * 32 * 2
        return {"layer": SimpleNamespace(block_size=32, page_size_bytes=page)}

    def determine_available_memory(self) -> int:
        return 2**33


class Worker(WorkerWithExtensions, PlainWorker):
    pass


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has no other extension."""
    monkeypatch.setattr(
        "headrace_engine.extensions.worker.installed_extensions", lambda: [AttentionExtension()]
    )


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(worker, "runs_on_cuda", lambda: True)
    yield
    AttentionBackendEnum.CUSTOM.clear_override()


@pytest.mark.usefixtures("on_cuda")
def test_a_worker_on_a_gpu_takes_the_custom_backend_and_leaves_memory_to_summaries(
    file: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = Worker(SparseSettings(calibration=file))
    one.load_model()
    assert one.backend is AttentionBackendEnum.CUSTOM
    assert 0.93 * 2**33 < one.determine_available_memory() < 0.97 * 2**33
    assert list(one.get_kv_cache_spec()) == ["layer"]
    assert not caplog.text


SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float16)


@pytest.fixture
def offloading(file: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a worker that offloads so many GiB."""
    monkeypatch.setattr(worker, "attention_modules", lambda config, specs: [])
    monkeypatch.setattr(PlainWorker, "get_kv_cache_spec", lambda self: {"0": SPEC, "1": SPEC})

    def make(gib: float) -> Any:
        one = Worker(SparseSettings(calibration=file, offload_gib=gib))
        one.vllm_config.scheduler_config = SimpleNamespace(
            get_scheduler_cls=lambda: ExtensibleScheduler
        )
        one.load_model()
        return one

    return make


@pytest.mark.usefixtures("on_cuda")
def test_a_worker_on_a_gpu_offloads_and_leaves_memory_to_what_that_takes(
    offloading: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    one, plain = offloading(1.0), offloading(0.0)
    specs = one.get_kv_cache_spec()
    assert {type(spec) for spec in specs.values()} == {OffloadSpec} and not caplog.text
    assert {type(spec) for spec in plain.get_kv_cache_spec().values()} == {FullAttentionSpec}
    [part] = one.parts
    host_pages = 2**30 // (2 * SPEC.page_size_bytes)
    assert part.host_blocks == host_pages
    taken = plain.determine_available_memory() - one.determine_available_memory()
    summary = SummaryLayout(32, 32, RANK_BESIDE, 8).nbytes
    least = 2 * host_pages * 2 * summary + 2 * 4096 * SPEC.page_size_bytes
    assert least < taken < 1.5 * least, "summaries, and two buffers of a layer"
    order = inspect.getsource(find("vllm.v1.engine.core:EngineCore._initialize_kv_caches", BACKEND))
    assert order.index("get_kv_cache_specs()") < order.index("determine_available_memory()"), (
        "the bytes of the cache depend on the specs"
    )


@pytest.mark.usefixtures("on_cuda")
def test_host_memory_that_the_gpu_cannot_reach_is_named_and_kv_stays_in_the_cache(
    offloading: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(size_bytes: int, device: torch.device) -> torch.Tensor:
        raise MemoryError(f"{size_bytes} bytes of host memory cannot be registered")

    monkeypatch.setattr(worker, "allocate_pinned", fails)
    caplog.set_level(logging.WARNING)  # vLLM's application sets another one for its process
    one = offloading(1.0)
    assert one.get_kv_cache_spec() == {"0": SPEC, "1": SPEC}
    assert "1073741824 bytes of host memory cannot be registered" in caplog.text
    assert list(one.headrace_unsupported()) == ["offload"]


@pytest.mark.usefixtures("on_cuda")
def test_offloading_that_leaves_no_memory_for_kv_ends_the_start_by_name(
    offloading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainWorker, "determine_available_memory", lambda self: 2**26)
    one = offloading(1.0)
    one.get_kv_cache_spec()
    with pytest.raises(RuntimeError, match="Lower offload_gib or max_model_len"):
        one.determine_available_memory()


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("calibration", "why"),
    [(None, "set techniques.sparse.calibration"), ("/none", "/none: it cannot be read")],
)
def test_a_worker_on_a_gpu_without_a_basis_attends_densely_and_says_so(
    calibration: str | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    one = Worker(SparseSettings(calibration=calibration))
    one.load_model()
    assert one.backend is None and one.determine_available_memory() == 2**33
    assert f"{why}" in caplog.text and "attends densely" in caplog.text

"""A worker on a GPU takes compressed requests, or says by name why not."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.scheduler import Scheduler

pytest.importorskip("triton")

from headrace_decode.attention.offload.block_manager import CompressionSpec
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.attention_backend import worker
from headrace_decode.attention_backend.cuda_runtime import compression_bytes
from headrace_decode.attention_backend.extension import AttentionExtension
from headrace_decode.attention_backend.runtime import RUNTIME
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_engine.extensions.scheduler import ExtensibleScheduler
from headrace_engine.extensions.worker import WorkerWithExtensions
from headrace_engine.rope import Rope
from headrace_engine.vllm.attention import cuda as attention_cuda
from headrace_engine.vllm.scheduling import FullAttentionSpec
from tests.unit.test_contracts_sparse_device import config, file

__all__ = ["file"]

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
AVAILABLE = 2**33


class PlainWorker:
    """Stands for vLLM's."""

    def __init__(
        self, sparse: SparseSettings, scheduler: type = ExtensibleScheduler, **changed: Any
    ) -> None:
        self.vllm_config = config(**changed)
        self.vllm_config.model_config.get_num_attention_heads = lambda parallel: 4
        self.vllm_config.scheduler_config = SimpleNamespace(get_scheduler_cls=lambda: scheduler)
        compression = CompressionSettings(keep_ratio=0.25)
        self.vllm_config.additional_config = (
            sparse.additional_config() | compression.additional_config()
        )

    def load_model(self, **kwargs: Any) -> None:
        self.backend = self.vllm_config.attention_config.backend

    def get_model(self) -> None:
        return None

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {f"layer {number}": SPEC for number in range(2)}

    def determine_available_memory(self) -> int:
        return AVAILABLE


class Worker(WorkerWithExtensions, PlainWorker):
    pass


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """On an H100, and the engine has no other extension."""
    platform = SimpleNamespace(has_device_capability=lambda least: least <= 90)
    monkeypatch.setattr(attention_cuda, "current_platform", platform)
    monkeypatch.setattr(worker, "runs_on_cuda", lambda: True)
    monkeypatch.setattr(worker, "attention_modules", lambda config, specs: [])
    monkeypatch.setattr(worker, "rope_of", lambda *engine: (Rope(torch.ones(16)), None))
    monkeypatch.setattr(RUNTIME, "page_tokens", 32)
    monkeypatch.setattr(
        "headrace_engine.extensions.worker.installed_extensions", lambda: [AttentionExtension()]
    )
    yield
    AttentionBackendEnum.CUSTOM.clear_override()


def test_contexts_are_compressed_without_a_basis_and_memory_is_left_to_it() -> None:
    one = Worker(SparseSettings("off"))
    one.load_model()
    assert one.backend is AttentionBackendEnum.CUSTOM and one.headrace_unsupported() == {}
    specs = one.get_kv_cache_spec()
    assert {type(spec) for spec in specs.values()} == {CompressionSpec}
    left = AVAILABLE - one.determine_available_memory()
    assert left == compression_bytes(one.vllm_config, specs, 0.25)
    kv = 131072 * 2 * SPEC.page_size_bytes // 32
    assert 0.25 * kv < left < 10 * kv, "heads are small here: attention takes more than KV"


def test_a_missing_basis_is_told_of_sparse_attention_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    one = Worker(SparseSettings("request"))
    one.load_model()
    [(name, why)] = one.headrace_unsupported().items()
    assert name == "sparse" and "set techniques.sparse.calibration" in why
    assert "techniques.sparse: requests attend to all KV" in caplog.text
    assert type(one.get_kv_cache_spec()["layer 0"]) is CompressionSpec


def test_both_techniques_share_the_memory(file: str) -> None:
    sparse, both = SparseSettings(calibration=file), []
    for compresses in (True, False):
        one = Worker(sparse)
        if not compresses:
            one.vllm_config.additional_config = sparse.additional_config()
        one.load_model()
        one.get_kv_cache_spec()
        both.append(one.determine_available_memory())
        one.vllm_config.attention_config.backend = None
    assert 0 < both[0] < both[1] < AVAILABLE


def test_a_prefill_engine_beside_such_engines_has_their_blocks() -> None:
    one = Worker(SparseSettings("off"))
    one.vllm_config.additional_config = SparseSettings("off").additional_config()
    one.load_model()
    assert one.backend is AttentionBackendEnum.CUSTOM and one.headrace_unsupported() == {}
    assert one.get_kv_cache_spec()["layer 0"] is SPEC
    assert one.determine_available_memory() == AVAILABLE


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is above 1"),
        ({"scheduler": Scheduler}, "runs with scheduler_cls vllm.v1.core.sched"),
        ({"cudagraph_mode": CUDAGraphMode.FULL}, "cudagraph_mode is FULL"),
        ({"cache_dtype": "fp8"}, "quantised"),
        ({"block_size": 64}, "block_size 64 is not the page"),
    ],
)
def test_an_engine_that_cannot_drop_kv_stays_vllms_and_says_why(
    changed: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = Worker(SparseSettings("off"), **changed)
    one.load_model()
    assert one.backend is None and why in one.headrace_unsupported()["compression"]
    assert one.get_kv_cache_spec()["layer 0"] is SPEC
    assert one.determine_available_memory() == AVAILABLE
    assert why in caplog.text


def test_an_engine_whose_layers_drop_nothing_after_all_does_not_start() -> None:
    """The scheduler would take blocks away that the worker attends to."""
    one = Worker(SparseSettings("off"))
    one.load_model()
    one.get_kv_cache_spec()
    group = SimpleNamespace(kv_cache_spec=replace(SPEC), layer_names=["layer 0", "layer 1"])
    [part] = one.parts
    with pytest.raises(RuntimeError, match="cannot offload or drop KV: its KV cache groups"):
        part.after_kv_cache(SimpleNamespace(kv_cache_groups=[group]))

"""Sparse attention with offload on a GPU: kernels, backend, and an engine for each of vLLM's model
runners. `unit/test_page_residency.py`, `unit/test_sparse_device_offload.py` and
`integration/test_sparse_card_offload_engine.py` have the same in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.engine import make_llm
from benchmarks.gpu.models import model_config
from benchmarks.gpu.noise import noise_calibration
from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS, EXTENSIBLE_WORKER
from tests.support.gpu_answers import answers

pytestmark = pytest.mark.gpu

GPU = torch.cuda.is_available()
WHERE = "cuda" if GPU else "cpu"
HND, NHD = (0, 1, 2, 3), (0, 2, 1, 3)
PAGE, SHARE = 32, 0.2
TOKENS, ANSWER, BATCH, BLOCKS = (6000, 24, 512, 160) if GPU else (490, 4, 64, 16)
"""The prompt is longer than the cache of so many blocks."""


@pytest.mark.parametrize("order", [HND, NHD], ids=["HND", "NHD"])
def test_pages_are_copied_and_fetched_as_by_a_naive_model(order: tuple[int, ...]) -> None:
    from tests.support import page_residency as residency

    residency.check_copies(WHERE, order, torch.bfloat16)
    for seed in range(20 if GPU else 1):
        residency.check_steps(WHERE, order, seed, 20 if GPU else 2)
    residency.check_pages_of_host_memory_that_others_get(WHERE)


@pytest.mark.parametrize("order", [HND, NHD], ids=["HND", "NHD"])
def test_offloaded_rows_attend_as_if_their_kv_were_in_the_cache(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace_decode.attention import page_counts
    from tests.support import offloaded_device as offloaded
    from tests.support import sparse_device

    monkeypatch.setattr(page_counts, "MIN_TOKENS", sparse_device.LEAST)
    offloaded.check_sparse_rows(WHERE, order)
    offloaded.check_staged_rows(WHERE, order, queries=1)
    offloaded.check_staged_rows(WHERE, order, queries=40, count=2)
    offloaded.check_rows_beside_others(WHERE, 5e-3)  # the kernel multiplies in tf32
    offloaded.check_growth(WHERE, 40 if GPU else 4)
    offloaded.check_host_memory(WHERE)


def llm_of(folder: Path, blocks: int, offload_gib: float) -> Any:
    """An engine with a cache of so many blocks."""
    from headrace_decode.attention.settings import SparseSettings

    file = noise_calibration(folder / "noise.safetensors", model_config(), PAGE)
    settings = SparseSettings(page_tokens=PAGE, calibration=str(file), offload_gib=offload_gib)
    return make_llm(
        *(None, TOKENS + 2 * PAGE, 0.3),
        worker_cls=EXTENSIBLE_WORKER,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[True],
        additional_config=settings.additional_config(),
        enable_prefix_caching=False,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=BATCH,
        max_num_seqs=8,
        **({} if GPU else {"block_size": PAGE, "enforce_eager": True}),
    )


def tokens(llm: Any, share: float | None) -> list[int]:
    prompt = [100 + i * 7 % 1900 for i in range(TOKENS)]
    extra = None if share is None else {"sparse": share}
    [found] = answers(llm, [prompt], count=ANSWER, extra=[extra])
    return [token for token, _ in found]


@pytest.fixture(scope="module", params=["0", "1"], ids=["first runner", "second runner"])
def runner(request: Any) -> Iterator[str]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
    yield request.param
    patch.undo()


def test_answers_are_those_of_an_engine_whose_cache_holds_all_kv(
    runner: str, tmp_path: Path
) -> None:
    from headrace_decode.attention_backend.runtime import RUNTIME

    whole = llm_of(tmp_path, 4 * BLOCKS, 0)
    wanted = [tokens(whole, None), tokens(whole, SHARE)]
    del whole
    small = llm_of(tmp_path, BLOCKS, 0.25)
    assert [tokens(small, None), tokens(small, SHARE)] == wanted
    offloading = RUNTIME.offloading
    assert offloading is not None
    assert offloading.staged > 0 and offloading.sparse >= ANSWER - 2
    chosen, missed = offloading.memory.counts.tolist()
    assert 0 < missed < chosen

"""Sparse attention in engines on a GPU; `unit/test_sparse_device.py` has the backend in Triton's
interpreter.

One engine for each of vLLM's model runners. Its basis knows nothing of the model: what is tested is
that rows are sparse and others are not touched, not how good the choice is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.engine import make_llm
from benchmarks.gpu.models import model_config
from benchmarks.gpu.noise import noise_calibration
from headrace_engine.extensions.extension import EXTENSIBLE_WORKER
from tests.support.gpu_answers import answers

pytestmark = pytest.mark.gpu

GPU = torch.cuda.is_available()
PAGE, TOKENS, ANSWER = (32, 3000, 24) if GPU else (32, 200, 8)
SHARE = 0.1 if GPU else 0.6


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["HND", "NHD"])
def test_the_backend_holds(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace_decode.attention import page_counts
    from tests.support import sparse_device as device

    monkeypatch.setattr(page_counts, "MIN_TOKENS", device.LEAST)
    within, where = 5e-3, "cuda" if GPU else "cpu"  # the kernel multiplies in tf32
    device.check_mixed(where, order, within, prompts=True)
    device.check_mixed(where, order, within, prompts=False)
    device.check_shared_blocks(where, within)
    device.check_overwritten_blocks(where, within)


@pytest.fixture(scope="module", params=["0", "1"], ids=["first runner", "second runner"])
def llm(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from headrace_decode.attention.settings import SparseSettings

    folder = tmp_path_factory.mktemp("sparse")
    file = noise_calibration(folder / "noise.safetensors", model_config(), PAGE)
    settings = SparseSettings(page_tokens=PAGE, calibration=str(file))
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
    made = make_llm(
        *(None, 4096 if GPU else 512, 0.3),
        worker_cls=EXTENSIBLE_WORKER,
        additional_config=settings.additional_config(),
        enable_prefix_caching=False,
        **({} if GPU else {"block_size": PAGE, "enforce_eager": True}),
    )
    yield made
    patch.undo()
    del made


def tokens(llm: Any, *shares: float | None) -> tuple[list[list[int]], int]:
    """Answers to one prompt for each share, and how many rows were sparse."""
    from headrace_decode.attention_backend.runtime import RUNTIME

    before = RUNTIME.sparse_row_count
    prompts = [[100 + (i * 7 + n) % 1900 for i in range(TOKENS)] for n in range(len(shares))]
    extra = [None if share is None else {"sparse": share} for share in shares]
    found = answers(llm, prompts, count=ANSWER, extra=extra)
    return [[token for token, _ in one] for one in found], RUNTIME.sparse_row_count - before


def test_the_schedulers_block_is_the_page_and_graphs_are_piecewise(llm: Any) -> None:
    config = llm.llm_engine.vllm_config
    assert config.cache_config.block_size == PAGE
    assert not config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    assert config.use_v2_model_runner == (os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1")


def test_rows_that_ask_are_sparse_and_their_first_token_is_the_models(llm: Any) -> None:
    [exact], none = tokens(llm, None)
    [sparse], rows = tokens(llm, SHARE)
    assert none == 0
    assert ANSWER // 2 < rows < ANSWER, "dense until the pages are summarised"
    assert sparse[0] == exact[0] and len(sparse) == ANSWER


def test_exact_requests_beside_sparse_ones_get_their_own_answer(llm: Any) -> None:
    exact, none = tokens(llm, None, None, None)
    beside, rows = tokens(llm, None, SHARE, None)
    assert none == 0 and rows > 0
    assert [beside[0], beside[2]] == [exact[0], exact[2]]

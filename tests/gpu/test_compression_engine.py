"""KV cache compression on a GPU; `unit/test_compression_device.py` has the same checks in Triton's
interpreter, and `integration/test_compression_card_engine.py` an engine.

The engines' predictor knows nothing of the model: what is tested is that KV is dropped and that
other requests are not touched, not how good the choice is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.engine import make_llm
from benchmarks.gpu.models import model_config
from headrace_decode.attention.calibration_file import CalibrationResult, ModelShape
from headrace_decode.compression.engine import calibration as predictors
from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS, EXTENSIBLE_WORKER
from tests.support.compression_device import LAYOUTS
from tests.support.gpu_answers import answers, assert_alike

pytestmark = pytest.mark.gpu

GPU = torch.cuda.is_available()
PAGE, TOKENS, ANSWER = (32, 3000, 400) if GPU else (32, 330, 12)
SHARE = 0.25
DTYPES = [(torch.bfloat16, 3e-2), (torch.float32, 5e-3)] if GPU else [(torch.float32, 1e-5)]
"""The kernel multiplies in tf32."""


@pytest.mark.parametrize(("dtype", "within"), DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_attend_to_what_each_head_keeps(
    layout: str, dtype: torch.dtype, within: float
) -> None:
    from headrace_engine.vllm.attention.paged_kernels import triton_causal_attention
    from tests.support import compression_device as device

    rows = [device.Asking(5, 2, 1, 1), device.Asking(3, 2, 40, 1), device.Asking(4, 2, 37, 19)]
    where = "cuda" if GPU else "cpu"
    device.check_attention(rows, layout, triton_causal_attention, within, where, dtype)


@pytest.mark.parametrize("predictor", [False, True], ids=["read again", "predictor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_choice_and_fit_are_the_cpus(layout: str, predictor: bool) -> None:
    from tests.support import compression_device as device

    device.check_equal_to_cpu("cuda" if GPU else "cpu", layout, predictor, 1e-3)


@pytest.fixture(
    scope="module",
    params=[("0", False), ("1", False), ("1", True)],
    ids=["first runner", "second runner", "second runner, streamed"],
)
def llm(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from headrace_decode.attention.settings import SparseSettings
    from headrace_decode.compression.engine.settings import CompressionSettings
    from tests.support.sparse_engine import random_predictor

    runner, streams = request.param
    file = tmp_path_factory.mktemp("compression") / "noise.safetensors"
    shape = ModelShape.of(model_config())
    measured = CalibrationResult("noise", shape, PAGE, {SHARE: 0.1})
    predictors.write(file, measured, random_predictor(shape))
    settings = CompressionSettings(calibration=str(file), stream=streams)
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    made = make_llm(
        *(None, 4096 if GPU else 1024, 0.3),
        worker_cls=EXTENSIBLE_WORKER,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[True],
        additional_config=SparseSettings("off", page_tokens=PAGE).additional_config()
        | settings.additional_config(),
        **({} if GPU else {"block_size": PAGE, "enforce_eager": True}),
    )
    yield made
    patch.undo()
    del made


def prompt(number: int) -> list[int]:
    return [100 + (i * 7 + number * 31) % 1900 for i in range(TOKENS)]


def dropped() -> int:
    from headrace_decode.attention_backend.runtime import RUNTIME

    assert RUNTIME.compression is not None
    return RUNTIME.compression.dropped


def test_contexts_are_dropped_and_exact_requests_get_their_own_answer(llm: Any) -> None:
    others = [prompt(1), prompt(2)]
    plain, before = answers(llm, others, count=ANSWER), dropped()
    asked = [None, {"compression": SHARE}, None]
    found = answers(llm, [others[0], prompt(3), others[1]], count=ANSWER, extra=asked)
    assert_alike([found[0], found[2]], plain)
    assert len(found[1]) == ANSWER
    if GPU:
        assert dropped() == before + 1


def test_many_compressed_requests_at_once_are_served_and_leave_nothing(llm: Any) -> None:
    count = 12 if GPU else 2
    found = answers(
        *(llm, [prompt(10 + n) for n in range(count)]),
        count=ANSWER,
        extra=[{"compression": SHARE}] * count,
    )
    assert [len(each) for each in found] == [ANSWER] * count
    answers(llm, [prompt(1)[:50]], count=2)
    from headrace_decode.attention_backend.runtime import RUNTIME

    assert RUNTIME.compression is not None and not RUNTIME.compression

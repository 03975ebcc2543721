"""Models whose upper layers keep no KV in engines on a GPU, against plain torch;
`unit/test_cross_layer_device.py` has their attention in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.support.cross_layer_models import Engines, config, reference, true_logprobs, write_model
from tests.support.program import IN_ONE_PROCESS
from tests.support.prompts import noise

pytestmark = pytest.mark.gpu

WITHIN = 2e-2
"""Nats: GPUs multiply in tf32."""
PROMPTS = [[token % 512 for token in noise(n, n)] for n in (31, 33, 128, 300, 700)]


@pytest.mark.parametrize("fast", [True, False], ids=["rows with logits", "all rows"])
@pytest.mark.parametrize("kind", ["fused", "lite", "yoco"])
def test_answers_are_near_what_plain_torch_computes(
    kind: str, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in IN_ONE_PROCESS.items():
        monkeypatch.setenv(name, value)
    model, engines = write_model(tmp_path / kind, config(kind)), Engines()
    options = {"max_num_batched_tokens": 128, "gpu_memory_utilization": 0.3}
    engines.open(str(model), kv_sharing_fast_prefill=fast, **options)
    answers = engines.answers(PROMPTS, 12)
    engines.close()
    plain = reference(model)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        truth = true_logprobs(plain, prompt, answer["tokens"])
        assert answer["logprobs"] == pytest.approx(truth, abs=WITHIN)

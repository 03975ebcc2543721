"""A small run of `python -m benchmarks.families`, for models whose layers all have windows, and for
models with attention in chunks: each answer is plain vLLM's, whatever way its KV came."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.families.__main__ import faults
from benchmarks.families.models import BY_NAME
from benchmarks.families.trial import Trial, machines

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ANSWERS = 8


@pytest.mark.parametrize("family", ["mistral", "llama4"])
def test_all_answers_are_plain_vllm_s_and_all_blocks_are_given_back(
    tmp_path: Path, family: str
) -> None:
    with machines(tmp_path) as (prefill, decode):
        found = Trial(BY_NAME[family], prefill, decode, tmp_path, ANSWERS).results()
    assert faults(found) == []

"""What tells a token's score from its key and value, and how that is learned."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from headrace.config import ConfigError, load_config
from headrace_decode.attention.calibration_file import (
    CalibrationError,
    CalibrationResult,
    ModelShape,
)
from headrace_decode.compression.engine import calibration as files
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_lab.compression.learning import Samples

LAYERS, HEADS, TOKENS, DIM = 2, 3, 700, 8


def context(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, and scores that follow from them by another rule for each head."""
    rng = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, LAYERS, HEADS, TOKENS, DIM, generator=rng) * 3 + 1
    rules = torch.Generator().manual_seed(100)
    straight, bent = torch.randn(2, LAYERS, HEADS, 1, DIM, generator=rules) / DIM
    logs = (keys * straight).sum(-1) + (values * bent).sum(-1).abs() - 6
    return keys, values, logs.exp()


def said(predictor: ImportancePredictor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.stack(
        [predictor.scores(n, *kv) for n, kv in enumerate(zip(keys, values, strict=True))]
    )


@pytest.fixture(scope="module")
def predictor() -> ImportancePredictor:
    samples = Samples()
    for seed in range(3):
        samples.add(*context(seed))
    return samples.learned(width=8, steps=600)


def test_scores_of_other_contexts_are_told(predictor: ImportancePredictor) -> None:
    keys, values, scores = context(7)
    wanted = (scores + scores.median()).log()
    wrong = (said(predictor, keys, values).log() - wanted).square().mean()
    assert wrong < 0.1 * wanted.var(-1).mean()


def test_a_tokens_score_does_not_depend_on_what_stands_beside_it(
    predictor: ImportancePredictor,
) -> None:
    keys, values, _ = context(8)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    mixed = said(predictor, keys[:, :, order], values[:, :, order])
    torch.testing.assert_close(mixed, said(predictor, keys, values)[..., order])
    long = [torch.cat([part] * 4, 2) for part in (keys, values)]
    torch.testing.assert_close(said(predictor, *long)[..., :TOKENS], said(predictor, keys, values))


def test_the_first_tokens_teach_nothing(predictor: ImportancePredictor) -> None:
    samples = Samples()
    for seed in range(3):
        keys, values, scores = context(seed)
        scores[..., :4] = 1e6
        samples.add(keys, values, scores)
    keys, values, _ = context(9)
    other = samples.learned(width=8, steps=600)
    torch.testing.assert_close(said(other, keys, values), said(predictor, keys, values))


# ---- the file -------------------------------------------------------------------------------

SHAPE = ModelShape(64, LAYERS, 6, HEADS, DIM, "default theta=10000")
FOUND = CalibrationResult("small", SHAPE, 32, {0.5: 0.001, 0.25: 0.02})


@pytest.fixture
def file(tmp_path: Path, predictor: ImportancePredictor) -> Path:
    files.write(tmp_path / "gate", FOUND, predictor)
    return tmp_path / "gate"


def test_a_file_brings_the_gate_back(file: Path, predictor: ImportancePredictor) -> None:
    assert files.read(file) == FOUND
    found = files.read_predictor(file, SHAPE, 32)
    for each in fields(ImportancePredictor):
        assert torch.equal(getattr(found, each.name), getattr(predictor, each.name))


def test_a_gate_of_another_model_or_page_is_refused(file: Path) -> None:
    with pytest.raises(CalibrationError, match="of another model, small: kv_heads 3 instead of 2"):
        files.read_predictor(file, replace(SHAPE, kv_heads=2), 32)
    with pytest.raises(CalibrationError, match="pages of 32 tokens instead of 16"):
        files.read_predictor(file, SHAPE, 16)


@pytest.mark.parametrize(
    "tensors",
    [
        {"into": np.zeros((LAYERS, HEADS, 2 * DIM, 9), np.float32)},
        {"level": np.zeros((LAYERS, HEADS, 1), np.float32)},
        {"shift": np.zeros(0, np.float32)},
        {"out": None},
        {"straight": np.full((LAYERS, HEADS, 2 * DIM), np.nan, np.float32)},
    ],
)
def test_tensors_that_are_no_gate_are_refused(
    file: Path, predictor: ImportancePredictor, tensors: dict[str, Any]
) -> None:
    whole = {
        each.name: getattr(predictor, each.name).numpy() for each in fields(ImportancePredictor)
    } | tensors
    told = json.dumps(
        {
            "version": files.KIND.version,
            "model": "small",
            "shape": vars(SHAPE),
            "page_tokens": 32,
            "kl": [[0.5, 0.1]],
        }
    )
    kept = {name: one for name, one in whole.items() if one is not None}
    save_file(kept, file, {files.KIND.key: told})
    with pytest.raises(CalibrationError, match="damaged"):
        files.read_predictor(file, SHAPE, 32)


def test_a_file_that_cannot_be_used_is_refused_with_the_command_that_makes_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "junk").write_bytes(b"junk" * 30)
    on = (
        "techniques.compression.mode=request",
        f"techniques.compression.calibration={tmp_path / 'junk'}",
    )
    with pytest.raises(ConfigError, match="headrace lab calibrate compression MODEL") as found:
        load_config(overrides=[*on])
    assert "techniques.compression.calibration: " in str(found.value)


def test_an_app_cannot_stream_without_a_gate() -> None:
    with pytest.raises(ConfigError, match=r"techniques\.compression.*needs calibration"):
        load_config(
            overrides=[
                "techniques.compression.mode=request",
                "techniques.compression.incremental=true",
            ]
        )

"""`headrace lab calibrate`, on a tiny model."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig
from typer.testing import CliRunner

from headrace.cli.console import CliError
from headrace.cli.main import app
from headrace_decode.attention.calibration_file import ModelShape
from headrace_decode.compression.engine import calibration as calibrations
from headrace_decode.sparse.basis import COORDINATES
from headrace_decode.sparse.engine.calibration import read, read_bases
from headrace_lab.cli.calibrate import blending, compression, sparse
from headrace_lab.cli.calibrate.blending import frame
from headrace_lab.cli.calibrate.model import model
from headrace_lab.cli.calibrate.texts import long_texts
from tests.support.tiny import HEAD_DIM, KV_HEADS, LAYERS, tiny_llama


def texts(folder: Path, count: int) -> Path:
    draw = random.Random(1)
    for n in range(count):
        words = (f"w{draw.randrange(500)}" for _ in range(2000))
        (folder / f"{n}.txt").write_text(" ".join(words))
    return folder


def run(folder: Path, target_kl: float, output: Path | None = None) -> None:
    blending.calibrate(
        str(tiny_llama()), texts=folder, prompts=1, tokens=600, target_kl=target_kl, output=output
    )


def test_it_prints_the_curve_and_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts(tmp_path, 9)
    run(tmp_path, 100, tmp_path / "found.json")
    assert re.search(r"techniques\.blending\.recompute_ratio: 0\.\d\d", capsys.readouterr().out)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["budget"] == min(float(budget) for budget in found["scores"])
    assert all(len(scores) == 1 for scores in found["scores"].values())


def test_an_error_below_all_measured_has_no_budget(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"no budget up to 0\.50 keeps to a KL of 0"):
        run(texts(tmp_path, 9), 0)


def test_a_folder_with_few_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="has 3 files; give a folder with 8 or more"):
        run(texts(tmp_path, 3), 1)


def test_a_model_without_a_template_has_an_empty_frame() -> None:
    class NoTemplate:
        def apply_chat_template(self, *args: object, **kwargs: object) -> str:
            raise ValueError("no template")

    assert frame(NoTemplate()) == ("", "")


def test_the_frame_is_what_stands_around_the_users_text() -> None:
    class Template:
        def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: object) -> str:
            if messages[0]["role"] == "system":
                raise ValueError("no system role")
            return f"<s>{messages[0]['content']}</s>"

    assert frame(Template()) == ("<s>", "</s>")


# ---- sparse ---------------------------------------------------------------------------------


def run_sparse(folder: Path, target_kl: float, output: Path, tokens: int = 2500) -> None:
    sparse.calibrate(
        str(tiny_llama()),
        texts=folder,
        learn=1,
        measure=1,
        tokens=tokens,
        page_tokens=32,
        target_kl=target_kl,
        output=output,
    )


def test_it_writes_the_file_that_an_engine_of_the_model_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.safetensors"
    (tmp_path / "texts").mkdir()
    run_sparse(texts(tmp_path / "texts", 9), 100, file)
    printed = capsys.readouterr()
    assert "keep_ratio: 0.05" in printed.out and "text 2 of 2 measured" in printed.err
    found = read(file)
    assert found.keep_ratio == 0.05 and found.page_tokens == 32
    kls = [found.kl[share] for share in sorted(found.kl)]
    assert kls[0] > kls[-1] >= 0
    config = AutoConfig.from_pretrained(tiny_llama()).to_dict()
    bases = read_bases(file, ModelShape.of(config), 32)
    assert len(bases) == LAYERS and bases[0].into.shape == (KV_HEADS, HEAD_DIM, COORDINATES)


def test_a_target_below_all_shares_writes_no_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.safetensors"
    (tmp_path / "texts").mkdir()
    with pytest.raises(CliError, match=r"no ratio up to 0\.30 keeps to a KL of -1"):
        run_sparse(texts(tmp_path / "texts", 9), -1, file)
    assert not file.exists()


def test_too_short_texts_and_a_place_that_cannot_be_written_are_refused_at_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "texts").mkdir()
    folder = texts(tmp_path / "texts", 9)
    with pytest.raises(CliError, match="give more texts, or smaller --tokens"):
        run_sparse(folder, 1, tmp_path / "file", tokens=50_000)
    with pytest.raises(CliError, match="cannot be written"):
        run_sparse(folder, 1, tmp_path / "none" / "file")


def test_no_two_texts_share_a_file(tmp_path: Path) -> None:
    files = [tmp_path / f"{n}" for n in range(9)]
    for n, file in enumerate(files):
        file.write_text(f"{n}" * (30 if n else 5000))
    found = list(long_texts(lambda text: [int(each) for each in text], files, 3, 50))
    assert [len(text) for text in found] == [50] * 3
    assert not set(found[0]) & set(found[1]) and not set(found[1]) & set(found[2])


def test_a_model_with_other_weights_than_its_configuration_says_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama(), folder)
    [file] = folder.glob("*.safetensors")
    weights = load_file(file) | {"model.layers.0.self_attn.q_proj.bias": np.zeros(4, np.float32)}
    save_file(weights, file)
    with pytest.raises(CliError, match=r"weights do not fit config.json: .*q_proj\.bias"):
        model(str(folder))


def test_the_help_names_the_target_and_pages_that_no_engine_has_are_refused() -> None:
    found = CliRunner().invoke(app, ["lab", "calibrate", "sparse", "--help"])
    assert found.exit_code == 0 and "--target-kl" in found.output and "--out" in found.output
    refused = CliRunner().invoke(app, ["lab", "calibrate", "sparse", "--page-tokens", "24"])
    assert isinstance(refused.exception, CliError)
    assert "must be 16 or 32" in str(refused.exception)


# ---- compression ----------------------------------------------------------------------------


def run_compression(folder: Path, output: Path) -> None:
    compression.calibrate(
        str(tiny_llama()),
        texts=folder,
        learn=2,
        measure=1,
        tokens=900,
        page_tokens=32,
        output=output,
    )


def test_it_writes_a_gate_that_an_engine_of_the_model_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.safetensors"
    (tmp_path / "texts").mkdir()
    run_compression(texts(tmp_path / "texts", 9), file)
    printed = capsys.readouterr()
    assert f"techniques.compression.calibration: {file}" in printed.out
    assert "text 3 of 3 measured" in printed.err
    found = calibrations.read(file)
    assert found.page_tokens == 32 and found.kl[0.12] > found.kl[0.5] >= 0
    shape = ModelShape.of(AutoConfig.from_pretrained(tiny_llama()).to_dict())
    gate = calibrations.read_predictor(file, shape, 32)
    assert gate.level.shape == (LAYERS, KV_HEADS)
    assert gate.straight.shape == (LAYERS, KV_HEADS, 2 * HEAD_DIM)


def test_a_gates_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot be written"):
        run_compression(tmp_path, tmp_path / "nowhere" / "file")

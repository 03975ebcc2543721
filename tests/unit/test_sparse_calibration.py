"""The file of a calibration: what it brings back, and what is refused and why."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headrace.config import ConfigError
from headrace.config.load import load_config
from headrace.config.techniques import SparseSection, TechniquesSection
from headrace.deploy.sparse_attention import add_sparse_attention
from headrace_decode.attention import calibration_file as files
from headrace_decode.attention.calibration_file import CalibrationError, ModelShape
from headrace_decode.attention.settings import settings_of
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.engine.calibration import (
    KIND,
    Calibration,
    bases_for,
    read,
    read_bases,
    write,
)
from headrace_engine.connector.identity.engine_identity import SPARSE_SETTINGS_KEY
from headrace_lab.sparse.calibrate import min_share

CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 100000.0,
}
SHAPE = ModelShape.of(CONFIG)
KL = {0.05: 0.2, 0.1: 0.05, 0.2: 0.01, 0.3: 0.004}
FOUND = Calibration("smol", SHAPE, 32, KL, target_kl=0.02, keep_ratio=0.2)
RANK = 8


def bases(seed: int = 0) -> list[Basis]:
    rng = np.random.default_rng(seed)
    shapes = [(2, 32), (2, 32, RANK), (2, RANK, 32)]
    return [Basis(*(rng.normal(size=s).astype(np.float32) for s in shapes)) for _ in range(3)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "smol.safetensors"
    write(path, FOUND, bases())
    return path


# ---- choosing the share ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "share"), [(1.0, 0.05), (0.05, 0.1), (0.02, 0.2), (0.004, 0.3), (0.001, None)]
)
def test_the_share_is_the_least_that_keeps_to_the_target(target: float, share: float) -> None:
    assert min_share(KL, target) == share


# ---- the file -------------------------------------------------------------------------------


def test_a_file_brings_back_what_was_written(file: Path) -> None:
    assert read(file) == FOUND
    for mine, its in zip(bases(), read_bases(file, SHAPE, 32), strict=True):
        for name in ("origin", "into", "back"):
            assert (getattr(mine, name) == getattr(its, name)).all()
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    (other := file.with_name("other")).touch()
    assert file.stat().st_mode == other.stat().st_mode, "engines of other users may read it"


@pytest.mark.parametrize(
    "same",
    [
        {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}, "head_dim": 32},
        {"rope_scaling": None, "partial_rotary_factor": 1.0, "head_dim": None},
    ],
)
def test_one_model_has_one_shape_however_its_configuration_is_written(same: Any) -> None:
    assert ModelShape.of(CONFIG | same) == SHAPE


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_size": 256, "head_dim": 32},
        {"num_hidden_layers": 4},
        {"num_attention_heads": 8, "head_dim": 32},
        {"num_key_value_heads": 4},
        {"head_dim": 64},
        {"rope_theta": 10000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_a_file_of_another_model_is_refused_by_name(file: Path, other: dict[str, Any]) -> None:
    with pytest.raises(CalibrationError, match=r"of another model, smol: \w+ .+ instead of"):
        read_bases(file, ModelShape.of(CONFIG | other), 32)


def test_a_file_for_another_page_is_refused(file: Path) -> None:
    with pytest.raises(CalibrationError, match="pages of 32 tokens instead of 16"):
        read_bases(file, SHAPE, 16)


def test_a_file_cut_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for size in [*range(0, len(whole), 97), len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(CalibrationError):
            read_bases(file, SHAPE, 32)
        with pytest.raises(CalibrationError):
            read(file)


@given(st.binary(max_size=200))
def test_bytes_of_anything_are_refused(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "junk"
    file.write_bytes(junk)
    with pytest.raises(CalibrationError):
        read(file)


def test_a_huge_file_and_a_huge_header_are_refused_unread(tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as out:
        out.write((100).to_bytes(8, "little"))
        out.truncate(files.MAX_BYTES + 1)
    header = tmp_path / "header"
    header.write_bytes((2**60).to_bytes(8, "little") + b"{}" * 100)
    for file in (huge, header):
        with pytest.raises(CalibrationError, match="is not of"):
            read(file)


def rewritten(file: Path, tensors: dict[str, Any], told: dict[str, Any]) -> None:
    """The file with other tensors and metadata."""
    write(file, FOUND, bases())
    arrays = {
        name: np.stack([getattr(one, name) for one in bases()])
        for name in ("origin", "into", "back")
    }
    with files.safe_open(file, "np") as opened:
        said = json.loads(opened.metadata()[KIND.key])
    kept = {k: v for k, v in (arrays | tensors).items() if v is not None}
    save_file(kept, file, {KIND.key: json.dumps(said | told)})


@pytest.mark.parametrize(
    "tensors",
    [
        {"into": np.zeros((3, 2, 32, 400), np.float32)},
        {"into": np.zeros((3, 2, 32, 6), np.float32)},
        {"into": np.zeros((3, 2, 32, RANK), np.float64)},
        {"into": np.full((3, 2, 32, RANK), np.nan, np.float32)},
        {"back": np.full((3, 2, RANK, 32), 1e30, np.float32)},
        {"origin": np.zeros((4, 2, 32), np.float32)},
        {"origin": np.zeros((), np.float32)},
        {"into": np.zeros(0, np.float32)},
        {"into": np.zeros((), np.float32)},
        {"back": None},
        {"more": np.zeros(3, np.float32)},
        {"into": np.zeros((3, 2, 32, 7), np.float32), "back": np.zeros((3, 2, 7, 32), np.float32)},
        {"into": np.zeros((3, 2, 32, 0), np.float32), "back": np.zeros((3, 2, 0, 32), np.float32)},
    ],
)
def test_tensors_that_are_no_bases_of_the_model_are_refused(
    file: Path, tensors: dict[str, Any]
) -> None:
    rewritten(file, tensors, {})
    with pytest.raises(CalibrationError, match="damaged"):
        read_bases(file, SHAPE, 32)


@pytest.mark.parametrize(
    "told",
    [
        {"version": 1},
        {"keep_ratio": 0},
        {"keep_ratio": float("nan")},
        {"keep_ratio": "much"},
        {"target_kl": float("inf")},
        {"kl": 3},
        {"kl": [[1]]},
        {"page_tokens": None},
        {"page_tokens": float("inf")},
        {"shape": {}},
        {"shape": [1]},
        {"model": None, "shape": {"hidden_size": 1}},
    ],
)
def test_metadata_that_says_what_cannot_be_is_refused(file: Path, told: dict[str, Any]) -> None:
    rewritten(file, {}, told)
    with pytest.raises(CalibrationError):
        read(file)


# ---- in an engine ---------------------------------------------------------------------------


def test_the_worker_takes_the_bases_of_its_model(file: Path) -> None:
    found = bases_for(file, CONFIG, 32)
    assert found is not None and len(found) == 3 and found[0].into.shape == (2, 32, RANK)


def test_the_worker_of_another_model_says_so_and_goes_without(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "headrace.sparse"):
        logging.getLogger("headrace.sparse").addHandler(caplog.handler)
        try:
            assert bases_for(file, CONFIG | {"num_hidden_layers": 30}, 32) is None
            assert bases_for(file.with_name("none"), CONFIG, 32) is None
        finally:
            logging.getLogger("headrace.sparse").removeHandler(caplog.handler)
    text = caplog.text
    assert "of another model, smol: layers 3 instead of 30" in text
    assert "No such file" in text and "without a basis" in text and KIND.command in text


# ---- in an app ------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "wanted"), [(None, 0.2), (0.5, 0.5)])
def test_the_share_is_the_files_where_none_is_set(
    file: Path, share: float | None, wanted: float
) -> None:
    engine: dict[str, Any] = {}
    section = SparseSection(mode="auto", keep_ratio=share, calibration=str(file))
    add_sparse_attention(TechniquesSection(sparse=section), [engine])
    settings = settings_of(engine["additional_config"])
    assert settings is not None and settings.keep_ratio == wanted
    assert (
        settings.calibration
        == engine["additional_config"][SPARSE_SETTINGS_KEY]["calibration"]
        == str(file)
    )


def problems(folder: Path, sparse: str) -> str:
    (folder / "app.yaml").write_text(f"techniques:\n  sparse: {sparse}\n")
    try:
        load_config(folder / "app.yaml")
    except ConfigError as error:
        return str(error)
    return ""


def test_a_configuration_names_its_file_from_its_own_folder(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent.parent)
    assert problems(file.parent, f"{{mode: auto, calibration: {file.name}}}") == ""


@pytest.mark.parametrize(
    ("sparse", "why"),
    [
        ("{mode: auto, calibration: none.st}", "No such file"),
        ("{mode: auto, calibration: app.yaml}", "is not of"),
        ("{mode: auto, page_tokens: 16, calibration: smol.safetensors}", "for pages of 32 tokens"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_field_and_command(
    file: Path, sparse: str, why: str
) -> None:
    found = problems(file.parent, sparse)
    assert found.startswith(f"{file.parent}/app.yaml:2: techniques.sparse.calibration: ")
    assert why in found
    assert "headrace lab calibrate sparse MODEL --texts FOLDER --out FILE" in found


def test_a_file_of_what_is_off_is_not_looked_for(tmp_path: Path) -> None:
    assert problems(tmp_path, '{mode: "off", calibration: none.st}') == ""


def test_an_app_whose_file_went_away_says_which_field_named_it(file: Path) -> None:
    section = SparseSection(mode="auto", calibration=str(file))
    file.unlink()
    with pytest.raises(ValueError, match=r"^techniques\.sparse\.calibration: "):
        add_sparse_attention(TechniquesSection(sparse=section), [{}])


def test_a_shape_that_is_not_the_basiss_is_not_hidden_by_the_name(file: Path) -> None:
    write(file, replace(FOUND, model="other"), bases())
    with pytest.raises(CalibrationError, match="another model, other: layers 3 instead of 4"):
        read_bases(file, replace(SHAPE, layers=4), 32)

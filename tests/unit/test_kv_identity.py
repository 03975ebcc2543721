"""What a model folder is known by."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace_kvstore.connector.identity import (
    model_identity,
    overrides_identity,
    speculative_identity,
    weights_fingerprint,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests of files are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return folder


def test_a_copy_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert weights_fingerprint(folder) == weights_fingerprint(copy)


@pytest.mark.parametrize("place", [0, 4095, 12345, 2**20 - 1])
def test_other_weights_are_another_model(folder: Path, place: int) -> None:
    before = weights_fingerprint(folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[place] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert weights_fingerprint(folder) != before


def test_another_configuration_is_another_model(folder: Path) -> None:
    before = weights_fingerprint(folder)
    (folder / "config.json").write_text('{"rope_theta": 1}')
    assert weights_fingerprint(folder) != before


def test_what_is_not_the_model_does_not_count(folder: Path) -> None:
    before = weights_fingerprint(folder)
    (folder / "README.md").write_text("hello")
    assert weights_fingerprint(folder) == before


def test_a_hub_model_is_its_commit() -> None:
    config = SimpleNamespace(architectures=["Llama"], _commit_hash="abc")
    model = SimpleNamespace(model="org/none-such", revision="main", hf_config=config)
    assert model_identity(model) == ("org/none-such", "abc")
    config._commit_hash = None
    assert model_identity(model) == ("org/none-such", "main")


def test_a_file_is_read_once(folder: Path, cache: Path) -> None:
    before = weights_fingerprint(folder)
    [kept] = [
        path for path in (cache / "headrace" / "fingerprints").iterdir() if path.stat().st_size
    ][:1]
    kept.write_text("0" * 32)
    assert weights_fingerprint(folder) != before, "what is kept is believed"
    kept.write_text("half a dig")
    assert weights_fingerprint(folder) == before, "what is no digest is not"


def test_without_a_folder_for_the_cache_files_are_read_each_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights_fingerprint(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights_fingerprint(folder) == before


def wider(config: object) -> object:
    return config


def narrower(config: object) -> object:
    return config


def test_overrides_are_told_apart_by_value_and_by_function() -> None:
    plain = [None, {"rope_theta": 1}, {"rope_theta": 2}, {"a": {"b": [1, 2]}}]
    known = [overrides_identity(each) for each in (*plain, wider, narrower, {"text": wider})]
    assert len(set(known)) == len(known)
    assert overrides_identity({"b": 1, "a": 2}) == overrides_identity({"a": 2, "b": 1})
    assert overrides_identity({}) == ""


def test_overrides_that_cannot_be_told_apart_are_refused() -> None:
    theta = 1
    for each in (lambda config: (config, theta), print, {"x": object()}, functools.partial(wider)):
        with pytest.raises(ValueError, match="hf_overrides"):
            overrides_identity(each)


def test_layers_of_a_draft_model_belong_to_the_namespace() -> None:
    draft = SimpleNamespace(
        model="org/draft", revision="v1", hf_config=SimpleNamespace(_commit_hash=None)
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_num_layers=lambda parallel: 2),
        parallel_config=None,
        speculative_config=SimpleNamespace(method="eagle", draft_model_config=draft),
    )
    assert speculative_identity(config, ["a", "b"]) == ""
    assert speculative_identity(config, ["a", "b", "eagle"]) == '["eagle","org/draft","v1"]'
    draft.revision = "v2"
    assert "v2" in speculative_identity(config, ["a", "b", "eagle"])
    config.speculative_config = None
    assert speculative_identity(config, ["a", "b"]) == ""

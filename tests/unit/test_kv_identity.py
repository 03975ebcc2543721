"""What a model folder is known by."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace_kvstore.connector.identity import (
    engine_namespace,
    model_identity,
    weights_fingerprint,
)


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


@pytest.mark.parametrize("place", [0, 4095, 2**20 - 1])
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


@pytest.mark.parametrize("kind", ["pipeline", "prefill_context", "decode_context"])
def test_engines_whose_ranks_hold_parts_of_a_prompt_or_of_the_layers_are_refused(kind: str) -> None:
    sizes = dict.fromkeys(("pipeline", "prefill_context", "decode_context"), 1) | {kind: 2}
    parallel = {f"{name}_parallel_size": size for name, size in sizes.items()}
    config = SimpleNamespace(
        model_config=None, cache_config=None, parallel_config=SimpleNamespace(**parallel)
    )
    with pytest.raises(ValueError, match=f"{kind}_parallel_size above 1"):
        engine_namespace(config, None, 0)

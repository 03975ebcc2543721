"""What an engine's KV is known by: its weights, and every setting that KV depends on."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import MultiModalConfig, WeightTransferConfig

from headrace_engine.connector.identity import engine_identity as identity
from headrace_engine.connector.identity.engine_identity import (
    UNRELATED,
    engine_namespace,
    first_epoch,
    kv_identity,
    overrides_identity,
    speculative_identity,
)
from headrace_engine.connector.identity.weights import Unidentified
from headrace_engine.kv_transfer.kv_kind import kv_kind
from tests.support.engineconfig import engine_config
from tests.support.tiny import tiny_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MEDIA = {"model_config__multimodal_config": MultiModalConfig()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests of files are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny Llama, to be changed."""
    return Path(shutil.copytree(tiny_llama(), tmp_path / "model"))


def of(**changed: Any) -> identity.KvIdentity:
    return kv_identity(engine_config(**changed))


def all_of(config: Any) -> tuple[bytes, bytes, str]:
    """What the three that use the identity make of it."""
    space = engine_namespace(config, "LBHNC", 2, ["a", "b"])
    return space.digest, kv_identity(config).encoding, kv_kind(config).digest


CHANGES: dict[str, dict[str, Any]] = {
    "max_model_len": {"model_config__max_model_len": 8192},
    "dtype": {"model_config__dtype": "bfloat16"},
    "kv cache dtype": {"cache_config__cache_dtype": "float16"},
    "layers whose cache is not quantised": {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
    "quantization": {"model_config__quantization": "fp8"},
    "its settings": {"model_config__quantization_config": {"linear": {"bits": 4}}},
    "overrides": {"model_config__hf_overrides": {"rope_theta": 1}},
    "another configuration": {"model_config__hf_config_path": "docs"},
    "sliding window off": {"model_config__disable_sliding_window": True},
    "model implementation": {"model_config__model_impl": "transformers"},
    "model class": {"model_config__model_class_overrides": {"Llama": "m:C"}},
    "configuration format": {"model_config__config_format": "mistral"},
    "custom code is trusted": {"model_config__trust_remote_code": True},
    "attention temperature": {
        "model_config__override_generation_config": {"attn_temperature_tuning": True}
    },
    "generation configuration": {"model_config__generation_config": "vllm"},
    "dummy weights": {"load_config__load_format": "dummy"},
    "loader": {"load_config__load_format": "sharded_state"},
    "files of the loader": {"load_config__model_loader_extra_config": {"pattern": "x"}},
    "files that are left out": {"load_config__ignore_patterns": ["*.bin"]},
    "platform": {"additional_config": {"kernel": "fast"}},
    "device": {"device_config__device_type": "cuda"},
    "media": {"model_config__multimodal_config": MultiModalConfig(video_pruning_rate=0.5)},
    "media processor": {
        "model_config__multimodal_config": MultiModalConfig(mm_processor_kwargs={"num_crops": 4})
    },
}


class TestSettings:
    @pytest.mark.parametrize("name", CHANGES)
    def test_what_changes_kv_changes_namespace_proof_and_kind(self, name: str) -> None:
        plain, other = engine_config(**MEDIA), engine_config(**MEDIA | CHANGES[name])
        for before, after in zip(all_of(plain), all_of(other), strict=True):
            assert before != after

    def test_all_changes_are_told_from_one_another(self) -> None:
        made = {of(**MEDIA | changed).encoding for changed in CHANGES.values()}
        assert len(made | {of(**MEDIA).encoding}) == len(CHANGES) + 1

    @pytest.mark.parametrize(
        "changed",
        [
            {"scheduler_config__max_num_seqs": 7, "scheduler_config__max_num_batched_tokens": 77},
            {"cache_config__gpu_memory_utilization": 0.1, "cache_config__num_gpu_blocks": 9},
            {"parallel_config__tensor_parallel_size": 2, "parallel_config__rank": 1},
            {"parallel_config__data_parallel_size": 4},
            {"model_config__enforce_eager": True, "model_config__seed": 1},
            {"model_config__served_model_name": "x", "model_config__tokenizer": "y"},
            {"model_config__override_generation_config": {"temperature": 0.1}},
            {"additional_config": {"headrace_sparse": None, "headrace_compression": {"a": 1}}},
            {"load_config__model_loader_extra_config": {"num_threads": 4}},
        ],
    )
    def test_what_roles_may_set_differently_does_not(self, changed: dict[str, Any]) -> None:
        assert of(**changed) == of()

    def test_what_a_model_changes_while_it_loads_does_not(self) -> None:
        """Workers have loaded it, the scheduler of several has not."""
        config = engine_config()
        config.model_config.hf_config.attn_temperature_tuning = True
        config.model_config.hf_text_config.architectures = ["X"]
        assert kv_identity(config) == of()

    def test_every_other_setting_of_the_model_counts_also_one_that_nobody_knows_yet(self) -> None:
        config = engine_config()
        names = {field.name for field in dataclasses.fields(config.model_config)}
        assert names >= UNRELATED | identity.STATED, "a name that vLLM does not know"
        for name in sorted(names - UNRELATED - identity.STATED):
            other = engine_config(**{f"model_config__{name}": "something else"})
            assert kv_identity(other) != of(), name
        assert of().settings == "{}", "what is the default is not listed"

    def test_versions_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = of()
        monkeypatch.setattr(identity, "vllm_version", lambda: "0.0.1")
        assert of() != before
        monkeypatch.undo()
        monkeypatch.setattr(identity.transformers, "__version__", "0.0.1")
        assert of() != before

    def test_an_engine_whose_weights_may_be_exchanged_has_an_epoch_of_its_own(self) -> None:
        config = engine_config(weight_transfer_config=WeightTransferConfig())
        assert first_epoch(engine_config()) == b""
        assert first_epoch(config) != first_epoch(config)
        assert kv_kind(config).digest != kv_kind(config).digest


class TestWeights:
    def at(self, folder: Path, **changed: Any) -> identity.KvIdentity:
        return of(model_config__model=str(folder), **changed)

    def test_a_copy_elsewhere_is_the_same(self, folder: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(folder, tmp_path / "copy")
        assert self.at(folder) == self.at(copy) == of()

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
    def test_one_byte_makes_others(self, folder: Path, name: str) -> None:
        file = folder / name
        before, content = self.at(folder), bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        assert self.at(folder) != before

    @pytest.mark.parametrize("name", ["modeling.py", "code/layers.py", "model.gguf", "more.pth"])
    def test_custom_code_and_weights_of_any_kind_count(self, folder: Path, name: str) -> None:
        before = self.at(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x = 1")
        once = self.at(folder)
        (folder / name).write_text("x = 2")
        assert len({before, once, self.at(folder)}) == 3

    def test_dummy_weights_are_known_by_configuration_and_ranks(self, folder: Path) -> None:
        dummy = {"load_config__load_format": "dummy"}
        before = self.at(folder, **dummy)
        (folder / "model.safetensors").unlink()
        assert self.at(folder, **dummy) == before
        assert self.at(folder, **dummy, parallel_config__tensor_parallel_size=2) != before
        (folder / "config.json").write_text("{}")
        assert self.at(folder, **dummy) != before

    def test_a_single_file_is_known_by_its_bytes(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"one")
        before = self.at(file)
        file.write_bytes(b"two")
        assert self.at(file) != before

    def test_a_model_of_the_hub_is_its_commit(self) -> None:
        hub = {"model_config__model": "org/none-such"}
        assert of(**hub, model_config__revision=COMMIT).revision == COMMIT
        resolved = type("Resolved", (str,), {"resolved": COMMIT})("main")
        assert of(**hub, model_config__revision=resolved).revision == COMMIT
        config = engine_config(**hub)
        config.model_config.hf_config._commit_hash = COMMIT
        assert kv_identity(config).revision == COMMIT

    def test_the_commit_of_another_configuration_is_not_the_weights(self, tmp_path: Path) -> None:
        config = engine_config(model_config__model="org/none-such")
        config.model_config.hf_config._commit_hash = COMMIT
        config.model_config.hf_config_path = str(tmp_path)
        with pytest.raises(Unidentified, match="org/none-such"):
            kv_identity(config)

    def test_code_of_another_repository_needs_a_commit(self) -> None:
        config = engine_config(model_config__trust_remote_code=True)
        config.model_config.hf_config.auto_map = {"AutoModel": "org/code--modeling.Model"}
        with pytest.raises(Unidentified, match="code_revision"):
            kv_identity(config)
        config.model_config.code_revision = COMMIT
        assert COMMIT in kv_identity(config).settings


@pytest.fixture(
    params=["branch", "tensorizer", "plugin", "objects that are not there", "closure", "value"]
)
def unidentified(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine whose KV cannot be told from others'."""
    theta = 1
    changed: dict[str, Any] = {
        "branch": {"model_config__model": "org/none-such", "model_config__revision": "main"},
        "tensorizer": {"load_config__load_format": "tensorizer"},
        "plugin": {"load_config__load_format": "our_loader"},
        "objects that are not there": {"model_config__model_weights": "memory://nothing"},
        "closure": {"model_config__hf_overrides": lambda config: (config, theta)},
        "value": {"additional_config": {"x": object()}},
    }[request.param]
    yield engine_config(**changed)


class TestUnidentified:
    def test_it_has_no_identity(self, unidentified: Any) -> None:
        with pytest.raises(Unidentified):
            kv_identity(unidentified)

    def test_it_exchanges_kv_with_nobody_not_even_its_like(self, unidentified: Any) -> None:
        from headrace_engine.kv_transfer.compatibility import refusal

        found = kv_kind(unidentified)
        with pytest.raises(Unidentified) as told:
            kv_identity(unidentified)
        assert found.why_unidentified == str(told.value)
        kind = str(found)
        plain = str(kv_kind(engine_config()))
        assert all(refusal(*pair) for pair in [(kind, kind), (kind, plain), (plain, kind)])
        assert not refusal(plain, plain)


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
        with pytest.raises(Unidentified, match="hf_overrides"):
            overrides_identity(each)


def test_layers_of_a_draft_model_belong_to_the_namespace(folder: Path) -> None:
    config = engine_config()
    draft = engine_config(model_config__model=str(folder)).model_config
    config.speculative_config = SimpleNamespace(method="eagle", draft_model_config=draft)
    assert speculative_identity(config, ["a", "b"]) == ""
    before = speculative_identity(config, ["a", "b", "eagle"])
    assert before.startswith('["eagle","LlamaForCausalLM","')
    (folder / "model.safetensors").write_bytes(b"others")
    after = speculative_identity(config, ["a", "b", "eagle"])
    draft.quantization = "fp8"
    assert len({before, after, speculative_identity(config, ["a", "b", "eagle"])}) == 3
    config.speculative_config = None
    assert speculative_identity(config, ["a", "b"]) == ""

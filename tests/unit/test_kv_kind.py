"""What tells an engine's KV apart."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.kv_transfer import kv_kind as kvkind
from headrace_engine.kv_transfer.compatibility import CHECKS_KEY, UNIDENTIFIED, KvKind
from headrace_engine.kv_transfer.kv_kind import kv_kind
from tests.support.engineconfig import engine_config


def test_equal_engines_are_of_one_kind() -> None:
    assert kv_kind(engine_config()) == kv_kind(engine_config())


@pytest.mark.parametrize(
    "changed",
    [
        {"model_config__max_model_len": 8192},
        {"cache_config__block_size": 64},
        {"attention_config__backend": SimpleNamespace(name="FLASH_ATTN")},
        {"weight_transfer_config": object()},
    ],
)
def test_what_changes_kv_or_blocks_makes_another_kind(changed: dict[str, Any]) -> None:
    """`test_kv_identity` has all that changes KV."""
    assert kv_kind(engine_config(**changed)).digest != kv_kind(engine_config()).digest


@pytest.mark.parametrize("hybrid", [True, False])
def test_engines_whose_states_have_other_shapes_are_of_other_kinds(
    monkeypatch: pytest.MonkeyPatch, hybrid: bool
) -> None:
    """A recurrent layer's state has room for the engine's draft tokens."""
    monkeypatch.setattr("vllm.config.ModelConfig.is_hybrid", hybrid)
    drafts = SimpleNamespace(num_speculative_tokens=3)
    kinds = kv_kind(engine_config()), kv_kind(engine_config(speculative_config=drafts))
    assert (kinds[0] != kinds[1]) == hybrid


def test_after_a_reset_of_its_caches_an_engine_is_of_a_kind_of_its_own() -> None:
    kind = kv_kind(engine_config())
    assert kind.of_epoch("") == kind
    digests = {kind.digest, kind.of_epoch("aa").digest, kind.of_epoch("bb").digest}
    assert len(digests) == 3
    assert replace(kind.of_epoch("aa"), digest=kind.digest) == kind
    unknown = replace(kind, digest=UNIDENTIFIED)
    assert unknown.of_epoch("aa") == unknown


def test_another_version_is_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kv_kind(engine_config())
    monkeypatch.setattr(kvkind, "_headrace_version", lambda: "0.0.1")
    assert kv_kind(engine_config()) != before


def test_sizes_layouts_and_checks_are_told_beside_it() -> None:
    extra = {"connectors": [{"kv_connector_extra_config": {CHECKS_KEY: {"check": "all"}}}, {}]}
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    config = engine_config(parallel_config__tensor_parallel_size=2, kv_transfer_config=transfer)
    told = kv_kind(config, "LBHNC")
    assert told == KvKind(kv_kind(engine_config()).digest, 2, 2, "LBHNC", check_all=True)
    assert KvKind.parse(str(told)) == told and len(str(told)) <= 128

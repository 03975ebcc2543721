"""What tells an engine's KV apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine import kvkind
from headrace_engine.exchange import CHECKS_KEY, KvKind
from headrace_engine.kvkind import kv_kind


def engine(**changed: Any) -> Any:
    """The part of vLLM's configuration that tells engines apart."""
    model = {
        "model": "org/none-such",
        "revision": "main",
        "hf_config": SimpleNamespace(architectures=["Llama"], _commit_hash="abc"),
        "hf_overrides": {},
        "quantization": None,
        "dtype": "float32",
        "use_mla": False,
        "get_total_num_kv_heads": lambda: 8,
    }
    cache = {"cache_dtype": "auto", "block_size": 128}
    backend = SimpleNamespace(name=changed.pop("backend", "CPU_ATTN"))
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**model, **{k: changed[k] for k in model if k in changed}}),
        cache_config=SimpleNamespace(**{**cache, **{k: changed[k] for k in cache if k in changed}}),
        attention_config=SimpleNamespace(backend=backend),
        parallel_config=SimpleNamespace(tensor_parallel_size=changed.get("ranks", 1)),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=changed.get("extra", {})),
    )


def test_equal_engines_are_of_one_kind() -> None:
    assert kv_kind(engine()) == kv_kind(engine())


@pytest.mark.parametrize(
    "changed",
    [
        {"hf_config": SimpleNamespace(architectures=["Llama"], _commit_hash="abd")},
        {"hf_overrides": {"rope_theta": 1}},
        {"quantization": "fp8"},
        {"dtype": "bfloat16"},
        {"cache_dtype": "fp8"},
        {"block_size": 64},
        {"backend": "FLASH_ATTN"},
    ],
)
def test_what_changes_kv_makes_another_kind(changed: dict[str, Any]) -> None:
    assert kv_kind(engine(**changed)).digest != kv_kind(engine()).digest


def test_another_version_is_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kv_kind(engine())
    for name in ("vllm_version", "_headrace_version"):
        with monkeypatch.context() as patched:
            patched.setattr(kvkind, name, lambda: "0.0.1")
            assert kv_kind(engine()) != before


def test_sizes_layouts_and_checks_are_told_beside_it() -> None:
    extra = {"connectors": [{"kv_connector_extra_config": {CHECKS_KEY: {"check": "all"}}}, {}]}
    told = kv_kind(engine(ranks=4, extra=extra), "LBHNC")
    assert told == KvKind(kv_kind(engine()).digest, 4, 8, "LBHNC", check_all=True)
    assert KvKind.parse(str(told)) == told and len(str(told)) <= 128
    assert kv_kind(engine(use_mla=True)).heads == 0

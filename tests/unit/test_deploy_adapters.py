"""LoRA adapters in an app's arguments: Ray's and vLLM's forms, and what is refused by name."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from headrace.app import build_app
from headrace.deploy.adapters import take_adapters, with_readable_paths
from headrace.deploy.drop_in import refusals
from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.ray.llm import PDServingArgs

ROLE: dict[str, Any] = {
    "model_loading_config": {"model_id": "m", "model_source": "/m"},
    "accelerator_config": {"kind": "cpu"},
    "engine_kwargs": {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
}
MODULE = {"name": "sql", "path": "/adapters/sql"}
LORA = {"dynamic_lora_loading_path": "s3://adapters/all"}


def args(
    decode: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
) -> dict[str, Any]:
    made: dict[str, Any] = {f"{role}_config": copy.deepcopy(ROLE) for role in ("prefill", "decode")}
    made["decode_config"]["engine_kwargs"] |= decode or {}
    made["prefill_config"]["engine_kwargs"] |= prefill or {}
    if lora is not None:
        for config in made.values():
            config["lora_config"] = lora
    return made


def taken(**which: Any) -> tuple[AdapterSettings | None, dict[str, Any], dict[str, Any]]:
    pd = PDServingArgs.model_validate(with_readable_paths(args(**which)))
    settings = take_adapters(pd)
    return settings, pd.prefill_config.engine_kwargs, pd.decode_config.engine_kwargs


def test_an_app_without_adapters_stays_as_it_is() -> None:
    settings, prefill, decode = taken()
    assert settings is None
    assert "enable_lora" not in {**prefill, **decode}


def test_rays_lora_config_gives_both_engines_the_same_layers() -> None:
    settings, *engines = taken(lora={**LORA, "max_num_adapters_per_replica": 20})
    assert settings == AdapterSettings("m", {}, "s3://adapters/all", 30)
    for engine in engines:
        assert engine["enable_lora"] is True
        assert (engine["max_loras"], engine["max_cpu_loras"]) == (4, 20)


def test_vllms_lora_modules_are_loaded_by_the_replicas_and_not_by_vllm() -> None:
    settings, *engines = taken(decode={"lora_modules": [MODULE], "max_lora_rank": 64})
    assert settings == AdapterSettings("m", {"sql": "/adapters/sql"})
    for engine in engines:
        assert "lora_modules" not in engine
        assert (engine["enable_lora"], engine["max_lora_rank"]) == (True, 64)


def test_enable_lora_alone_is_enough_for_adapters_that_administrators_load() -> None:
    settings, prefill, _ = taken(decode={"enable_lora": True, "max_loras": 2})
    assert settings == AdapterSettings("m")
    assert (prefill["enable_lora"], prefill["max_loras"], prefill["max_cpu_loras"]) == (True, 2, 2)


@pytest.mark.parametrize(("lora", "limit_s"), [(None, 30), (LORA | {"download_timeout_s": 5}, 5)])
def test_fetching_an_adapter_has_a_time_limit(lora: dict[str, Any] | None, limit_s: float) -> None:
    settings, *_ = taken(lora=lora, decode={"lora_modules": [MODULE]})
    assert settings is not None and settings.fetch_timeout_s == limit_s


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("/adapters/", "pyarrow-file:///adapters"),
        ("hf://org/adapters", "pyarrow-hf://org/adapters"),
        ("file:///adapters", "pyarrow-file:///adapters"),
        ("s3://adapters", "s3://adapters"),
        ("gs://adapters", "gs://adapters"),
    ],
)
def test_a_folder_a_hub_and_object_stores_can_hold_adapters(path: str, read: str) -> None:
    settings, *_ = taken(lora={"dynamic_lora_loading_path": path})
    assert settings is not None and settings.loading_path == read


@pytest.mark.parametrize(
    ("which", "line"),
    [
        ({"decode": {"lora_modules": [{"name": "a"}]}}, r"lora_modules\.0: must be {name, path}"),
        ({"decode": {"lora_modules": ["a=/a"]}}, r"lora_modules\.0: must be {name, path}"),
        ({"decode": {"lora_modules": MODULE}}, r"lora_modules: must be a list"),
        ({"decode": {"lora_modules": [MODULE, MODULE]}}, r"lora_modules\.1\.name: 'sql' is there"),
        ({"decode": {"lora_modules": [{**MODULE, "name": "m"}]}}, r"0\.name: 'm' is the model's"),
        (
            {"decode": {"lora_modules": [{**MODULE, "is_3d_lora_weight": True}]}},
            r"0\.is_3d_lora_weight: is not supported",
        ),
        (
            {"decode": {"lora_modules": [MODULE]}, "prefill": {"lora_modules": []}},
            r"^prefill_config\.engine_kwargs\.lora_modules: differs",
        ),
        (
            {"decode": {"lora_modules": [MODULE]}, "prefill": {"enable_lora": False}},
            r"^prefill_config\.engine_kwargs\.enable_lora: is false",
        ),
        (
            {"lora": LORA, "decode": {"max_lora_rank": 64}, "prefill": {"max_lora_rank": 16}},
            r"^prefill_config\.engine_kwargs\.max_lora_rank: must be decode_config's 64, got 16",
        ),
        ({"lora": LORA, "decode": {"max_cpu_loras": 300}}, r"max_cpu_loras: must be from"),
        ({"lora": {"dynamic_lora_loading_path": "azure://c@a.blob/x"}}, r"write abfss://"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(which: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        taken(**which)


def test_lora_config_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(runtime_env={})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert refusals(PDServingArgs.model_validate(args(lora=LORA))) == []
    assert build_app(args(lora={"dynamic_lora_loading_path": "/adapters"})) is not None

"""What `build_app` is given for a configuration."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from headrace.config import AppSection, ConfigError, RouterSettings, load_config, to_app_args
from headrace.config.key_file import KeyEntry, KeyFile, hash_of, write_keys
from headrace.config.machine import cpu_computes_bfloat16


def test_a_cpu_role_is_a_cpu_llm_config() -> None:
    args = to_app_args(load_config(overrides=["model.source=/m", "decode.threads=2"]))
    decode = args["decode_config"]
    assert decode["model_loading_config"] == {
        "model_id": "smollm2-135m-instruct",
        "model_source": "/m",
    }
    assert decode["accelerator_config"] == {"kind": "cpu"}
    assert decode["placement_group_config"] == {"bundles": [{"CPU": 0.5}]}
    assert decode["deployment_config"]["ray_actor_options"] == {"num_cpus": 0}
    assert decode["runtime_env"]["env_vars"] == {
        "PYTHONHASHSEED": "0",
        "VLLM_MAX_N_SEQUENCES": "128",
        "OMP_NUM_THREADS": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
    }
    engine = decode["engine_kwargs"]
    assert engine["enforce_eager"] is True
    assert engine["kv_cache_memory_bytes"] == 2**30
    assert engine["kv_transfer_config"]["kv_buffer_device"] == "cpu"
    assert engine["kv_transfer_config"]["kv_load_failure_policy"] == "recompute"
    json.dumps(args)


def test_a_gpu_role_leaves_cpu_settings_out() -> None:
    args = to_app_args(load_config(preset="gpu-node", overrides=["decode.accelerator_type=H100"]))
    decode = args["decode_config"]
    assert decode["accelerator_config"] == {"kind": "gpu"}
    assert decode["accelerator_type"] == "H100"
    assert "accelerator_type" not in args["prefill_config"]
    assert decode["placement_group_config"] == {"bundles": [{"CPU": 1.0, "GPU": 1}]}
    assert decode["runtime_env"]["env_vars"] == {
        "PYTHONHASHSEED": "0",
        "VLLM_MAX_N_SEQUENCES": "128",
    }
    engine = decode["engine_kwargs"]
    assert engine["kv_transfer_config"]["kv_buffer_device"] == "cuda"
    assert engine["max_model_len"] == 32768
    assert "enforce_eager" not in engine
    assert "kv_cache_memory_bytes" not in engine  # gpu_memory_utilization decides
    assert "dtype" not in engine


def test_each_gpu_of_a_tensor_parallel_engine_gets_a_bundle() -> None:
    overrides = [f"{r}.{f}" for r in ("prefill", "decode") for f in ("gpus=4",)]
    overrides += [f"{r}.engine.tensor_parallel_size=4" for r in ("prefill", "decode")]
    args = to_app_args(load_config(preset="gpu-node", overrides=overrides))
    placed = args["decode_config"]["placement_group_config"]
    assert len(placed["bundles"]) == 4
    assert placed["strategy"] == "STRICT_PACK", "one machine, at whose address its KV is pulled"


def test_custom_resources_are_reserved_with_each_bundle() -> None:
    overrides = ["decode.resources={decoders: 1}", "prefill.resources={prefills: 0.5}"]
    cpu = to_app_args(load_config(overrides=overrides))
    bundles = {"prefill": {"CPU": 0.5, "prefills": 0.5}, "decode": {"CPU": 0.5, "decoders": 1.0}}
    for role, bundle in bundles.items():
        assert cpu[f"{role}_config"]["placement_group_config"] == {"bundles": [bundle]}
    gpu = to_app_args(load_config(preset="gpu-node", overrides=overrides))
    assert gpu["decode_config"]["placement_group_config"] == {
        "bundles": [{"CPU": 1.0, "GPU": 1, "decoders": 1.0}]
    }


@pytest.mark.parametrize("wrong", ["{'a b': 1}", "{a: 0}", "{a: -1}", "[a]"])
def test_impossible_resources_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"^decode\.resources"):
        load_config(overrides=[f"decode.resources={wrong}"])


def test_the_users_engine_arguments_win_and_are_merged() -> None:
    config = load_config(
        overrides=[
            "decode.engine.enforce_eager=false",
            "decode.engine.kv_transfer_config.kv_role=kv_consumer",
            "decode.kv_cache_gb=0.5",
        ]
    )
    engine = to_app_args(config)["decode_config"]["engine_kwargs"]
    assert engine["enforce_eager"] is False
    assert engine["kv_transfer_config"]["kv_role"] == "kv_consumer"
    assert engine["kv_transfer_config"]["kv_connector"] == "NixlConnector"
    assert engine["kv_cache_memory_bytes"] == 2**29  # VLLM_CPU_KVCACHE_SPACE could not say this


def test_the_headrace_section_is_what_build_app_reads(tmp_path: Path) -> None:
    entry = KeyEntry(name="a", hash=hash_of(b"k"), tenant="shop")
    write_keys(tmp_path / "keys", KeyFile(keys=[entry]))
    config = load_config(overrides=[f"gateway.api_keys_file={tmp_path / 'keys'}"])
    section = AppSection.model_validate(to_app_args(config, hash_of(b"operator"))["headrace"])
    assert section.gateway.api_keys_file == str(tmp_path / "keys")  # gateways read it again
    assert section.gateway.operator_key_hash == hash_of(b"operator")
    assert section.router == config.router


def test_an_admin_key_of_the_configuration_is_kept_beside_the_command_lines_own() -> None:
    config = load_config(overrides=[f"gateway.admin_key_hash={hash_of(b'root-key')}"])
    assert config.gateway.asks_for_keys
    for operator in (None, hash_of(b"operator")):
        section = AppSection.model_validate(to_app_args(config, operator)["headrace"])
        assert section.gateway.admin_key_hash == hash_of(b"root-key")
        assert section.gateway.operator_key_hash == operator


def test_router_settings_mirror_the_routers_own() -> None:
    core = RouterSettings().to_settings()
    ours = set(RouterSettings.model_fields)
    theirs = {field.name: getattr(core, field.name) for field in fields(core)}
    assert ours <= set(theirs)
    assert core == type(core)(), "the defaults differ"


@pytest.mark.parametrize(
    ("flags", "yes"),
    [("avx512f avx512_bf16", True), ("avx512f avx512vl", False), ("asimd bf16", True)],
)
def test_float32_where_the_cpu_cannot_multiply_bfloat16(
    flags: str, yes: bool, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    assert cpu_computes_bfloat16(str(tmp_path / "cpuinfo")) is yes


def test_adapters_are_arguments_of_both_engines() -> None:
    args = to_app_args(
        load_config(
            overrides=["model.adapters={sql: /a, fr: hf://o/n}", "model.adapters_path=/all"]
        )
    )
    for role in ("prefill_config", "decode_config"):
        engine = args[role]["engine_kwargs"]
        assert engine["enable_lora"] is True
        assert engine["lora_modules"] == [
            {"name": "sql", "path": "/a"},
            {"name": "fr", "path": "hf://o/n"},
        ]
        assert args[role]["lora_config"] == {"dynamic_lora_loading_path": "/all"}
    plain = to_app_args(load_config())["decode_config"]
    assert "lora_config" not in plain and "enable_lora" not in plain["engine_kwargs"]

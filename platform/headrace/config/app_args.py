"""Turns the configuration into the arguments of `headrace.app:build_app`.

The builder takes the arguments of `ray.serve.llm:build_pd_openai_app`, which are two `LLMConfig`s,
and a `headrace` section. Two of vLLM's defaults are changed here. KV that does not arrive is
recomputed, where vLLM would fail the request. The size of the KV cache is passed in bytes, where
`VLLM_CPU_KVCACHE_SPACE` takes whole GiB only.
"""

from __future__ import annotations

from typing import Any

from headrace.config.machine import cpu_computes_bfloat16
from headrace.config.models import MODEL_SECTIONS, merge
from headrace.config.schema import AppSection, HeadraceConfig, RoleSettings

HEALTH_CHECK_PERIOD_S = 2.0


def to_app_args(config: HeadraceConfig, operator_key_hash: str | None = None) -> dict[str, Any]:
    """Return plain, JSON-able arguments for `build_app`.

    Args:
        operator_key_hash: hash of a key with the role admin, for the command line's own requests.
    """
    gateway = config.gateway.model_dump()
    if operator_key_hash is not None:
        gateway["operator_key_hash"] = operator_key_hash
    section = config.model_dump(include=set(AppSection.model_fields)) | {"gateway": gateway}
    if not config.models:
        return {**_llm_configs(config), "headrace": section}
    own = set(AppSection.model_fields) & set(MODEL_SECTIONS)
    models = {
        key: {**_llm_configs(model, key), "headrace": model.model_dump(include=own)}
        for key, model in config.served_models().items()
    }
    return {"models": models, "headrace": section}


def _llm_configs(config: HeadraceConfig, key: str = "") -> dict[str, Any]:
    """Return the `LLMConfig`s of one model's roles. `key`: its name in `models`."""
    roles = ("prefill", "decode")
    return {f"{role}_config": llm_config(config, role, key) for role in roles}


def llm_config(config: HeadraceConfig, name: str, key: str = "") -> dict[str, Any]:
    """Return one role's `LLMConfig` as plain data.

    Args:
        config: the configuration of one model.
        name: the role.
        key: the model's name in `models`; empty if it is the only one.
    """
    role = config.roles()[name]
    args: dict[str, Any] = {
        "model_loading_config": {
            "model_id": config.model.id,
            "model_source": config.model.source or config.model.id,
        },
        "accelerator_config": {"kind": "gpu" if role.gpus else "cpu"},
        "placement_group_config": _placement(role),
        "deployment_config": {
            **_replicas(config, name, key),
            # The replica actor runs in the first bundle and reserves nothing more.
            "ray_actor_options": {"num_cpus": 0},
            # Serve replaces a replica after three failures in a row: after 6 s, not 30 s.
            "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        },
        "runtime_env": {"env_vars": _environment(role)},
        "engine_kwargs": _engine(config, role),
    }
    if config.model.adapters_path is not None:
        args["lora_config"] = {"dynamic_lora_loading_path": config.model.adapters_path}
    if role.accelerator_type is not None:
        args["accelerator_type"] = role.accelerator_type
    return args


def _replicas(config: HeadraceConfig, name: str, key: str) -> dict[str, Any]:
    """Return Serve's options for the number of a role's replicas."""
    role = config.roles()[name]
    if role.autoscaling is None:
        return {"num_replicas": role.replicas}
    bounds = {each: one.bounds for each, one in config.roles().items()}
    first = role.autoscaling.within(role.replicas)
    return {"autoscaling_config": config.autoscaling.serve_config(name, first, bounds, key)}


def _placement(role: RoleSettings) -> dict[str, Any]:
    """Return what a replica reserves in Ray."""
    bundles = _bundles(role)
    if len(bundles) == 1:
        return {"bundles": bundles}
    # NixlConnector finds all tensor parallel ranks of an engine at one address.
    return {"bundles": bundles, "strategy": "STRICT_PACK"}


def _bundles(role: RoleSettings) -> list[dict[str, float]]:
    if role.gpus == 0:
        return [{"CPU": role.cpus, **role.resources}]
    bundle: dict[str, float] = {"GPU": 1, **role.resources}
    if role.cpus:
        bundle["CPU"] = role.cpus
    return [dict(bundle) for _ in range(role.gpus)]


def _environment(role: RoleSettings) -> dict[str, str]:
    # Block hashes must be the same in all processes.
    # OpenAI's limit on `n`; vLLM's own would let one request hold the engine for minutes.
    env = {"PYTHONHASHSEED": "0", "VLLM_MAX_N_SEQUENCES": "128"}
    if role.gpus == 0:
        env |= {
            "OMP_NUM_THREADS": str(role.threads),
            # Binding threads to cores needs a machine that runs nothing else.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Otherwise the first sampled request waits 2 to 9 s for a C++ compiler, or fails.
            "TORCH_COMPILE_DISABLE": "1",
        }
    return env | role.env


def _engine(config: HeadraceConfig, role: RoleSettings) -> dict[str, Any]:
    engine: dict[str, Any] = {
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cuda" if role.gpus else "cpu",
            "kv_load_failure_policy": "recompute",
        }
    }
    if role.gpus == 0:
        engine["enforce_eager"] = True  # compiling for the CPU takes minutes and gains little
        if not cpu_computes_bfloat16():
            engine["dtype"] = "float32"
    if config.model.adapters or config.model.adapters_path is not None:
        engine["enable_lora"] = True
    if config.model.adapters:
        modules = [{"name": name, "path": path} for name, path in config.model.adapters.items()]
        engine["lora_modules"] = modules
    if config.model.max_model_len is not None:
        engine["max_model_len"] = config.model.max_model_len
    if role.kv_cache_bytes is not None:
        engine["kv_cache_memory_bytes"] = role.kv_cache_bytes
    return merge(engine, role.engine)

"""LoRA adapters in an app's arguments, in Ray's form: `lora_config`, and vLLM's engine arguments.

With a gateway, the replicas load adapters by themselves (`headrace_engine.adapters`), so vLLM gets
the settings of its LoRA layers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_engine.adapters.settings import (
    FETCH_TIMEOUT_S,
    MAX_ADAPTERS,
    AdapterSettings,
    normal_source,
    why_bad_name,
)

MODULES = "lora_modules"
AGREED = ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype")
"""Engine arguments that both roles have with the same value."""
DEFAULT_MAX_LORAS = 4
"""Adapters in one step; vLLM's own default lets one adapter run at a time."""
_PYARROW = "pyarrow-"


def with_readable_paths(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ray's arguments with each `dynamic_lora_loading_path` in a form that Ray accepts.

    Ray takes URIs of object stores, and others with the prefix `pyarrow-`. A folder and `hf://` get
    that prefix here.
    """
    changed = dict(args)
    for name in ("prefill_config", "decode_config"):
        config = args.get(name)
        lora = config.get("lora_config") if isinstance(config, Mapping) else None
        path = lora.get("dynamic_lora_loading_path") if isinstance(lora, Mapping) else None
        if isinstance(path, str) and isinstance(config, Mapping) and isinstance(lora, Mapping):
            lora = {**lora, "dynamic_lora_loading_path": _readable(path)}
            changed[name] = {**config, "lora_config": lora}
    return changed


def _readable(path: str) -> str:
    if path.startswith(("/", "~")):
        return f"{_PYARROW}file://{Path(path).expanduser()}"
    return _PYARROW + path if path.startswith(("hf://", "file://")) else path


def take_adapters(pd: Any, group: str = "") -> AdapterSettings | None:
    """Take a model's adapters out of its arguments, and set both engines' LoRA layers.

    Args:
        pd: the validated arguments (`PDServingArgs`); its engine arguments are changed.
        group: the model's name in the configuration; empty if it is the app's only model.

    Returns:
        The adapters; None for a model without them.

    Raises:
        ValueError: the arguments contradict each other, or a name cannot be used.
    """
    roles = {"prefill_config": pd.prefill_config, "decode_config": pd.decode_config}
    engines = {name: config.engine_kwargs for name, config in roles.items()}
    lora = pd.decode_config.lora_config
    wanted = [engine.get("enable_lora") for engine in engines.values()]
    given = [engine.pop(MODULES, None) for engine in engines.values()]
    if lora is None and not any(given) and not any(wanted):
        return None
    for name, engine in engines.items():
        if engine.get("enable_lora") is False:
            raise ValueError(f"{name}.engine_kwargs.enable_lora: is false, but adapters are set")
    prefill, decode = given
    if prefill is not None and decode is not None and prefill != decode:
        raise ValueError(
            f"prefill_config.engine_kwargs.{MODULES}: differs from decode_config's; set it in one"
        )
    settings = AdapterSettings(
        model_id=pd.decode_config.model_id,
        sources=_sources(decode or prefill or (), pd.decode_config.model_id),
        loading_path=None if lora is None else lora.dynamic_lora_loading_path,
        fetch_timeout_s=FETCH_TIMEOUT_S if lora is None else lora.download_timeout_s,
        group=group,
    )
    if settings.loading_path is not None and settings.loading_path.startswith("azure://"):
        raise ValueError(
            "decode_config.lora_config.dynamic_lora_loading_path: azure:// is not read; "
            "write abfss://"
        )
    agreed = _agreed(engines)
    agreed.setdefault("max_loras", DEFAULT_MAX_LORAS)
    kept = agreed["max_loras"] if lora is None else lora.max_num_adapters_per_replica
    agreed.setdefault("max_cpu_loras", max(kept, len(settings.sources), agreed["max_loras"]))
    if not agreed["max_loras"] <= agreed["max_cpu_loras"] <= MAX_ADAPTERS:
        raise ValueError(
            "decode_config.engine_kwargs.max_cpu_loras: must be from max_loras to "
            f"{MAX_ADAPTERS}, got {agreed['max_cpu_loras']}"
        )
    for engine in engines.values():
        engine.update(agreed, enable_lora=True)
    return settings


def _agreed(engines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the LoRA settings of both engines; one that only one role has holds for both."""
    prefill, decode = engines["prefill_config"], engines["decode_config"]
    for name in AGREED:
        if name in prefill and name in decode and prefill[name] != decode[name]:
            raise ValueError(
                f"prefill_config.engine_kwargs.{name}: must be decode_config's "
                f"{decode[name]!r}, got {prefill[name]!r}"
            )
    both = {**prefill, **decode}
    return {name: both[name] for name in AGREED if both.get(name) is not None}


def _sources(modules: Any, model_id: str) -> dict[str, str]:
    """Return the source of each of vLLM's `lora_modules`, by name."""
    where = f"decode_config.engine_kwargs.{MODULES}"
    if not isinstance(modules, (list, tuple)):
        raise ValueError(f"{where}: must be a list of {{name, path}}")
    sources: dict[str, str] = {}
    for number, module in enumerate(modules):
        at = f"{where}.{number}"
        name, path = (
            (module.get(key) for key in ("name", "path")) if _is_mapping(module) else (0, 0)
        )
        if not isinstance(name, str) or not isinstance(path, str) or not path:
            raise ValueError(f"{at}: must be {{name, path}}, both text")
        if more := set(module) - {"name", "path", "base_model_name"}:
            raise ValueError(f"{at}.{sorted(more)[0]}: is not supported")
        if why := why_bad_name(name, model_id):
            raise ValueError(f"{at}.name: {why}")
        if name in sources:
            raise ValueError(f"{at}.name: {name!r} is there twice")
        sources[name] = normal_source(path)
    if len(sources) > MAX_ADAPTERS:
        raise ValueError(f"{where}: at most {MAX_ADAPTERS} adapters, got {len(sources)}")
    return sources


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)

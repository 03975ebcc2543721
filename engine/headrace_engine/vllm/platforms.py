"""The kind of device that this process's engine computes on, and the start of engines on CPUs.

`tests/unit/test_contracts_cpu_worker.py` says when `let_scan_pass` can go, and
`tests/unit/test_contracts_cpu_limits.py` when vLLM lifts a limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from headrace_engine.serving.model_limits import PREFIX_CACHE, CpuLimit, cpu_limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def runs_on_cpu() -> bool:
    """Return whether this process's engine computes on the CPU."""
    return bool(current_platform.is_cpu())


def runs_on_cuda() -> bool:
    """Return whether this process's engine runs on a CUDA GPU."""
    return bool(current_platform.is_cuda())


def runs_on_cuda_or_rocm() -> bool:
    """Return whether this process's engine runs on a GPU that vLLM's Triton attention supports."""
    return bool(current_platform.is_cuda_alike())


def cpu_arguments(config: VllmConfig) -> dict[str, Any]:
    """Return vLLM's engine arguments that an engine on CPUs needs for its model, and that its
    configuration does not have; empty for a GPU engine.

    Args:
        config: of an engine that has not started.
    """
    cache = config.cache_config
    return {
        name: value
        for limit in _limits(config)
        for name, value in limit.arguments.items()
        if getattr(cache, name) != value
    }


def why_no_prefix_cache(config: VllmConfig) -> str | None:
    """Return why an engine with this configuration has no prefix cache; None if it has one."""
    if config.cache_config.enable_prefix_caching:
        return None
    known = [limit.why for limit in _limits(config) if limit.part == PREFIX_CACHE]
    return known[0] if known else f"vLLM has none for {config.model_config.architecture}"


def _limits(config: VllmConfig) -> list[CpuLimit]:
    if not runs_on_cpu():
        return []
    return cpu_limits(config.model_config.hf_text_config.to_dict())


def let_scan_pass() -> None:
    """Let a CPU worker start beside numba: entry point `headrace_cpu_worker` of
    `vllm.general_plugins`.

    vLLM 0.32 replaces Triton kernels in all loaded modules when such a worker starts
    (`vllm.triton_utils.dispatcher`), and calls `vars()` on each of their objects. llvmlite, on
    which numba stands, answers that for its library with a function and not a dict, and the worker
    ends with "'_lib_fn_wrapper' object has no attribute 'get'".
    """
    from llvmlite.binding import ffi  # type: ignore[import-untyped]

    ffi.lib._fntab["__dict__"] = {}

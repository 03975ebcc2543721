"""The kind of device that this process's engine computes on, and the start of a CPU worker.

`tests/unit/test_contracts_cpu_worker.py` says when `let_scan_pass` can go.
"""

from __future__ import annotations

from vllm.platforms import current_platform


def runs_on_cpu() -> bool:
    """Return whether this process's engine computes on the CPU."""
    return bool(current_platform.is_cpu())


def runs_on_cuda() -> bool:
    """Return whether this process's engine runs on a CUDA GPU."""
    return bool(current_platform.is_cuda())


def runs_on_cuda_or_rocm() -> bool:
    """Return whether this process's engine runs on a GPU that vLLM's Triton attention supports."""
    return bool(current_platform.is_cuda_alike())


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

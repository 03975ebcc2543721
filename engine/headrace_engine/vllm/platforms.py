"""The kind of device that this process's engine computes on."""

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

"""Has vLLM for CPUs attend sparsely, and drop KV, as on a GPU, in Triton's interpreter.

The kernels, the backend, the worker, vLLM's scheduler and its model runner are those of a GPU. What
is not: the platform's answers, and that the backend takes the place of vLLM's CPU attention, since
vLLM for CPUs knows no `CUSTOM`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

MIN_TOKENS = 100
"""Rows with less KV are dense. The interpreter is slow."""
MIN_FREED_TOKENS, SEGMENT_TOKENS = 128, 96
"""Of compressed contexts, short ones for the same reason."""


def take_for_card() -> None:
    """With `TRITON_INTERPRET=1`, before vLLM's kernels are imported."""
    from tests.support.seen_triton import have_vllm_see_triton

    have_vllm_see_triton()
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from headrace_decode.attention import page_counts
    from headrace_decode.attention_backend import cuda_runtime, worker
    from headrace_decode.compression.engine import compression_job
    from headrace_engine.vllm.attention import cuda as attention_cuda
    from headrace_engine.vllm.attention import paged_kernels as kernels

    def use_backend(config: Any, path: str) -> None:
        register_backend(AttentionBackendEnum.CPU_ATTN, path)

    attention_cuda.current_platform = SimpleNamespace(has_device_capability=lambda least: True)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    worker.runs_on_cuda = lambda: True
    cuda_runtime.register_cuda_backend = use_backend
    page_counts.MIN_TOKENS = MIN_TOKENS
    compression_job.MIN_FREED_TOKENS = MIN_FREED_TOKENS
    compression_job.SEGMENT_TOKENS = SEGMENT_TOKENS
    kernels.SEGMENTS = triton_attn.NUM_PAR_SOFTMAX_SEGMENTS = 2

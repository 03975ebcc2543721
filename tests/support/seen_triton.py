"""vLLM for CPUs hides Triton from its own kernels."""

from __future__ import annotations


def have_vllm_see_triton() -> None:
    """Before its kernels are imported."""
    import triton
    import triton.language as tl
    import vllm.triton_utils as seen

    seen.HAS_TRITON, seen.triton, seen.tl = True, triton, tl

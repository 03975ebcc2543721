"""Host memory that a GPU's kernels read and write at its address."""

from __future__ import annotations

import torch
from torch import Tensor

MAPPED = 3
"""`cudaHostRegisterPortable | cudaHostRegisterMapped`."""


def allocate_pinned(size_bytes: int, device: torch.device) -> Tensor:
    """Allocate host memory, and register it with a GPU for as long as the process lives: uint8 [n].
    On a CPU, kernels are interpreted, and read any memory.

    PyTorch's own pinned memory is rounded up to a power of 2, so it is not used.

    Raises:
        MemoryError: the memory cannot be allocated or registered; the text says why.
    """
    try:
        memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise MemoryError(f"{size_bytes} bytes of host memory cannot be allocated") from error
    if device.type == "cuda" and size_bytes:
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size_bytes, MAPPED))
        if code:
            raise MemoryError(
                f"{size_bytes} bytes of host memory cannot be registered with the GPU (CUDA error "
                f"{code}); see docs/gpu.md"
            )
    return memory

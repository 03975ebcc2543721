"""Copies small numbers of a step from the host to the device that computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def copy_to_device(numbers: NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    """Copy numbers to a device, without waiting for the copy."""
    here = torch.from_numpy(numbers)
    if device.type == "cuda":
        here = here.pin_memory()
    return here.to(device, non_blocking=True)


def padded(count: int) -> int:
    """Return the next multiple of 16. Triton compiles a kernel again for sizes that are not."""
    return -(-count // 16) * 16

"""Numpy memory in place of an engine's tensors."""

from __future__ import annotations

import numpy as np


class Tensor:
    """The part of torch.Tensor that a layout reads, over numpy memory."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.shape = data, data.shape

    def data_ptr(self) -> int:
        return int(self.data.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.data.itemsize for step in self.data.strides)

    def element_size(self) -> int:
        return self.data.itemsize

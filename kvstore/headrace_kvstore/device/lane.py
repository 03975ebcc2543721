"""One queue of copies between host memory and a device: a stream, and device memory for blocks on
their way.

Copies of host memory that the device knows (`register`) run at the bus's speed beside everything
else. What is queued is done in order, so a piece of the way's memory may be used again as soon as
what reads it is queued. On a CPU there is no queue, and everything is done when its call returns:
that is how lanes are tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_kvstore import _vllm_compat, checksum
from headrace_kvstore.device.clock import Clock, CudaClock, HostClock

logger = logging.getLogger("headrace.kvstore")


class Lane:
    """Used by one thread at a time, within `alone`.

    Args:
        device: where the cache is.
        staging_bytes: device memory for blocks on their way.

    Attributes:
        clock: of the stream.
        staging: uint8 [staging_bytes], on the device.
    """

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if cuda else None
        self._lock = threading.Lock()
        self.clock: Clock = CudaClock(device, self._stream) if cuda else HostClock()
        self.staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)

    def wait_for_current(self) -> None:
        """What is queued from here on begins behind what the calling thread has queued."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Queue work; no other thread does meanwhile."""
        stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with self._lock, stream:
            yield

    def copy(self, dst: np.ndarray, src: np.ndarray, size_bytes: int) -> None:
        """Queue copies of equal size across the bus.

        Args:
            dst, src: u64 [n], addresses in host memory and on the device, either way.
        """
        if self._stream is None:
            checksum.copy(dst, src, size_bytes)
            return
        sizes = torch.full((len(dst),), size_bytes, dtype=torch.int64)
        _vllm_compat.copy_batch(_signed(dst), _signed(src), sizes)

    def upload(self, numbers: np.ndarray) -> Tensor:
        """Queue the copy of u64 or i64 numbers to the device, as int64."""
        there = _signed(numbers)
        if self._stream is None:
            return there
        return there.pin_memory().to(self._device, non_blocking=True)

    def fetch(self, numbers: Tensor) -> Callable[[], np.ndarray]:
        """Queue the copy of numbers to the host; the result waits until they are there, and so
        until all is done that was queued before."""
        if self._stream is None:
            return lambda: numbers.numpy()
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)

        def result() -> np.ndarray:
            done.synchronize()
            found: np.ndarray = host.numpy()
            return found

        return result

    def drain(self) -> None:
        """Return when all that was queued is done."""
        if self._stream is not None:
            self._stream.synchronize()


class Registered:
    """Host memory that the device copies from and to directly, until `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: list[int] = []

    def add(self, address: int, size_bytes: int) -> None:
        """Register memory, which stays mapped until `close`. Copies of memory that cannot be
        registered are slower, and right."""
        error = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)
        if int(error) == 0:
            self._addresses.append(address)
        else:
            logger.warning(
                "%d bytes of host memory cannot be registered with the GPU (CUDA error %s), so KV "
                "is copied at the speed of pageable memory; see docs/gpu.md",
                *(size_bytes, error),
            )
            # CUDA tells an error once more, at the next launch: let it be this one.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device)

    def remove(self, address: int) -> None:
        """Give back the memory at this address, if it was registered; nothing copies it."""
        if address in self._addresses:
            self._addresses.remove(address)
            torch.cuda.cudart().cudaHostUnregister(address)

    def close(self) -> None:
        """Give the memory back; nothing copies any more."""
        addresses, self._addresses = self._addresses, []
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)


def _signed(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers).astype(np.int64))

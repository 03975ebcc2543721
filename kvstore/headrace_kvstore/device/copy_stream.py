"""One queue of copies between host memory and a device: a stream, and device memory for blocks on
their way.

Copies of host memory that is registered with the device (`RegisteredMemory`) run at the bus's speed
beside other work. The queue runs in order, so a piece of the staging memory may be used again as
soon as the work that reads it is queued. On a CPU there is no queue, and each call does its work
before it returns; lanes are tested in this way on machines without a GPU.
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

from headrace_kvstore.blocks import checksum
from headrace_kvstore.device.clock import Clock, CudaClock, HostClock

logger = logging.getLogger("headrace.kvstore")

CopyBatch = Callable[[Tensor, Tensor, Tensor], None]


class CopyStream:
    """Queue of copies, used by one thread at a time, within `exclusive`.

    Args:
        device: where the cache is.
        staging_bytes: device memory for blocks on their way.
        copy_batch: (destinations, sources, sizes), int64 tensors in host memory -> queues the
            copies on the current CUDA stream. Used on a CUDA device only.

    Attributes:
        clock: of the stream.
        staging: uint8 [staging_bytes], on the device.
    """

    def __init__(self, device: torch.device, staging_bytes: int, copy_batch: CopyBatch) -> None:
        self._copy_batch = copy_batch
        cuda = device.type == "cuda"
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if cuda else None
        self._lock = threading.Lock()
        self.clock: Clock = CudaClock(device, self._stream) if cuda else HostClock()
        self.staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)

    def wait_for_current(self) -> None:
        """Make later work of this lane wait for all work that the calling thread has queued."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lane to queue work, while no other thread may."""
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
        self._copy_batch(_signed(dst), _signed(src), sizes)

    def upload(self, numbers: np.ndarray) -> Tensor:
        """Queue the copy of u64 or i64 numbers to the device, as int64."""
        there = _signed(numbers)
        if self._stream is None:
            return there
        return there.pin_memory().to(self._device, non_blocking=True)

    def fetch(self, numbers: Tensor) -> Callable[[], np.ndarray]:
        """Queue the copy of numbers to the host. Calling the result waits for them, and thus for
        all work queued before."""
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
        """Wait until all queued work is done."""
        if self._stream is not None:
            self._stream.synchronize()


class RegisteredMemory:
    """Host memory that the device copies from and to directly, until `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: list[int] = []

    def add(self, address: int, size_bytes: int) -> None:
        """Register memory, which stays mapped until `close`. If it cannot be registered, copies are
        slower but correct."""
        error = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)
        if int(error) == 0:
            self._addresses.append(address)
        else:
            logger.warning(
                "%d bytes of host memory cannot be registered with the GPU (CUDA error %s), so KV "
                "is copied at the speed of pageable memory; see docs/gpu.md",
                *(size_bytes, error),
            )
            # CUDA reports an error again at the next launch: make that launch here.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device)

    def remove(self, address: int) -> None:
        """Unregister the memory at this address, if it was registered; no copy may use it."""
        if address in self._addresses:
            self._addresses.remove(address)
            torch.cuda.cudart().cudaHostUnregister(address)

    def close(self) -> None:
        """Unregister all memory; no copy may use it any more."""
        addresses, self._addresses = self._addresses, []
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)


def _signed(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers).astype(np.int64))

"""Ways of a block from a file into an engine's cache, and which of them an engine takes.

    BounceBufferPath    the file -> this process's memory -> one copy into the cache, summed on the
                        way
    GdsPath  the file -> the device's memory (NIXL's GDS_MT) -> one kernel into the cache, which
               sums or decodes it

For a cache on a device, the host's way crosses the bus from memory that is registered with the
device. Which way is faster depends on disk, bus and driver. So the engine's first load from files
measures both (`PathBenchmark`), on its own blocks. The direct way is used only if it is faster and
brings the same bytes as the host's way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.vllm.kv_cache import copy_batch
from headrace_kvstore.device.copy_stream import CopyStream
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.nixl_file_io import NixlFileIo
from headrace_kvstore.nvme.record import PAGE_BYTES
from headrace_kvstore.nvme.segment import (
    BlockReader,
    Location,
    PendingIo,
    SegmentFiles,
    page_memory,
)

if TYPE_CHECKING:  # needs Triton, which is there where a GPU is
    from headrace_engine.connector.caches.device_cache import DeviceCache

DIRECT_BYTES = 64 * 2**20
"""Size of the device memory in which direct reads land; vLLM leaves little free."""
TRIAL_BYTES, TRIAL_S = 16 * 2**20, 0.3
"""Maximum size of one read, and maximum duration of a whole trial."""
MIN_TURNS, MAX_TURNS = 3, 7
Name = Literal["direct", "host"]


class ReadPath(Protocol):
    """Way of layers: where they land, and how they get from there into the cache."""

    reader: BlockReader

    def room(self, blocks: int, depth: int) -> np.ndarray:
        """Return addresses, u64 [layers, blocks], for as many layers of some blocks as fit, at most
        `depth`.

        Raises:
            ValueError: not one layer fits.
        """
        ...

    def put(
        self, layer: int, room: np.ndarray, blocks: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        """Move a layer that has landed into the cache; return its checksums, as `EngineCache.load`.

        Args:
            room: u64 [n], a row of `room`.
        """
        ...

    def close(self) -> bool:
        """End all reads; return False if a disk that hangs may still write to this way's memory."""
        ...


def rooms(address: int, size_bytes: int, blocks: int, layer_bytes: int, depth: int) -> np.ndarray:
    """Return addresses as `ReadPath.room`, in memory from `address` on; each layer of a block
    begins a page."""
    stride = -(-layer_bytes // PAGE_BYTES) * PAGE_BYTES
    fitting = min(depth, size_bytes // max(1, blocks * stride))
    if not fitting:
        raise ValueError(f"{blocks} blocks of {layer_bytes} bytes a layer: staging too small")
    offsets = np.arange(fitting * blocks, dtype=np.uint64) * np.uint64(stride)
    return np.uint64(address) + offsets.reshape(fitting, blocks)


class BounceBufferPath:
    """Way through page-aligned memory of this process."""

    def __init__(self, cache: EngineCache, staging_bytes: int, file_io: FileIo) -> None:
        self._cache, self._file_io = cache, file_io
        self.reader = BlockReader(file_io)
        self._memory, self._address = page_memory(-(-staging_bytes // PAGE_BYTES) * PAGE_BYTES)
        cache.register(self._address, len(self._memory))

    def room(self, blocks: int, depth: int) -> np.ndarray:
        size = self._cache.stored_layer_bytes
        return rooms(self._address, len(self._memory), blocks, size, depth)

    def put(
        self, layer: int, room: np.ndarray, blocks: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        # `load` adds the layer's place in a payload to the addresses.
        first = self._cache.columns(layer).start
        before = np.uint64(first * self._cache.part_bytes)
        return self._cache.load(layer, blocks, room - before, seeds)

    def close(self) -> bool:
        if not self._file_io.close():
            return False
        self.reader.close()
        return True


class GdsPath:
    """Way straight into memory of the cache's device.

    Args:
        backend: NIXL's. POSIX reaches only host memory, and does the same with a cache there.
        size_bytes: size of the device memory in which reads land.

    Raises:
        Exception: this way cannot be used here; the text says why.
    """

    def __init__(self, cache: DeviceCache, backend: str, size_bytes: int = DIRECT_BYTES) -> None:
        if unaligned := _not_in_pages(cache):
            raise ValueError(unaligned)
        self._cache, device = cache, cache.device
        self._memory = torch.empty(size_bytes + PAGE_BYTES, dtype=torch.uint8, device=device)
        first = -self._memory.data_ptr() % PAGE_BYTES
        self._rows = self._memory[first : first + size_bytes]
        kind: Literal["VRAM", "DRAM"] = "VRAM" if device.type == "cuda" else "DRAM"
        with current(device):
            self._file_io = NixlFileIo(backend, kind, device.index or 0)
            self._file_io.register(self._rows.data_ptr(), size_bytes)
        files = SegmentFiles(before_close=self._file_io.deregister)
        self.reader = BlockReader(_OnDevice(self._file_io, device), files)

    def room(self, blocks: int, depth: int) -> np.ndarray:
        size = self._cache.stored_layer_bytes
        return rooms(self._rows.data_ptr(), len(self._rows), blocks, size, depth)

    def put(
        self, layer: int, room: np.ndarray, blocks: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        return self._cache.take(layer, blocks, self.landed(room), seeds)

    def holds(self, blocks: int) -> bool:
        """Whether a layer of so many blocks fits."""
        return blocks * self._cache.stored_layer_bytes <= len(self._rows)

    def landed(self, room: np.ndarray) -> torch.Tensor:
        """Return the memory of a row of `room`, uint8 [n, bytes of a layer]."""
        size, first = self._cache.stored_layer_bytes, int(room[0]) - self._rows.data_ptr()
        return self._rows[first : first + len(room) * size].view(len(room), size)

    def close(self) -> bool:
        if not self._file_io.close():
            return False
        self.reader.close()
        return True


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is the thread's current device; a new thread's is the
    machine's first."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _OnDevice:
    """File reader that starts reads with the device current, as CUDA's libraries require."""

    def __init__(self, file_io: NixlFileIo, device: torch.device) -> None:
        self._file_io, self._device = file_io, device

    def read(self, addresses: Any, fds: Any, offsets: Any, lengths: Any) -> PendingIo:
        with current(self._device):
            return self._file_io.read(addresses, fds, offsets, lengths)


def _not_in_pages(cache: EngineCache) -> str:
    """Return why layers cannot be read into a device, or "": GPUDirect Storage reads whole
    pages."""
    held, size = cache.held, cache.part_bytes
    if any(count * size % PAGE_BYTES for count in (held.parts, held.first, held.count)):
        return f"parts of {size} bytes are not whole pages of {PAGE_BYTES}"
    return ""


@dataclass
class PathBenchmark:
    """Durations of reading the same blocks on both ways.

    Attributes:
        bytes: size of one read.
        host_s, direct_s: seconds of each read on either way, which take turns.
        equal: whether both ways brought the same bytes.
        failed: why the direct way could not be tried; "" if it was.
    """

    bytes: int
    host_s: list[float] = field(default_factory=list)
    direct_s: list[float] = field(default_factory=list)
    equal: bool = True
    failed: str = ""

    def choice(self) -> tuple[Name, str]:
        """Return the way to use, and why, in words. Each way counts with its median."""
        if self.failed:
            return "host", f"the direct way failed: {self.failed}"
        if not self.equal:
            return "host", "the direct way's bytes are not the file's"
        if min(len(self.host_s), len(self.direct_s)) < MIN_TURNS:
            turns = min(len(self.host_s), len(self.direct_s))
            return "host", f"{turns} turns in {TRIAL_S} s are too few to tell"
        host = self.bytes / statistics.median(self.host_s) / 1e9
        direct = self.bytes / statistics.median(self.direct_s) / 1e9
        name: Name = "direct" if direct > host else "host"
        return name, f"{direct:.2f} GB/s directly, {host:.2f} GB/s through host memory"


def tried(
    cache: DeviceCache, direct: GdsPath, places: Sequence[Location], file_io: FileIo
) -> PathBenchmark:
    """Read a layer of some blocks on both ways in turns, for at most `TRIAL_S`, into memory that no
    load uses. The later work, which is the same for both, is left out.

    Args:
        file_io: reads into host memory.
    """
    size = cache.stored_layer_bytes
    places = places[: max(1, min(TRIAL_BYTES // size, len(places)))]
    count = len(places)
    cuda = cache.device.type == "cuda"
    memory = torch.empty(count * size + PAGE_BYTES, dtype=torch.uint8, pin_memory=cuda)
    [here] = rooms(
        memory.data_ptr() + -memory.data_ptr() % PAGE_BYTES, count * size, count, size, 1
    )
    [there] = direct.room(count, 1)
    reader, lane = BlockReader(file_io), CopyStream(cache.device, count * size, copy_batch)
    copied = lane.staging.view(count, size)
    [targets] = rooms(lane.staging.data_ptr(), count * size, count, size, 1)
    parts = np.arange(cache.held.count, dtype=np.uint64) * np.uint64(cache.part_bytes)
    trial = PathBenchmark(count * size)
    first = cache.columns(0).start
    began_s = time.monotonic()

    def left_s() -> float:
        return began_s + TRIAL_S - time.monotonic()

    try:
        while len(trial.direct_s) < MAX_TURNS and left_s() > 0:
            at_s = time.perf_counter()
            read = reader.read(places, np.add.outer(here, parts), first_layer=first)
            if not read.wait().all():
                break
            with lane.exclusive():
                lane.copy(targets, here, size)
            lane.drain()
            trial.host_s.append(time.perf_counter() - at_s)
            at_s = time.perf_counter()
            read = direct.reader.read(places, np.add.outer(there, parts), first_layer=first)
            if not read.wait(max(TRIAL_S, left_s())).all():
                trial.failed = "NIXL told of an error"
                break
            trial.direct_s.append(time.perf_counter() - at_s)
            trial.equal &= torch.equal(direct.landed(there), copied)
    except Exception as error:
        trial.failed = str(error) or repr(error)
    finally:
        reader.close()
    return trial

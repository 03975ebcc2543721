"""The NVMe tier against NIXL's POSIX backend alone, on the same disk and with the same bytes.

Both read and write 46 blocks of 5.9 MB, from and to page-aligned memory through O_DIRECT. The raw
arm is one NIXL agent with the POSIX backend, one transfer with one piece a block, a poll every 50
microseconds. The tier's reads also find the blocks, go through the I/O threads in groups, and
verify every layer's checksum; its writes also write headers and publish.

Cold: O_DIRECT neither reads nor fills the page cache, and each file is dropped from it before each
read (fdatasync, POSIX_FADV_DONTNEED), which `mincore` confirms. What a hypervisor or the disk
itself caches cannot be dropped from here, and is the same for both. Writes go to newly allocated
files and are not synced, as the tier does it by default. `nvme.warm_buffered_gb_s` is the same read
by plain `preadv` out of the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kvstore.stage import BLOCKS, LAYERS, Stage
from benchmarks.kvstore.timing import CannotRun, Figures, ratios, seconds, take_turns
from headrace_kvstore.blocks.checksum import block_seed, checksum, layer_seeds
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.record import BlockShape, WriteRequest
from headrace_kvstore.nvme.segment import Location, page_memory

ROUNDS, QUICK_ROUNDS = 12, 3
GROUP_BLOCKS = 2
"""Blocks read at once; all groups are asked for first, then each is verified as it comes."""
PIECES = {"raw": 1, "raw_layers": LAYERS}
"""Pieces a block in the two ways to use NIXL alone; the faster one is the yardstick."""
POLL_S = 50e-6
_POOL = {"ios_pool_size": "2048"}
POSIX_OPTIONS = {
    "READ": {"use_aio": "true", "kernel_queue_size": "128", **_POOL},
    "WRITE": {"use_uring": "true", "kernel_queue_size": "1024", **_POOL},
}
"""The fastest of NIXL's queues here, for each direction."""
WHOLE_FILE_BYTES = 1 << 62
FOLDER = Path(os.environ.get("TMPDIR", "/var/tmp"))


def measure(figures: Figures, quick: bool = False) -> None:
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=FOLDER))
    disk = Disk(folder)
    try:
        disk.write_tier()
        _measure(figures, disk, QUICK_ROUNDS if quick else ROUNDS)
    finally:
        disk.close()
        shutil.rmtree(folder)


def _measure(figures: Figures, disk: Disk, rounds: int) -> None:
    arms: dict[str, Callable[[], float]] = {
        "load": lambda: disk.cold(lambda: disk.read_tier(verify=True)),
        "load_unverified": lambda: disk.cold(lambda: disk.read_tier(verify=False)),
    }
    for name, pieces in PIECES.items():
        arms[name] = partial(disk.cold, partial(disk.read_raw, pieces))
    taken = take_turns(arms, rounds)
    raw = min(PIECES, key=lambda name: sorted(taken[name])[rounds // 2])
    for arm in ("load", "load_unverified"):
        figures.add(f"nvme.{arm}_vs_raw", ratios(taken[raw], taken[arm]))
        figures.bandwidth(f"nvme.{arm}_gb_s", disk.size_bytes, taken[arm])
    figures.bandwidth("nvme.raw_read_gb_s", disk.size_bytes, taken[raw])
    warm = take_turns({"warm": lambda: seconds(disk.read_buffered)}, max(3, rounds // 3))
    figures.bandwidth("nvme.warm_buffered_gb_s", disk.size_bytes, warm["warm"])

    written = take_turns({"tier": disk.write_tier, "raw": disk.write_raw}, max(3, rounds // 2))
    figures.add("nvme.save_vs_raw", ratios(written["raw"], written["tier"]))
    figures.bandwidth("nvme.save_gb_s", disk.size_bytes, written["tier"])
    figures.bandwidth("nvme.raw_write_gb_s", disk.size_bytes, written["raw"])
    figures.note(
        "nvme",
        f"{BLOCKS} blocks of 5.9 MB, O_DIRECT, files dropped from the page cache before each read "
        f"(verified), not synced after writes; NIXL alone reads in "
        f"{'blocks' if raw == 'raw' else 'layers'}, its faster way here; warm_buffered is preadv "
        "from the page cache",
    )


class Disk:
    """A tier in a folder, memory for its blocks, and a NIXL agent beside it.

    Raises:
        CannotRun: NIXL or O_DIRECT is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with Stage() as stage:
            self.block_bytes = stage.layout.block_bytes
            layer_bytes = stage.layout.layer_bytes
        self.file_io = FileIo()
        self.shape = BlockShape(os.urandom(16), LAYERS, layer_bytes)
        self.size_bytes = BLOCKS * self.block_bytes
        self.memory, self.address = page_memory(self.size_bytes)
        rng = np.random.default_rng(0)
        self.memory[:] = rng.integers(0, 256, self.size_bytes, dtype=np.uint8)
        self.target, self.target_address = page_memory(self.size_bytes)
        self.target[:] = 1
        self.tier: NvmeTier | None = None
        self.hashes: list[bytes] = []
        self._raw: dict[str, Any] = {}

    def write_tier(self) -> float:
        """Write all blocks to a new tier, and keep that one; seconds from the first write on."""
        if self.tier is not None:
            self.tier.close()
            shutil.rmtree(self.tier.folder)
        size = 2 * self.size_bytes + (64 << 20)
        folder = self.folder / uuid.uuid4().hex
        self.tier = NvmeTier.open(
            folder, 4 * size, size, self.file_io, writing_limit_bytes=2 * self.size_bytes
        )
        self.hashes = [os.urandom(32) for _ in range(BLOCKS)]
        addresses = self._layers(self.address)
        saves = [
            WriteRequest(
                each, int(row[0]), self._sums(self.shape.digest, each, 0, row), depth=depth
            )
            for depth, (each, row) in enumerate(zip(self.hashes, addresses, strict=True))
        ]
        tier = self.tier
        self._make_segment(tier)
        began = time.perf_counter()
        futures = tier.write(self.shape, saves)
        done = [future.result() for future in futures]
        spent = time.perf_counter() - began
        if not all(done):
            raise RuntimeError(f"not all blocks were written: {tier.stats()}")
        return spent

    def read_tier(self, verify: bool) -> None:
        """Read all blocks from the tier, in groups, verifying one while the next ones come."""
        assert self.tier is not None
        places = [self.tier.locate(self.shape.digest, each) for each in self.hashes]
        found = [place for place in places if place is not None]
        rows = self._layers(self.target_address)
        reads = [
            self.tier.read(
                found[i : i + GROUP_BLOCKS],
                rows[i : i + GROUP_BLOCKS],
                verify=self._verify if verify else None,
            )
            for i in range(0, len(found), GROUP_BLOCKS)
        ]
        good = sum(int(read.wait().sum()) for read in reads)
        if good != BLOCKS:
            raise RuntimeError(f"{good} of {BLOCKS} blocks came back")

    def read_raw(self, pieces: int) -> None:
        """Read the same payloads with a NIXL agent alone, each in so many pieces."""
        size = self.block_bytes // pieces
        fds = {path: self._direct(path) for path in {place.path for place in self._places()}}
        rows = [
            (self.target_address + number * self.block_bytes + i * size, place, i * size)
            for number, place in enumerate(self._places())
            for i in range(pieces)
        ]
        local = np.array([(address, size, 0) for address, _, _ in rows], np.uint64)
        remote = np.array(
            [(place.payload_offset + at, size, fds[place.path]) for _, place, at in rows], np.uint64
        )
        self._transfer("READ", local, remote, self.target_address)

    def write_raw(self) -> float:
        """Write the same bytes with a NIXL agent alone to a new file; seconds of the transfer."""
        path = self.folder / "raw"
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, self.size_bytes)
        os.close(fd)
        direct = self._direct(str(path), keep=False)
        steps = np.arange(BLOCKS, dtype=np.uint64) * np.uint64(self.block_bytes)
        sizes = np.full(BLOCKS, self.block_bytes, np.uint64)
        local = np.stack([np.uint64(self.address) + steps, sizes, 0 * steps], axis=1)
        remote = np.stack([steps, sizes, np.full(BLOCKS, direct, np.uint64)], axis=1)
        spent = seconds(lambda: self._transfer("WRITE", local, remote, self.address))
        self._agent("WRITE")["files"].pop(str(path))
        os.close(direct)
        return spent

    def read_buffered(self) -> None:
        """Read the same payloads with plain system calls through the page cache."""
        view = memoryview(self.target.data)
        for number, place in enumerate(self._places()):
            fd = os.open(place.path, os.O_RDONLY)
            try:
                begin, done = number * self.block_bytes, 0
                while done < self.block_bytes:
                    part = view[begin + done : begin + self.block_bytes]
                    done += os.preadv(fd, [part], place.payload_offset + done)
            finally:
                os.close(fd)

    def cold(self, read: Callable[[], None]) -> float:
        """Return the seconds of a read whose files are not in the page cache."""
        for path in {place.path for place in self._places()}:
            drop_from_page_cache(path)
        return seconds(read)

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
        self.file_io.close()
        self._raw.clear()

    def _make_segment(self, tier: NvmeTier) -> None:
        """Write one block: making the file is no part of what the clock of the raw write counts."""
        save = WriteRequest(os.urandom(32), self.address, np.zeros(LAYERS, np.uint64))
        for future in tier.write(self.shape, [save]):
            future.result()

    def _places(self) -> list[Location]:
        assert self.tier is not None
        places = [self.tier.locate(self.shape.digest, each) for each in self.hashes]
        return [place for place in places if place is not None]

    def _layers(self, start: int) -> np.ndarray:
        """Return the addresses u64 [blocks, layers]."""
        steps = np.arange(BLOCKS * LAYERS, dtype=np.uint64) * np.uint64(self.shape.layer_bytes)
        return (np.uint64(start) + steps).reshape(BLOCKS, LAYERS)

    def _verify(
        self, digest: bytes, block_hash: bytes, first: int, addresses: np.ndarray, size: int
    ) -> np.ndarray:
        return self._sums(digest, block_hash, first, addresses)

    def _sums(
        self, digest: bytes, block_hash: bytes, first: int, addresses: np.ndarray
    ) -> np.ndarray:
        seeds = layer_seeds(block_seed(digest, block_hash), LAYERS)
        return checksum(addresses, self.shape.layer_bytes, seeds[first : first + len(addresses)])

    def _agent(self, operation: str) -> dict[str, Any]:
        """Return a NIXL agent of the mover's own settings for a direction."""
        if operation not in self._raw:
            from nixl._api import nixl_agent, nixl_agent_config

            config = nixl_agent_config(enable_prog_thread=False, backends=[])
            agent = nixl_agent(f"bench-{uuid.uuid4()}", config)
            agent.create_backend("POSIX", POSIX_OPTIONS[operation])
            for address in (self.address, self.target_address):
                agent.register_memory([(address, self.size_bytes, 0, "")], mem_type="DRAM")
            self._raw[operation] = {"agent": agent, "files": {}}
        known: dict[str, Any] = self._raw[operation]
        return known

    def _direct(self, path: str, keep: bool = True) -> int:
        """Return an O_DIRECT descriptor that the agent knows."""
        known = self._agent("READ" if keep else "WRITE")
        if path not in known["files"]:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT)
            known["agent"].register_memory([(0, WHOLE_FILE_BYTES, fd, "")], mem_type="FILE")
            known["files"][path] = fd
        return int(known["files"][path])

    def _transfer(self, operation: str, local: np.ndarray, remote: np.ndarray, start: int) -> None:
        agent = self._agent(operation)["agent"]
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(local, mem_type="DRAM"),
            agent.get_xfer_descs(remote, mem_type="FILE"),
            agent.name,
        )
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            time.sleep(POLL_S)
            state = agent.check_xfer_state(handle)
        handle.release()
        if state == "ERR":
            raise RuntimeError(f"NIXL alone failed to {operation.lower()}")


def drop_from_page_cache(path: str) -> None:
    """Raise CannotRun if the file stays in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if (share := cached_share(fd)) > 0.01:
            raise CannotRun(f"{share:.0%} of a file stays in the page cache")
    finally:
        os.close(fd)


def cached_share(fd: int) -> float:
    """Return the share of a file's pages that are in the page cache."""
    size = os.fstat(fd).st_size
    if not size:
        return 0.0
    with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        first = np.frombuffer(mapped, np.uint8)
        resident = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(
            ctypes.c_void_p(first.ctypes.data),
            ctypes.c_size_t(size),
            ctypes.c_void_p(resident.ctypes.data),
        )
        del first
        return 1.0 if failed else float((resident & 1).mean())

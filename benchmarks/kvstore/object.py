"""The object tier against its own client's bare requests, to one S3 server on loopback.

46 blocks of 5.9 MB lie in one object each. "Bare" means the same client, the same objects and as
many requests at once, with answers dropped. "Through the tier" includes finding the blocks, copying
each layer to its place and comparing its checksum. Writes are packing, summing and putting, against
putting bytes that are ready.

`get_*` and `put_*` show the loss with small blocks: bare requests of 1, 4 and 16 MiB, one after the
other. The server is moto, in a separate process. It is slow; a real store is farther away, so the
cost of a request beyond its bytes is higher there.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.kvstore.stage import BLOCK_TOKENS, BLOCKS, HEAD_DIM, KV_HEADS, LAYERS
from benchmarks.kvstore.timing import CannotRun, Figures, ratios, seconds, take_turns
from headrace_kvstore.blocks.checksum import payload_sums
from headrace_kvstore.nvme.record import BlockShape, WriteRequest
from headrace_kvstore.objects.object_catalog import StoredObject
from headrace_kvstore.objects.object_client import StoreClient
from headrace_kvstore.objects.object_format import ObjectName, pack
from headrace_kvstore.objects.object_tier import REQUESTS, ObjectTier, Packed

ROUNDS, QUICK_ROUNDS = 9, 3
PUT_AT_ONCE = 2
"""Blocks that are written together: 12 MB."""
SIZES = (1, 4, 16)
"""MiB of single requests."""
SHAPE = BlockShape(b"headrace-object!", LAYERS, KV_HEADS * BLOCK_TOKENS * 2 * HEAD_DIM * 4)
TIMEOUT_S, START_S = 60.0, 60.0


def measure(figures: Figures, quick: bool = False) -> None:
    if missing := [name for name in ("moto", "obstore") if not importlib.util.find_spec(name)]:
        raise CannotRun(f"{' and '.join(missing)} not installed")
    with server() as endpoint:
        bench = Bench(endpoint)
        try:
            _measure(figures, bench, QUICK_ROUNDS if quick else ROUNDS)
        finally:
            bench.close()
    figures.note(
        "object",
        f"{BLOCKS} blocks of 5.9 MB from a moto server on loopback, {REQUESTS} requests at once",
    )


def _measure(figures: Figures, bench: Bench, rounds: int) -> None:
    reads = take_turns({"raw": bench.get, "load": bench.load}, rounds)
    figures.add("object.load_vs_raw", ratios(reads["raw"], reads["load"]))
    figures.bandwidth("object.load_gb_s", bench.size_bytes, reads["load"])
    figures.bandwidth("object.raw_get_gb_s", bench.size_bytes, reads["raw"])
    writes = take_turns({"raw": bench.put, "save": bench.save}, rounds)
    figures.add("object.save_vs_raw", ratios(writes["raw"], writes["save"]))
    figures.bandwidth("object.save_gb_s", bench.packed_bytes, writes["save"])
    for size in SIZES:
        one = bench.single(size * 2**20, rounds)
        for name, taken in one.items():
            figures.bandwidth(f"object.{name}_{size}MiB_gb_s", size * 2**20, taken)


class Bench:
    """The tier with all blocks in it, and its client beside it."""

    def __init__(self, endpoint: str) -> None:
        options = {
            "endpoint": endpoint,
            "access_key_id": "x",
            "secret_access_key": "x",
            "region": "us-east-1",
        }
        self.client = StoreClient("s3://bench/kv", options, TIMEOUT_S)
        self.tier = ObjectTier(self.client, "bench", 2**40, refresh_s=3600, timeout_s=TIMEOUT_S)
        self.tier.start()
        self._pool = ThreadPoolExecutor(REQUESTS)
        self._numbers = count()
        rng = np.random.default_rng(0)
        room = (2, BLOCKS, SHAPE.payload_bytes)
        self._memory = rng.integers(0, 256, room, dtype=np.uint8)
        self.size_bytes = BLOCKS * SHAPE.payload_bytes
        hashes = [rng.bytes(32) for _ in range(BLOCKS)]
        sources = self._addresses(0)
        self._saves = [
            WriteRequest(
                *(name, int(row[0])),
                payload_sums(SHAPE.digest, name, 0, row, SHAPE.layer_bytes),
            )
            for name, row in zip(hashes, sources, strict=True)
        ]
        self.tier.refreshed.wait(START_S)
        for save in self._saves:
            if not self.tier.put(self.tier.pack(SHAPE, [save])):
                raise RuntimeError(f"blocks were not written: {self.tier.stats()}")
        found = [self.tier.find(SHAPE.digest, name) for name in hashes]
        self._objects = [held for held in found if held is not None]
        self._sums = list(np.zeros((BLOCKS, LAYERS), np.uint64))
        self._ready = [data for _, data in self._packed()]
        self.packed_bytes = sum(map(len, self._ready))

    def load(self) -> float:
        """Return the seconds of reading all blocks through the tier."""

        def run() -> None:
            read = self.tier.read(self._objects, self._addresses(1), self._sums)
            if not read.wait().all():
                raise RuntimeError(f"blocks did not come back: {self.tier.stats()}")

        return seconds(run)

    def get(self) -> float:
        """Return the seconds of the same requests alone."""

        def one(held: StoredObject) -> None:
            self.client.get(held.text, 0, held.name.size_bytes)

        return seconds(lambda: list(self._pool.map(one, self._objects)))

    def save(self) -> float:
        """Return the seconds of packing and putting some blocks."""
        return seconds(lambda: self.tier.put(self._packed()))

    def put(self) -> float:
        """Return the seconds of putting as many bytes, as many requests at once."""

        def one(data: memoryview) -> None:
            self.client.put(self._fresh(), data)

        return seconds(lambda: list(self._pool.map(one, self._ready)))

    def single(self, size_bytes: int, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of single requests of one size."""
        data = self._memory.reshape(-1)[:size_bytes].data
        self.client.put(f"one{size_bytes}", data)
        return take_turns(
            {
                "put": lambda: seconds(lambda: self.client.put(self._fresh(), data)),
                "get": lambda: seconds(lambda: self.client.get(f"one{size_bytes}", 0, size_bytes)),
            },
            rounds,
        )

    def close(self) -> None:
        self.tier.close()
        self._pool.shutdown()

    def _fresh(self) -> str:
        """Return a name that nothing has."""
        return f"raw/{next(self._numbers)}"

    def _packed(self) -> list[Packed]:
        """Some blocks, copied, under the names that they have."""
        made = []
        for save in self._saves[:PUT_AT_ONCE]:
            data = pack(SHAPE, save)
            assert data is not None
            made.append((ObjectName.of(SHAPE, "bench", save), data))
        return made

    def _addresses(self, side: int) -> np.ndarray:
        """u64 [blocks, layers]."""
        steps = np.arange(BLOCKS * LAYERS, dtype=np.uint64) * np.uint64(SHAPE.layer_bytes)
        return (np.uint64(self._memory[side].ctypes.data) + steps).reshape(BLOCKS, LAYERS)


@contextmanager
def server() -> Iterator[str]:
    """A moto server with one bucket, `bench`; its URL.

    Raises:
        CannotRun: it does not come up.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(tempfile.gettempdir()))
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + START_S
            while True:
                with suppress(OSError):
                    request = urllib.request.Request(f"{url}/bench", method="PUT")
                    urllib.request.urlopen(request, timeout=5)
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise CannotRun("moto's server does not come up")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait(10)

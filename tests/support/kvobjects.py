"""Blocks of known bytes for tests of the object tier, a store that fails on demand, an S3 server,
and a line to it that can be cut, slowed and held."""

from __future__ import annotations

import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from headrace_kvstore.circuit_breaker import CircuitBreaker
from headrace_kvstore.nvme.record import BlockShape, WriteRequest
from headrace_kvstore.objects.object_client import Listed, ObjectError, StoreClient
from headrace_kvstore.objects.object_format import ObjectName
from headrace_kvstore.objects.object_tier import ObjectTier
from tests.support.kvnode import DIGEST, SHAPE, content, key, keys, payload_sums, until

BUCKET = "bucket"


class FakeStore(StoreClient):
    """Objects in a dict. What stands in `fails` ("list", "get", "put", "delete") fails with that
    reason; `gate` holds gets until it is set; `puts` and `gets` count."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self.fails: dict[str, str] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.gets: list[tuple[str, int, int]] = []
        self.puts = 0

    def _maybe_fail(self, what: str) -> None:
        if what in self.fails:
            raise ObjectError(self.fails[what])

    def list(self, after: str = "", prefix: str = "") -> Iterator[Listed]:
        self._maybe_fail("list")
        for name, data in sorted(item for item in self.objects.items() if item[0] > after):
            if prefix and not name.startswith(prefix + "/"):
                continue
            yield Listed(name, len(data), self.modified.get(name, time.time()))

    def get(self, name: str, offset: int, length: int) -> memoryview:
        self.gate.wait(20)
        self._maybe_fail("get")
        self.gets.append((name, offset, length))
        if name not in self.objects or offset >= len(self.objects[name]):
            raise ObjectError("absent")
        return memoryview(self.objects[name][offset : offset + length])

    def put(self, name: str, data: memoryview) -> None:
        self._maybe_fail("put")
        self.puts += 1
        self.objects[name] = bytes(data)
        self.modified[name] = time.time()

    def delete(self, names: Sequence[str]) -> None:
        self._maybe_fail("delete")
        for name in names:
            self.objects.pop(name, None)

    def names(self) -> list[ObjectName]:
        """Of all objects, taken apart."""
        parsed = [ObjectName.parse(name) for name in self.objects]
        return [name for name in parsed if name is not None]

    def flip(self, name: str, at: int) -> None:
        """Flip a bit of an object."""
        data = bytearray(self.objects[name])
        data[at] ^= 1
        self.objects[name] = bytes(data)


class Blocks:
    """Memory with room for some blocks: saved, loaded, compared."""

    def __init__(self, shape: BlockShape = SHAPE, room: int = 64) -> None:
        self.shape = shape
        self.memory = np.zeros((2, room, shape.payload_bytes), np.uint8)
        self._layers = np.arange(shape.layers, dtype=np.uint64) * np.uint64(shape.layer_bytes)

    def _addresses(self, side: int, count: int) -> np.ndarray:
        start = np.uint64(self.memory[side].ctypes.data)
        rows = start + np.arange(count, dtype=np.uint64) * np.uint64(self.shape.payload_bytes)
        return np.asarray(rows[:, None] + self._layers)

    def sums(self, count: int) -> list[np.ndarray]:
        """Room for the sums of so many blocks."""
        return list(np.zeros((count, self.shape.layers), np.uint64))

    def saves(self, *numbers: int) -> list[WriteRequest]:
        """These blocks, in memory."""
        made = []
        for row, number in zip(self._addresses(0, len(numbers)), numbers, strict=True):
            self.memory[0, len(made)] = content(number)
            sums = payload_sums(DIGEST, key(number), 0, row, self.shape.layer_bytes)
            parent = key(number - 1) if number else b""
            made.append(WriteRequest(key(number), int(row[0]), sums, parent, number, compute_s=0.5))
        return made

    def write(self, tier: ObjectTier, *numbers: int) -> int:
        """Write these; how many were."""
        return tier.put(tier.pack(self.shape, self.saves(*numbers)))

    def load(self, tier: ObjectTier, *numbers: int) -> list[bool]:
        """Which of these arrive. A block that the tier calls right and is not fails the test."""
        places = [(n, tier.find(DIGEST, key(n))) for n in numbers]
        there = [(n, place) for n, place in places if place is not None]
        self.memory[1] = 0xEE
        held = [place for _, place in there]
        read = tier.read(held, self._addresses(1, len(there)), self.sums(len(held)))
        good = dict(zip([n for n, _ in there], read.wait().tolist(), strict=True))
        for i, (number, _) in enumerate(there):
            assert not good[number] or (self.memory[1, i] == content(number)).all(), number
        return [good.get(number, False) for number in numbers]


def has(tier: ObjectTier, *numbers: int) -> list[bool]:
    """Which of these the tier says that it has."""
    return [bool(each) for each in tier.contains(DIGEST, keys(*numbers))]


@contextmanager
def tiers(client: Any) -> Iterator[Callable[..., ObjectTier]]:
    """Makes tiers over one client, each after its first listing, and ends them."""
    made: list[ObjectTier] = []

    def begin(writer: str = "w", size_bytes: int = 2**24, **more: Any) -> ObjectTier:
        usual: dict[str, Any] = {"refresh_s": 0.05, "timeout_s": 2.0, "client": client}
        given = usual | more
        wait = given.pop("wait", True)
        breakers = given.pop("breakers", (3, 0.05, 0.2))
        tier = ObjectTier(given.pop("client"), writer, size_bytes, **given)
        tier._reads, tier._writes = CircuitBreaker(*breakers), CircuitBreaker(*breakers)
        tier.start()
        made.append(tier)
        if wait:
            until(tier.refreshed.is_set)
        return tier

    try:
        yield begin
    finally:
        for tier in made:
            tier.close()


@contextmanager
def s3_server() -> Iterator[int]:
    """A real S3 API on a port of loopback, with one bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        url = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST"))
        urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"))
        yield port
    finally:
        server.stop()


def s3_options(port: int) -> dict[str, Any]:
    """For `StoreClient`, or `object_options`."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": "test",
        "secret_access_key": "test",
        "region": "us-east-1",
    }


class Line:
    """A TCP line to a port of loopback that misbehaves: `mode` is "whole", "dead" (refuses and
    cuts), "held" (takes requests, answers nothing) or "slow" (a few bytes at a time)."""

    def __init__(self, port: int) -> None:
        self.mode = "whole"
        self.passed_bytes = 0
        self.cut_after_bytes: int | None = None
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._ends: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: str) -> None:
        """Change the mode; lines that are open feel it too."""
        self.mode = mode
        if mode == "dead":
            self._cut()

    def close(self) -> None:
        """End all."""
        self._closed = True
        self._server.close()
        self._cut()

    def _cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                if self.mode == "dead":
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                for ends in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if answer:
                    self._pass(target, data)
                else:
                    target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass(self, target: socket.socket, data: bytes) -> None:
        while self.mode == "held" and not self._closed:
            time.sleep(0.01)
        if self.mode == "slow":
            for at in range(0, len(data), 256):
                if self.mode == "slow":
                    time.sleep(0.02)
                target.sendall(data[at : at + 256])
        else:
            target.sendall(data)
        self.passed_bytes += len(data)
        if self.cut_after_bytes is not None and self.passed_bytes > self.cut_after_bytes:
            self.set("dead")

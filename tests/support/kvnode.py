"""An engine's side of a store node, for tests: blocks of known bytes in and out of the arena."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.checksum import block_seed, checksum, layer_seeds, payload_sums
from headrace_kvstore.blocks.slot_record import hash_word
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.nvme.file_io import FileIo, IoBatch
from headrace_kvstore.nvme.record import PAGE_BYTES, BlockShape
from headrace_kvstore.nvme.segment import BlockReader, Location, page_memory
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import NodeClient, NodeUnavailable
from headrace_kvstore.settings.node_settings import NodeSettings

SHAPE = BlockShape(b"namespace-digest", layers=4, layer_bytes=2 * PAGE_BYTES)
DIGEST = SHAPE.digest
LEASE_S = 20.0
SECRET = "what the nodes of these tests share"


def key(number: int) -> bytes:
    """The hash of block `number`."""
    return random.Random(number).randbytes(32)


def keys(*numbers: int) -> list[bytes]:
    """Hashes."""
    return [key(number) for number in numbers]


def content(number: int) -> np.ndarray:
    """The bytes of block `number`, u8."""
    return np.frombuffer(random.Random(~number).randbytes(SHAPE.payload_bytes), np.uint8)


def settings(folder: Path, **values: Any) -> NodeSettings:
    """Of a small node that keeps all it has below `folder`: room for 40 blocks in DRAM."""
    usual: dict[str, Any] = {
        "name": "arena",
        "folder": folder,
        "dram_bytes": 48 * (SHAPE.payload_bytes + PAGE_BYTES),
        "block_bytes": SHAPE.payload_bytes,
        "layers": SHAPE.layers,
        "nvme_folder": folder / "nvme",
        "nvme_bytes": 2**24,
        "segment_bytes": PAGE_BYTES + 16 * SHAPE.record_bytes,
        "socket_folder": folder,
        "sweep_s": 0.05,
        "retry_s": 0.1,
        "heal_s": 0.1,
        "secret": SECRET,
    }
    return NodeSettings(**(usual | values))


class Engine:
    """Stores chains of blocks: block n's parent is block n - 1, block 0 is a root."""

    def __init__(self, given: NodeSettings) -> None:
        self.arena = Arena.create_or_attach(
            given.name,
            given.dram_bytes,
            folder=given.folder,
            block_bytes=given.block_bytes,
            layers=given.layers,
        )
        self.row = self.arena.register_namespace(DIGEST, SHAPE.payload_bytes, SHAPE.layers)

    def put(self, *numbers: int, tenant: int = 0, compute_s: float = 0.0) -> list[bool]:
        """Store blocks; which were taken."""
        parents = [hash_word(key(number - 1)) if number else 0 for number in numbers]
        slots = self.arena.reserve(
            *(self.row, keys(*numbers), parents, numbers), tenant=tenant, compute_s=compute_s
        )
        for number, slot in zip(numbers, slots.tolist(), strict=True):
            if slot >= 0:
                self.arena.view(slot)[:] = content(number)
        mine = slots[slots >= 0]
        seeds = [block_seed(DIGEST, key(n)) for n, s in zip(numbers, slots, strict=True) if s >= 0]
        layers = np.arange(SHAPE.layers) * SHAPE.layer_bytes
        at = self.arena.addresses(mine)[:, None] + layers
        sums = checksum(at, SHAPE.layer_bytes, layer_seeds(seeds, SHAPE.layers))
        self.arena.publish(mine, sums)
        return [bool(slot >= 0) for slot in slots]

    def has(self, *numbers: int) -> list[bool]:
        """Which blocks the arena has; their bytes and checksums must be right."""
        slots = self.arena.lookup(self.row, keys(*numbers))
        for number, slot in zip(numbers, slots.tolist(), strict=True):
            if slot >= 0:
                assert (self.arena.view(slot) == content(number)).all(), number
                at = (
                    self.arena.addresses(np.array([slot]))[0]
                    + np.arange(SHAPE.layers) * SHAPE.layer_bytes
                )
                sums = payload_sums(DIGEST, key(number), 0, at, SHAPE.layer_bytes)
                assert (sums == self.arena.sums(np.array([slot]))[0]).all(), number
        return [bool(slot >= 0) for slot in slots]

    def close(self) -> None:
        """Let go of the arena."""
        self.arena.close()


class Reader:
    """Reads located blocks as an engine's worker does, in memory of its own."""

    def __init__(self, file_io: FileIo, blocks: int = 64) -> None:
        self._reader = BlockReader(file_io)
        self._memory, self._address = page_memory(blocks * SHAPE.payload_bytes)

    def read(self, places: Sequence[Location], numbers: Sequence[int]) -> list[bool]:
        """Which blocks verify; one that does and has other bytes fails the test."""
        rows = self._address + np.arange(len(places)) * SHAPE.payload_bytes
        at = rows[:, None] + np.arange(SHAPE.layers) * SHAPE.layer_bytes
        ok = self._reader.read(places, at, verify=payload_sums).wait(20)
        for i, good in enumerate(ok):
            begin = i * SHAPE.payload_bytes
            got = self._memory[begin : begin + SHAPE.payload_bytes]
            assert not good or (got == content(numbers[i])).all(), numbers[i]
        return [bool(good) for good in ok]

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def locate(client: NodeClient, *numbers: int, compute_s: float = 0.0) -> list[Location]:
    """Where the node says that the leading ones of these blocks lie; none if it is away."""
    names = keys(*numbers)
    try:
        reply = client.ask(wire.Locate("r", DIGEST, names, 30.0, compute_s)).result()
    except NodeUnavailable:
        return []
    assert isinstance(reply, wire.Located), reply
    return wire.unpack_locations(reply, DIGEST, names)


def answers(client: NodeClient) -> bool:
    """Whether the node does."""
    try:
        return isinstance(client.ask(wire.GetStats()).result(), wire.Stats)
    except NodeUnavailable:
        return False


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for it; fails the test if it does not come about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.005)


def until_arena(stats: Callable[[], dict[str, Any]]) -> None:
    """Wait until a node has its arena, or says why it has none. On a busy machine it says before
    that it is ready: it has to import NIXL."""
    until(lambda: stats()["tiers"]["dram"]["reason"] != "opening", 120.0)


class HangingMover(FileIo):
    """A disk that starts no write, or no read, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs: str | None = None
        self.held: list[IoBatch] = []

    def _start(self, move: IoBatch) -> IoBatch:
        if move.operation != self.hangs:
            return super()._start(move)
        self.held.append(move)
        return move

    def let_one_go(self) -> None:
        """Do the one that waits longest."""
        super()._start(self.held.pop(0))

    def let_go(self) -> None:
        """Do it all."""
        self.hangs = None
        held, self.held = self.held, []
        for move in held:
            self._start(move)


class SlowMover(FileIo):
    """A disk that reads no faster than `bytes_per_s`, one move after the other; None: as it can."""

    bytes_per_s: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self._free_at_s = 0.0

    def _start(self, move: IoBatch) -> IoBatch:
        if self.bytes_per_s is None or move.operation != "READ":
            return super()._start(move)
        now_s = time.monotonic()
        self._free_at_s = max(now_s, self._free_at_s) + move.bytes / self.bytes_per_s
        wait_s = self._free_at_s - now_s
        timer = threading.Timer(wait_s, super()._start, [move])
        timer.daemon = True
        timer.start()
        return move


def settled(node: StoreNode, timeout_s: float) -> bool:
    """Wait until everything stored so far is published, and written or dropped."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        dram, keeper = node.tiers.dram, node.tiers.nvme_manager
        if dram is not None and dram.idle and (keeper is None or keeper.ready):
            return True
        time.sleep(0.005)
    return False


def written(node: StoreNode, engine: Engine, *numbers: int) -> None:
    """Store blocks, and wait until they are on NVMe."""
    engine.put(*numbers)
    until(lambda: len(node.operations.locate(DIGEST, keys(*numbers), 0.0)) == len(numbers))
    assert settled(node, 20)


def located(node: StoreNode, *numbers: int, request: str = "r") -> int:
    """The number of leading blocks that NVMe has."""
    return len(node.operations.locate(DIGEST, keys(*numbers), LEASE_S, request))

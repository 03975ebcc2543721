"""The remote tier against the same NIXL backend alone: two nodes on one machine, the same blocks.

46 blocks of 5.9 MB lie in one node's arena; another node, in another process, loads them into its
own. Both ways use NIXL's UCX backend with the transport that it chooses here (shared memory: CMA),
and read the same memory into the same memory, one piece for each block. "Alone" means one agent,
one transfer of all pieces, and a poll every 50 microseconds. "Through the tier" includes the lease,
the reservation of slots, reads in groups, every block's tag, publication and release. During a
first load the owner makes the tags, as when blocks are leased for the first time; later loads find
the tags. The owner's bytes are in memory, as in production, so no page cache can be cold.
"""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kvstore.child import Child
from benchmarks.kvstore.remote_owner import DIGEST, SECRET, hashes, raw_agent
from benchmarks.kvstore.stage import BLOCK_TOKENS, BLOCKS, HEAD_DIM, KV_HEADS, LAYERS
from benchmarks.kvstore.timing import CannotRun, Figures, ratios, seconds, take_turns
from headrace_kvstore.arena.shared_file import MADV_POPULATE_WRITE
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.settings.node_settings import NodeSettings

ROUNDS, QUICK_ROUNDS = 24, 5
LAYER_BYTES = KV_HEADS * BLOCK_TOKENS * 2 * HEAD_DIM * 4
POLL_S = 50e-6
PATIENCE_S = 60.0


def measure(figures: Figures, quick: bool = False) -> None:
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    pair = None
    try:
        pair = Pair(folder)
        ways = {"raw": pair.raw, "load": pair.load, "first": pair.first_load}
        taken = take_turns(ways, QUICK_ROUNDS if quick else ROUNDS)
    finally:
        if pair is not None:
            pair.close()
        shutil.rmtree(folder)
    figures.add("remote.load_vs_raw", ratios(taken["raw"], taken["load"]))
    figures.add("remote.first_load_vs_raw", ratios(taken["raw"], taken["first"]))
    figures.bandwidth("remote.load_gb_s", pair.size_bytes, taken["load"])
    figures.bandwidth("remote.raw_gb_s", pair.size_bytes, taken["raw"])
    figures.note(
        "remote",
        f"{BLOCKS} blocks of 5.9 MB between two nodes' arenas on one machine, verified; NIXL alone "
        "moves the same pieces between the same memory",
    )


class Pair:
    """Two nodes, one in a program of its own, and a NIXL agent beside each.

    Raises:
        CannotRun: there is no NIXL with UCX here.
    """

    def __init__(self, folder: Path) -> None:
        self.block_bytes = LAYERS * LAYER_BYTES
        self.size_bytes = BLOCKS * self.block_bytes
        name = f"headrace-bench-{uuid.uuid4().hex[:12]}"
        options = {
            "name": f"{name}-a",
            "folder": folder,
            "blocks": BLOCKS,
            "layers": LAYERS,
            "layer_bytes": LAYER_BYTES,
        }
        self._owner = Child("remote_owner", options, os.environ, folder / "owner.log")
        self._owner.answer()
        self._hashes = hashes(BLOCKS)
        self._node = StoreNode(
            NodeSettings(
                name=f"{name}-b",
                dram_bytes=int(1.2 * BLOCKS * (self.block_bytes + 4096)) + (8 << 20),
                block_bytes=self.block_bytes,
                layers=LAYERS,
                secret=SECRET,
                peers=(self._owner.do("where")["address"],),
                pulling_bytes=2 * self.size_bytes,
                socket_folder=folder,
            )
        ).start()
        dram = self._node.tiers.dram
        if dram is None or dram.remote is None:
            self.close()
            raise CannotRun("no NIXL UCX backend, or no room for an arena")
        self._arena = dram.arena
        self._arena._file.memory.madvise(MADV_POPULATE_WRITE)
        self._row = self._arena.register_namespace(DIGEST, self.block_bytes, LAYERS)
        there = self._owner.do("raw")
        self._addresses = np.array(there["addresses"], np.uint64)
        self._agent = raw_agent(self._arena.base_address, self._arena.geometry.size_bytes)
        name_or_bytes = self._agent.add_remote_agent(base64.b64decode(there["metadata"]))
        self._peer = name_or_bytes
        self._wait_until_known()

    def load(self) -> float:
        """Pull all blocks through the tier; seconds until the last one is published."""
        self._arena.clear()
        began = time.perf_counter()
        pulling = self._node.operations.pull(DIGEST, self._hashes)
        loaded = 0 if pulling is None else pulling.done.result(PATIENCE_S)
        spent = time.perf_counter() - began
        if loaded != BLOCKS:
            raise RuntimeError(
                f"{loaded} of {BLOCKS} blocks came: {self._node.operations.stats()['remote']}"
            )
        return spent

    def first_load(self) -> float:
        """Do the same as `load`, with blocks that have no tags yet."""
        self._owner.do("forget_tags")
        return self.load()

    def raw(self) -> float:
        """Read the same bytes with NIXL alone into slots of the same arena; seconds of the read."""
        self._arena.clear()
        slots = self._arena.reserve(self._row, self._hashes, [0] * BLOCKS, list(range(BLOCKS)))
        local = self._arena.addresses(slots).astype(np.uint64)
        try:
            return seconds(lambda: self._transfer(local))
        finally:
            self._arena.abandon(slots)

    def close(self) -> None:
        """End both nodes."""
        self._node.close()
        self._owner.end()

    def _transfer(self, local: np.ndarray) -> None:
        sizes = np.full(BLOCKS, self.block_bytes, np.uint64)

        def descriptors(addresses: np.ndarray) -> Any:
            rows = np.stack([addresses, sizes, 0 * sizes], axis=1)
            return self._agent.get_xfer_descs(rows, mem_type="DRAM")

        handle = self._agent.initialize_xfer(
            "READ", descriptors(local), descriptors(self._addresses), self._peer
        )
        state = self._agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        handle.release()
        if state == "ERR":
            raise RuntimeError("NIXL alone failed to read")

    def _wait_until_known(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            peers = self._node.operations.stats()["remote"]["peers"]
            if all(each["blocks"]["DRAM"] >= BLOCKS for each in peers.values()):
                return
            time.sleep(0.05)
        raise RuntimeError("the owner's blocks do not become known")

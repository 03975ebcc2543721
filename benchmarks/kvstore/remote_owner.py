"""The node that `remote` pulls from: a program, see `child`. Its blocks' bytes come from a seed.

Beside the node it has a NIXL agent of its own on the same arena, for reads by NIXL alone, polled as
the node polls its own.
"""

from __future__ import annotations

import argparse
import base64
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kvstore.child import serve
from headrace_kvstore.blocks.checksum import block_seed, checksum, layer_seeds
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.peers.nixl_agent import LAST_PAUSE_S
from headrace_kvstore.settings.node_settings import NodeSettings

SECRET = "of the two nodes of this benchmark"
DIGEST = b"benchmark-remote"


class Owner:
    """A node that leases blocks, with all blocks in its arena."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        block_bytes = args.layers * args.layer_bytes
        folder = Path(args.folder)
        self._node = StoreNode(
            NodeSettings(
                name=args.name,
                dram_bytes=int(2.3 * args.blocks * (block_bytes + 4096)) + (8 << 20),
                block_bytes=block_bytes,
                layers=args.layers,
                secret=SECRET,
                listen="127.0.0.1:0",
                socket_folder=folder,
            )
        ).start()
        dram = self._node.tiers.dram
        assert dram is not None, "no arena"
        self._arena = arena = dram.arena
        row = arena.register_namespace(DIGEST, block_bytes, args.layers)
        self._hashes = hashes(args.blocks)
        slots = arena.reserve(row, self._hashes, [0] * args.blocks, list(range(args.blocks)))
        rng = np.random.default_rng(0)
        for slot in slots.tolist():
            arena.view(slot)[:] = rng.integers(0, 256, block_bytes, dtype=np.uint8)
        self._addresses = arena.addresses(slots)
        rows = self._addresses[:, None] + np.arange(args.layers) * args.layer_bytes
        seeds = layer_seeds([block_seed(DIGEST, each) for each in self._hashes], args.layers)
        arena.publish(slots, checksum(rows, args.layer_bytes, seeds))
        self._raw: Any = None
        self._closing = threading.Event()

    def where(self) -> dict[str, Any]:
        """Return the node's address for peers."""
        neighbours = self._node.tiers.peer_service
        return {"address": None if neighbours is None else neighbours.address}

    def raw(self) -> dict[str, Any]:
        """Metadata of the other agent, and where the blocks are."""
        self._raw = raw_agent(self._arena.base_address, self._arena.geometry.size_bytes)
        threading.Thread(target=self._poll, daemon=True).start()
        return {
            "metadata": base64.b64encode(self._raw.get_agent_metadata()).decode(),
            "addresses": self._addresses.tolist(),
        }

    def forget_tags(self) -> dict[str, Any]:
        """No block has been leased before."""
        dram = self._node.tiers.dram
        assert dram is not None and dram.remote is not None
        dram.remote.lease_server._tagged[0][:] = 0
        return {}

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the node's remote part."""
        remote: dict[str, Any] = self._node.operations.stats()["remote"]
        return remote

    def close(self) -> None:
        """End the node, and remove its arena."""
        self._closing.set()
        self._node.close()

    def _poll(self) -> None:
        while not self._closing.wait(LAST_PAUSE_S):
            self._raw.get_new_notifs()


def hashes(blocks: int) -> list[bytes]:
    """Return the blocks' hashes."""
    rng = np.random.default_rng(1)
    return [rng.bytes(32) for _ in range(blocks)]


def raw_agent(address: int, size_bytes: int) -> Any:
    """Return a NIXL agent with UCX on some memory, as the node's own, and nothing else."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(
        f"bench-{uuid.uuid4()}", nixl_agent_config(enable_prog_thread=False, backends=[])
    )
    agent.create_backend("UCX", {})
    agent.register_memory([(address, size_bytes, 0, "")], mem_type="DRAM")
    return agent


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name")
    parser.add_argument("--folder")
    for name in ("blocks", "layers", "layer-bytes"):
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args()
    serve(lambda: Owner(given))

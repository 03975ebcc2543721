"""An operator's actions on a node's blocks: list pins, undo them, clear tiers, look up blocks.

Answers are JSON-able, with digests and hashes in hex. Blocks in objects are left alone: other nodes
share them, and each removes the least recently used of its own.
"""

from __future__ import annotations

import time
from typing import Any, Literal, get_args

import numpy as np

from headrace_kvstore.arena import pins
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.node.tiers import Tiers
from headrace_kvstore.nvme.record import padded

Action = Literal["pins", "unpin", "clear", "lookup"]
ACTIONS: tuple[Action, ...] = get_args(Action)
MAX_LISTED = 1000
"""Maximum number of chains of pinned blocks in one answer; the totals count all."""


def administer(
    tiers: Tiers, action: Action, namespace: bytes | None = None, block_hash: bytes | None = None
) -> dict[str, Any]:
    """Carry out an action on all blocks, or those of a namespace, or one block.

    Args:
        namespace: digest of the namespace; None for all.
        block_hash: of the last block of a pinned chain (`unpin`), or of the block to look up.

    Raises:
        ValueError: `lookup` without a hash, `clear` with one.
    """
    if action == "pins":
        return list_pins(tiers, namespace)
    if action == "unpin":
        return unpin(tiers, namespace, block_hash)
    if action == "clear":
        if block_hash is not None:
            raise ValueError("clear takes a namespace, and no hash")
        return clear(tiers, namespace)
    if block_hash is None:
        raise ValueError("lookup needs the hash of a block")
    return lookup(tiers, namespace, padded(block_hash))


def parse_hex(text: str | None, most_bytes: int) -> bytes | None:
    """Return the bytes of a digest (16) or a hash (at most 32) in hex; None for None.

    Raises:
        ValueError: it is none.
    """
    if text is None:
        return None
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if not value or len(value) > most_bytes or (most_bytes == 16 and len(value) < 16):
        raise ValueError(f"{text!r} is not {most_bytes} bytes in hex")
    return value


def list_pins(tiers: Tiers, namespace: bytes | None) -> dict[str, Any]:
    """List the pinned chains, the largest first, and their size."""
    with tiers.arena_lock:
        arena = None if tiers.dram is None else tiers.dram.arena
        if arena is None:
            return {"pins": [], "blocks": 0, "bytes": 0, "limit_bytes": 0}
        rows, limit = _pinned(arena, namespace), arena.pin_limit_bytes
        digests = [info.digest.hex() for info in arena.namespaces()]
    now_s = time.monotonic()
    found = sorted(pins.leaves(rows), key=lambda i: -int(rows[i]["depth"]))
    return {
        "pins": [
            {
                "namespace": digests[int(row["namespace"])],
                "hash": row["hash"].tobytes().hex(),
                "blocks": int(row["depth"]) + 1,
                "hits": int(row["hits"]),
                "stored_s": round(now_s - float(row["stored_s"]), 1),
                "used_s": round(now_s - float(row["used_s"]), 1),
            }
            for row in rows[found[:MAX_LISTED]]
        ],
        "chains": len(found),
        "blocks": len(rows),
        "bytes": int(rows["bytes"].sum()),
        "limit_bytes": limit,
    }


def unpin(tiers: Tiers, namespace: bytes | None, leaf: bytes | None) -> dict[str, Any]:
    """Unpin blocks, so that they may be evicted: all, a namespace's, or a chain's by its last
    block."""
    with tiers.arena_lock:
        if tiers.dram is None:
            return {"unpinned": 0}
        arena = tiers.dram.arena
        rows = _pinned(arena, namespace)
        if leaf is not None:
            names = [h.tobytes() for h in rows["hash"]]
            at = [i for i, name in enumerate(names) if name == padded(leaf)]
            rows = rows[sorted({i for each in at for i in pins.chain(rows, each)})]
        return {"unpinned": arena.unpin(rows)}


def clear(tiers: Tiers, namespace: bytes | None) -> dict[str, Any]:
    """Drop blocks from DRAM, kept ones too, and from NVMe."""
    dram = nvme = 0
    with tiers.arena_lock:
        if tiers.dram is not None:
            arena = tiers.dram.arena
            namespace_id = None if namespace is None else arena.find_namespace(namespace)
            if namespace is None or namespace_id is not None:
                dram = arena.clear(namespace_id)
    if tiers.nvme is not None:
        nvme = tiers.nvme.clear(namespace)
    return {"dram": dram, "nvme": nvme}


def lookup(tiers: Tiers, namespace: bytes | None, block_hash: bytes) -> dict[str, Any]:
    """Return which tiers hold a block, by namespace."""
    found: dict[str, list[str]] = {}

    def add(digest: bytes, tier: str) -> None:
        if namespace in (None, digest):
            found.setdefault(digest.hex(), []).append(tier)

    digests = set() if namespace is None else {namespace}
    with tiers.arena_lock:
        if tiers.dram is not None:
            arena = tiers.dram.arena
            for namespace_id, info in enumerate(arena.namespaces()):
                digests.add(info.digest)
                if arena.lookup(namespace_id, [block_hash])[0] >= 0:
                    add(info.digest, "dram")
    if tiers.nvme is not None:
        digests |= {digest for digest, _ in tiers.nvme.contents()}
        for digest in digests:
            if tiers.nvme.contains(digest, [block_hash])[0]:
                add(digest, "nvme")
    if tiers.objects is not None:
        for digest in digests:
            if tiers.objects.contains(digest, [block_hash])[0]:
                add(digest, "object")
    return {"tiers": found}


def _pinned(arena: Arena, namespace: bytes | None) -> np.ndarray:
    rows = arena.pinned()
    if namespace is None:
        return rows
    namespace_id = arena.find_namespace(namespace)
    return rows[:0] if namespace_id is None else rows[rows["namespace"] == namespace_id]

"""The slot record of the DRAM tier: the arena's facts about each KV block, one row per slot.

The arena writes these rows and the eviction policy reads them, so this file imports neither.
Seconds are of time.monotonic(), one clock for all processes of a machine.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from headrace_kvstore.identity.salts import tenant_of

FREE = 0  # holds no block
WRITING = 1  # reserved; its owner is copying the block in
READY = 2  # complete and readable

PINNED = float("inf")
"""`kept_until_s` of a block that an operator has pinned."""

MAX_WRITERS = 32
"""Maximum number of processes that may fill one slot together."""

HASH_BYTES = 32  # vLLM's block hash, zero-padded

SLOT = np.dtype(
    [
        ("state", "u1"),  # FREE, WRITING or READY
        ("namespace", "u2"),  # row in the arena's namespace table
        ("tenant", "u4"),  # hash of the tenant (cache salt), for quotas; 0: none
        ("depth", "u4"),  # number of blocks before it in its prefix; 0: a root
        ("hits", "u4"),  # times leased since it was stored
        ("generation", "u4"),  # grows each time the slot is given to another block
        ("owner", "i4"),  # while WRITING: pid of the writer, or a group of writers, below 0
        ("parent", "u8"),  # first 8 bytes of the parent block's hash, little-endian; 0 for a root
        ("hash", "V32"),  # block hash, zero-padded
        ("stored_s", "f8"),  # when it was published; while WRITING, when it was reserved
        ("used_s", "f8"),  # when it was last leased, published or reserved
        ("lease_until_s", "f8"),  # readers may be copying until then
        ("kept_until_s", "f8"),  # not evicted before then; 0: not kept, PINNED: never
        ("bytes", "f8"),  # size of the slot, 0 while FREE
        ("compute_s", "f4"),  # predicted seconds to compute this block at its depth; 0: unknown
        ("pending_writers", "u4"),  # while WRITING: a bit for each writer that is not done
    ],
    align=True,
)

STORED = 1  # a block became readable
REMOVED = 2  # a block was removed

EVENT = np.dtype(
    [
        ("seq", "u8"),
        ("hash", "V32"),
        ("kind", "u1"),  # STORED or REMOVED
        ("namespace", "u2"),
    ],
    align=True,
)


def pack_hashes(hashes: Sequence[bytes] | np.ndarray) -> np.ndarray:
    """Return block hashes as the u64 words [n, 4] that the arena compares.

    Takes bytes of at most 32 each (zero-padded), or an array of n rows of 32 bytes of any dtype.
    Raises ValueError for longer hashes.
    """
    if isinstance(hashes, np.ndarray):
        raw: np.ndarray | bytearray = np.array(hashes, order="C").reshape(-1).view(np.uint8)
    else:
        raw = bytearray().join([one.ljust(HASH_BYTES, b"\0") for one in hashes])
    if len(raw) != HASH_BYTES * len(hashes):
        raise ValueError(f"a block hash has at most {HASH_BYTES} bytes")
    return np.frombuffer(raw, np.uint64).reshape(-1, 4)


def tenant_number(salt: str) -> int:
    """Return a cache salt's tenant for the slot table: 0 for none, else 32 bits of its name's
    hash."""
    if not salt:
        return 0
    name = tenant_of(salt).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest()) or 1


def hash_word(block_hash: bytes) -> int:
    """Return the `parent` field for this block hash: its first 8 bytes, little-endian."""
    return int.from_bytes(block_hash[:8], "little")

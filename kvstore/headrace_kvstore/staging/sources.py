"""Sources of a prefetcher's blocks: the protocol of a source, and the NVMe tier as one.

`open` asks a source which of some blocks it has, with their shape, checksums and place in the
prefix, and keeps them there. The prefetcher then reserves arena slots and lets the offer `read`
blocks into them. A `PendingRead` tells which blocks are in memory and match their checksums. In the
end the prefetcher closes the offer, and the source may drop the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace_kvstore.blocks.checksum import payload_sums
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.record import BlockShape
from headrace_kvstore.nvme.segment import Location


@dataclass(frozen=True)
class SourceBlock:
    """A block that a source has, with its place for the eviction policy (fields of SLOT)."""

    hash: bytes
    """32 bytes, zero-padded."""
    shape: BlockShape
    sums: np.ndarray
    """One u64 a layer, (layers,). A source may fill them in when the block is read."""
    parent: int = 0
    depth: int = 0
    tenant: int = 0
    compute_s: float = 0.0

    @property
    def kind(self) -> tuple[BlockShape, int]:
        """Shape and tenant, which all blocks of one reservation share."""
        return self.shape, self.tenant


class PendingRead(Protocol):
    """Blocks on their way into memory."""

    def abort(self) -> None:
        """Begin no further reads."""
        ...

    def wait(self) -> np.ndarray:
        """Wait until no more bytes will arrive; return whether each block is whole in memory and
        matches its checksums, bool (blocks,). Raises nothing. One thread may wait, once."""
        ...


class SourceLease(Protocol):
    """Blocks that a source has of those it was asked for; it keeps them until `close`."""

    @property
    def found(self) -> Sequence[SourceBlock]: ...

    def read(self, which: Sequence[int], addresses: np.ndarray) -> PendingRead:
        """Start reading some of `found`, by position. addresses: int64 (n, layers), where each
        layer goes; a block's layers follow each other. May raise any exception."""
        ...

    def close(self, bad: Sequence[int]) -> None:
        """End all reads; the blocks at the positions `bad` did not arrive right."""
        ...


class Source(Protocol):
    """One tier below DRAM. Thread-safe."""

    @property
    def batch_blocks(self) -> int:
        """Maximum number of blocks asked for at once."""
        ...

    def split(self, blocks: int, block_bytes: int) -> list[int]:
        """Return how many blocks each `read` should take: one is verified while the next
        arrives."""
        ...

    def open(self, digest: bytes, hashes: Sequence[bytes]) -> SourceLease:
        """Find the blocks of one namespace that the source has; may wait. Hashes are padded.

        May raise `SourceUnavailable`.
        """
        ...


class SourceUnavailable(Exception):
    """Error: the source cannot be asked now; the text is one word for the metrics."""


class NvmeSource:
    """The node's current NVMe tier, from `tier()`, as a source."""

    batch_blocks = 32

    def __init__(self, tier: Callable[[], NvmeTier | None]) -> None:
        self._tier = tier

    def split(self, blocks: int, block_bytes: int) -> list[int]:
        """Return one read of all blocks: a disk needs a deep queue."""
        return [blocks]

    def open(self, digest: bytes, hashes: Sequence[bytes]) -> SourceLease:
        """Find the blocks on NVMe; see `Source.open`."""
        tier = self._tier()
        if tier is None or tier.state == "off":
            raise SourceUnavailable("off")
        return NvmeLease(tier, digest, hashes)


class NvmeLease:
    """Blocks in segment files; these stay until a read of them is done, without a lease."""

    def __init__(self, tier: NvmeTier, digest: bytes, hashes: Sequence[bytes]) -> None:
        self._tier = tier
        self._places: list[Location] = []
        self.found: list[SourceBlock] = []
        for block_hash in hashes:
            place, record = tier.locate(digest, block_hash), tier.record(digest, block_hash)
            if place is not None and record is not None:
                self._places.append(place)
                self.found.append(
                    SourceBlock(
                        *(place.hash, place.shape, place.sums),
                        *(int(record["parent"]), int(record["depth"]), int(record["tenant"])),
                        float(record["compute_s"]),
                    )
                )

    def read(self, which: Sequence[int], addresses: np.ndarray) -> PendingRead:
        """Begin to read blocks; see `SourceLease.read`."""
        return self._tier.read([self._places[i] for i in which], addresses, verify=payload_sums)

    def close(self, bad: Sequence[int]) -> None:
        """Do nothing: the tier itself has dropped bad blocks."""

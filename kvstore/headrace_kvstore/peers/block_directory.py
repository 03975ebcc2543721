"""Directory of the KV blocks that each node holds, by medium, from the nodes' event streams. Pure.

Each node numbers its batches of events from 0 (see `events.py`); `sequence.py` decides which are
applied. A batch that begins with `AllBlocksCleared` is the node's whole state. If a batch before
another one is missing, the caller has the node replay from `wanted`. A restarted node starts again
at 0; the caller learns of that from its generation and calls `drop`.

One thread may write while others read. A reader sees part of a batch at worst, and never waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace_kvstore.blocks.slot_record import HASH_BYTES
from headrace_kvstore.nvme.record import DIGEST_BYTES
from headrace_kvstore.protocol.batch_sequence import BatchAction, BatchSequence
from headrace_kvstore.protocol.events import (
    DRAM,
    NVME,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)

logger = logging.getLogger("headrace.kvstore")

Event = BlockStored | BlockRemoved | AllBlocksCleared
MEDIA = (DRAM, NVME)
"""Media that are followed, fastest first."""
MAX_BLOCKS = 1 << 22
"""Maximum number of blocks of all nodes together, about 0.5 GB; further ones are counted, but not
remembered and not pulled."""


class _Node:
    def __init__(self) -> None:
        self.numbers = BatchSequence()
        self.media: dict[str, set[bytes]] = {}


class BlockDirectory:
    """Blocks by node. A key is namespace digest + block hash padded to 32 bytes."""

    def __init__(self, most_blocks: int = MAX_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._nodes: dict[str, _Node] = {}
        self.dropped = 0
        """Number of blocks that were not remembered for lack of room; a block that a node reports
        again counts again."""

    def apply(self, node: str, seq: int, events: Sequence[Event]) -> bool:
        """Apply a batch; return False, and apply nothing, if batches before it are missing."""
        known = self._nodes.setdefault(node, _Node())
        whole = bool(events) and isinstance(events[0], AllBlocksCleared)
        action = known.numbers.classify(seq, whole)
        if action is BatchAction.TAKE:
            for event in events:
                self._apply_event(known, event)
            known.numbers.mark_applied(seq)
        return action is not BatchAction.WAIT

    def wanted(self, node: str) -> int:
        """Return the number of the batch from which a node is to replay."""
        known = self._nodes.get(node)
        return 0 if known is None else known.numbers.wanted

    def drop(self, node: str) -> None:
        """Drop a node that has ended, or that was restarted."""
        self._nodes.pop(node, None)

    def leading(
        self, node: str, digest: bytes, hashes: Sequence[bytes], media: Sequence[str]
    ) -> list[str]:
        """Return the medium of each of the leading blocks that a node holds: the first of `media`
        that has it."""
        known = self._nodes.get(node)
        if known is None:
            return []
        sets = [(medium, known.media.get(medium, ())) for medium in media]
        found: list[str] = []
        for block_hash in hashes:
            key = digest + block_hash.ljust(HASH_BYTES, b"\0")
            medium = next((name for name, keys in sets if key in keys), None)
            if medium is None:
                break
            found.append(medium)
        return found

    def contains(self, node: str, digest: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """Return for each block whether a node holds it."""
        known = self._nodes.get(node)
        sets = [] if known is None else list(known.media.values())
        keys = (digest + block_hash.ljust(HASH_BYTES, b"\0") for block_hash in hashes)
        return [any(key in held for held in sets) for key in keys]

    def blocks(self, node: str, medium: str) -> int:
        """Return how many blocks of a node and medium are known."""
        known = self._nodes.get(node)
        return 0 if known is None else len(known.media.get(medium, ()))

    def _apply_event(self, known: _Node, event: Event) -> None:
        """Apply one event. Raises ValueError for an event that no store publishes."""
        if isinstance(event, AllBlocksCleared):
            known.media.clear()
            return
        if event.medium not in MEDIA or event.ownership is None:
            return  # no store's event
        digest = bytes.fromhex(event.ownership)
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"a namespace digest has {DIGEST_BYTES} bytes, not {len(digest)}")
        keys = {
            digest + name.ljust(HASH_BYTES, b"\0")
            for name in event.block_hashes
            if isinstance(name, bytes) and len(name) <= HASH_BYTES
        }
        held = known.media.setdefault(event.medium, set())
        if not isinstance(event, BlockStored):
            held -= keys
        elif self._blocks + len(keys) <= self._most_blocks:
            held |= keys
        else:
            if not self.dropped:
                logger.warning(
                    "the peers hold more than the %d blocks that a node remembers: the rest is not "
                    "pulled from them",
                    self._most_blocks,
                )
            self.dropped += len(keys - held)

    @property
    def _blocks(self) -> int:
        return sum(len(keys) for node in self._nodes.values() for keys in node.media.values())

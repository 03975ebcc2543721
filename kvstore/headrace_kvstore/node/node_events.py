"""Publication of the blocks in a node's tiers: each change, or all contents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace_kvstore.node.tiers import Tiers
from headrace_kvstore.nvme.record import TierEvent
from headrace_kvstore.protocol.events import DRAM, NVME, Change, EventPublisher
from headrace_kvstore.settings.node_settings import NodeSettings


class NodeEvents:
    """Publisher of changes after `open`; before that they are dropped. Thread-safe except for
    `open`.

    Blocks in objects are not published: every node that may read the object store lists it itself.

    Args:
        tiers: hold the blocks.
    """

    def __init__(self, settings: NodeSettings, tiers: Tiers) -> None:
        self._settings, self._tiers = settings, tiers
        self.publisher: EventPublisher | None = None

    def open(self, for_peers: bool) -> None:
        """Begin to publish, if the settings name an endpoint or peers follow.

        Raises:
            zmq.ZMQError: an endpoint cannot be bound.
        """
        settings = self._settings
        if (for_peers or settings.events is not None) and self.publisher is None:
            self.publisher = EventPublisher(settings.events, settings.replay, self.contents)

    def publish(self, changes: list[Change]) -> None:
        """Publish these changes."""
        if self.publisher is not None:
            self.publisher.publish(changes)

    def on_nvme_event(self, event: TierEvent) -> None:
        """Publish an event of the NVMe tier. Two kinds are left out: blocks that a scan found,
        which a resync publishes, and stored blocks that were removed since."""
        nvme = self._tiers.nvme
        if event.reason == "scanned":
            return
        if event.stored and (nvme is None or nvme.record(event.digest, event.hash) is None):
            return
        self.publish([Change(event.stored, NVME, event.digest, event.hash)])

    def resync(self) -> None:
        """Publish the whole state."""
        if self.publisher is not None:
            self.publisher.resync()

    def stats(self) -> dict[str, Any]:
        """Return the publisher's statistics, JSON-able; empty if nothing is published."""
        return {} if self.publisher is None else self.publisher.stats()

    def close(self) -> None:
        """Stop publishing."""
        if self.publisher is not None:
            self.publisher.close()

    def contents(self) -> Iterator[Change]:
        """Yield all blocks in DRAM and on NVMe, roots first."""
        nvme = self._tiers.nvme
        tiers = [(DRAM, self._tiers.arena_contents())]
        if nvme is not None:
            tiers.append((NVME, nvme.contents()))
        for medium, contents in tiers:
            for digest, rows in contents:
                for block_hash in rows["hash"][rows["depth"].argsort(kind="stable")]:
                    yield Change(True, medium, digest, block_hash.tobytes())

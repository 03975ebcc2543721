"""Turns a node's tiers into published changes: one for each event of a tier, or all contents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace_kvstore.arena.chains import chains
from headrace_kvstore.node.tiers import Contents, Tiers
from headrace_kvstore.node_settings import NodeSettings
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.record import TierEvent
from headrace_kvstore.objects.object_tier import ObjectTier
from headrace_kvstore.protocol.events import DRAM, NVME, OBJECT, Change, EventPublisher


class NodeEvents:
    """Publishes changes once `open` was called, and drops them before. Thread-safe but for `open`.

    Args:
        tiers: whose blocks they are.
    """

    def __init__(self, settings: NodeSettings, tiers: Tiers) -> None:
        self._settings, self._tiers = settings, tiers
        self.publisher: EventPublisher | None = None

    def open(self, listen: str | None) -> None:
        """Publish where the settings say so; with `listen`, HOST:PORT, for peers in any case.

        Raises:
            zmq.ZMQError: an endpoint cannot be bound.
        """
        events, replay = self._settings.events, self._settings.replay
        if listen is not None:
            anywhere = f"tcp://{listen.rpartition(':')[0]}:*"
            events, replay = events or anywhere, replay or anywhere
        if events is not None and self.publisher is None:
            self.publisher = EventPublisher(events, replay, self.contents)

    def publish(self, changes: list[Change]) -> None:
        """Publish these changes."""
        if self.publisher is not None:
            self.publisher.publish(changes)

    def nvme_changed(self, event: TierEvent) -> None:
        """Publish an event of the NVMe tier."""
        change = nvme_change(self._tiers.nvme, event)
        if change is not None:
            self.publish([change])

    def objects_changed(self, event: TierEvent) -> None:
        """Publish an event of the object tier."""
        objects = self._tiers.objects
        change = None if objects is None else object_change(objects, event)
        if change is not None:
            self.publish([change])

    def resync(self) -> None:
        """Publish the whole state."""
        if self.publisher is not None:
            self.publisher.resync()

    def stats(self) -> dict[str, Any]:
        """JSON-able; empty if nothing is published."""
        return {} if self.publisher is None else self.publisher.stats()

    def close(self) -> None:
        """Stop publishing."""
        if self.publisher is not None:
            self.publisher.close()

    def contents(self) -> Iterator[Change]:
        """All blocks of all tiers, each chain in order."""
        yield from all_there(DRAM, self._tiers.arena_contents())
        nvme, objects = self._tiers.nvme, self._tiers.objects
        if nvme is not None:
            yield from all_there(NVME, nvme.contents())
        if objects is not None:
            yield from all_there(OBJECT, objects.contents())


def nvme_change(tier: NvmeTier | None, event: TierEvent) -> Change | None:
    """None for a block that a scan found (a resync publishes it) or that was removed since."""
    if event.reason == "scanned":
        return None
    parent = 0
    if event.stored:
        record = None if tier is None else tier.record(event.digest, event.hash)
        if record is None:
            return None
        parent = int(record["parent"])
    return Change(event.stored, NVME, event.digest, event.hash, parent)


def object_change(tier: ObjectTier, event: TierEvent) -> Change | None:
    """None for a block that was removed since: another thread publishes that."""
    place = tier.find(event.digest, event.hash) if event.stored else None
    if event.stored and place is None:
        return None
    parent = 0 if place is None else int.from_bytes(place.block.parent[:8], "little")
    return Change(event.stored, OBJECT, event.digest, event.hash, parent)


def all_there(medium: str, contents: Contents) -> Iterator[Change]:
    """All blocks of a tier, given as namespace digest and rows, each chain in order."""
    for digest, rows in contents:
        for row in chains(rows):
            yield Change(True, medium, digest, row["hash"].tobytes(), int(row["parent"]))

"""Lines of replicas with made-up blocks, and a gateway's index that they fill."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np

from headrace.gateway.placement.endpoint_info import EndpointInfo
from headrace.gateway.placement.event_subscriber import EventSubscriber
from headrace.router.blocks.block_index import BlockIndex
from headrace.router.blocks.kv_events import KvEventProcessor
from headrace_engine.reporting.replica_publisher import ReplicaPublisher
from headrace_engine.reporting.report import Report
from headrace_kvstore.identity.prompt_hash import key_of
from headrace_kvstore.protocol.events import Change

TOKEN = "a-token-of-the-replica's-own"
HOST = "127.0.0.1"


def block(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=8).digest()


def keys(*numbers: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([key_of(block(number)) for number in numbers], np.uint64)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        await asyncio.sleep(0.005)


class Replica:
    """A line, and the engine whose blocks it tells of."""

    def __init__(self, name: str = "a", token: str = TOKEN) -> None:
        self.name, self.token = name, token
        self.held: dict[bytes, None] = {}
        self._lock = threading.Lock()
        self.line = ReplicaPublisher(token, HOST, self.contents)

    def contents(self) -> list[Change]:
        with self._lock:
            return [Change(True, "GPU", b"", key) for key in self.held]

    def change(self, stored: bool, *numbers: int) -> None:
        changes = [Change(stored, "GPU", b"", block(number)) for number in numbers]
        with self._lock:
            for key in (change.hash for change in changes):
                if stored:
                    self.held[key] = None
                else:
                    self.held.pop(key, None)
        self.line.publish(changes)

    def restart(self) -> None:
        self.line.close()
        self.held.clear()
        self.line = ReplicaPublisher(self.token, HOST, self.contents)

    @property
    def info(self) -> EndpointInfo:
        info = EndpointInfo.of(self.line.info())
        assert info is not None
        return info


class Timed(EventSubscriber):
    """Knows how much processor time each of its turns takes."""

    longest_s = 0.0

    def _read_due(self) -> None:
        began_s = time.thread_time()
        super()._read_due()
        self.longest_s = max(self.longest_s, time.thread_time() - began_s)


class Gateway:
    """An event processor, and the subscriptions that fill it."""

    def __init__(self, silent_s: float = 10.0) -> None:
        self.index = BlockIndex(2**24)
        self.events = KvEventProcessor(self.index, silent_s=silent_s)
        self.reports: list[Report] = []
        self.subscriber = Timed(self.events, self.reports.append)

    def follow(self, *replicas: Replica) -> None:
        self.subscriber.follow({replica.name: replica.info for replica in replicas})

    def holder(self, replica: str) -> int | None:
        """Number of its cache in the index, while anything is known of it."""
        try:
            return self.events.holder(replica)
        except KeyError:
            return None

    def has(self, replica: str, *numbers: int) -> bool:
        """Whether it holds these blocks, one behind the other, and nothing else."""
        holder = self.holder(replica)
        if holder is None or self.index.entries != len(numbers):
            return False
        return int(self.index.match(keys(*numbers))[holder]) == len(numbers)

"""Replicates memory segments between decode replicas, over the gossip log of the store's nodes.

The replicator is a thread beside the engine, and no look-up waits for it. It holds the memory's
lock for one segment at a time (`replication_log`), and never while it communicates. An exchange
moves at most MAX_EXCHANGE_BYTES, and exchanges are spaced so that at most `bytes_per_s` are moved.
Partitions with pending segments take turns, so that loading a corpus does not delay the answers of
other partitions. While no node answers, the thread tries again; it posts the pending segments when
a node is back.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from typing import Any

from headrace_decode.speculative.replication.replication_log import ReplicationLog
from headrace_decode.speculative.replication.segment_batch import CorruptBatchError
from headrace_decode.speculative.retrieval.draft_memory import PartitionKey
from headrace_decode.speculative.settings import ReplicationSettings
from headrace_kvstore.protocol.client import NodeClient, NodeUnavailable
from headrace_kvstore.protocol.gossip_log import GossipEntry
from headrace_kvstore.protocol.wire import AppendEntry, EntryPage, ReadEntries

logger = logging.getLogger("headrace.speculation")

MAX_EXCHANGE_BYTES = 128 * 1024
MAX_BATCH_BYTES = 32 * 1024


class SegmentReplicator:
    """A thread that replicates segments from `start` to `close` or the process's end."""

    def __init__(self, log: ReplicationLog, settings: ReplicationSettings) -> None:
        self.log, self.settings = log, settings
        self._client = NodeClient(
            settings.store,
            timeout_s=settings.timeout_s,
            retry_s=0.0,
            socket_folder=settings.socket_folder,
        )
        self._writer = log.memory.replica.to_bytes(8, "little")
        self._generation = ""
        self._read_position = self._head = 0
        self._posted = 0
        self._unconfirmed: tuple[PartitionKey, bytes] | None = None
        """A batch that the node has not confirmed."""
        self._state = "not started"
        self._counts: Counter[str] = Counter()
        self._thread_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-replicator", daemon=True)

    def start(self) -> None:
        """Start the thread, once. It begins with all entries of the gossip log."""
        if self._state == "not started":
            self._state = "connecting"
            self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def stats(self) -> dict[str, Any]:
        """Return JSON-able statistics.

        Returns:
            state: "not started", "connecting", "up" or "away" (no node answers).
            posted, applied: number of batches; `..._bytes`: their bytes.
            records: number of new records in the applied batches.
            damaged, failed: batches with a wrong checksum, and exchanges with another error.
            lost_node: how often the node stopped answering.
            incompatible: refused records of another model or tokenizer.
            pending, unread: number of entries to post, and of log positions to read.
            max_lock_s: longest time for which the memory's lock was held.
            thread_s: CPU seconds of the thread.
        """
        counted = ("posted", "posted_bytes", "applied", "applied_bytes", "records")
        return {
            "state": self._state,
            **{name: self._counts[name] for name in (*counted, "damaged", "failed", "lost_node")},
            "incompatible": self.log.incompatible,
            "pending": self.log.pending,
            "unread": self._head - self._read_position,
            "max_lock_s": self.log.max_lock_s,
            "thread_s": self._thread_s,
        }

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            before = self._counts["posted_bytes"] + self._counts["applied_bytes"]
            try:
                self._exchange()
            except NodeUnavailable as error:
                self._on_node_lost(error)
            except Exception:
                self._counts["failed"] += 1
                logger.exception("the replication of memory segments failed; it is tried again")
            moved = self._counts["posted_bytes"] + self._counts["applied_bytes"] - before
            more = moved and (self.log.pending or self._head > self._read_position)
            pause_s = moved / self.settings.bytes_per_s
            pause_s = pause_s if more else max(pause_s, self.settings.poll_s)
            self._thread_s = time.thread_time()

    def _on_node_lost(self, error: NodeUnavailable) -> None:
        if self._state == "up":
            self._counts["lost_node"] += 1
            logger.warning(
                "memory segments are not replicated while no store node answers: %s", error
            )
        self._state = "away"

    def _exchange(self) -> None:
        self._apply_batches()
        self._post_batches()

    def _post_batches(self) -> None:
        left = MAX_EXCHANGE_BYTES
        while left > 0:
            self._unconfirmed = self._unconfirmed or self.log.pending_batch(MAX_BATCH_BYTES)
            if self._unconfirmed is None:
                return
            key, data = self._unconfirmed
            entry = GossipEntry(self._writer, _partition_id(key), self._posted + 1, data)
            reply = self._send_request(AppendEntry(self._generation, entry))
            if reply.generation != self._generation:
                return  # the node restarted: the next exchange starts over
            self._unconfirmed = None
            self._posted += 1
            self._counts["posted"] += 1
            self._counts["posted_bytes"] += len(data)
            left -= len(data)

    def _apply_batches(self) -> None:
        place = self._generation, self._read_position
        reply = self._send_request(ReadEntries(*place, MAX_EXCHANGE_BYTES, self._writer))
        if reply.generation != self._generation:  # another log, which has nothing of this replica
            self._generation, self._unconfirmed = reply.generation, None
            self.log.requeue_all()
        for entry in reply.entries:
            name = f"entry of {entry.writer.hex()} up to {entry.last}"
            try:
                self._counts["records"] += self.log.apply(entry.data, name)
                self._counts["applied"] += 1
            except CorruptBatchError as error:
                self._counts["damaged"] += 1
                logger.warning("%s", error)
            except Exception:
                self._counts["failed"] += 1
                logger.exception(
                    "%s could not be applied; replication continues with the next one", name
                )
            self._counts["applied_bytes"] += len(entry.data)
        self._read_position, self._head = reply.after, reply.head

    def _send_request(self, request: AppendEntry | ReadEntries) -> EntryPage:
        reply = self._client.ask(request).result()
        if not isinstance(reply, EntryPage):
            names = type(request).__name__, type(reply).__name__
            raise NodeUnavailable("a node answers {} with {}".format(*names))
        self._state = "up"
        return reply


def _partition_id(key: PartitionKey) -> bytes:
    """Return a name for a partition that does not reveal the tenant's name."""
    name = f"{len(key.scope)} {key.scope} {key.tenant}".encode()
    return hashlib.blake2b(name, digest_size=16).digest()

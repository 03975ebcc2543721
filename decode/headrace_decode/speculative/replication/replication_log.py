"""Decides which segments a memory sends to other replicas, and which it accepts from them.

A replica sends each segment that it inserted itself, once. A queue has the header rows that are
still to be sent; a segment that was evicted before it was sent is skipped. After a restart of the
node all segments of this replica are queued again. Segments have the same ids on all replicas, so
applying one twice changes nothing. Segments of other replicas are not sent on. Text of another
tokenizer and answers of another model are refused: an earlier app of the node may have left them,
but they would never be drafted and would only take room.

Running replicas receive a corpus directly. One of them also sends the whole corpus when its version
takes over, for replicas that start later.

The engine's step needs the memory's lock, so the lock is held for one segment at a time, and a
waiting thread gets it in between.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from headrace_decode.speculative.draft_batch import DraftSource
from headrace_decode.speculative.replication.segment_batch import (
    SegmentBatch,
    SegmentRecord,
    VersionRecord,
    pack,
    unpack,
)
from headrace_decode.speculative.retrieval.draft_memory import PUBLIC_KEY, DraftMemory, PartitionKey
from headrace_decode.speculative.retrieval.layout import NONE
from headrace_decode.speculative.retrieval.partition_pool import MAX_SEGMENT_TOKENS, SegmentInfo
from headrace_decode.speculative.retrieval.ring_buffer import is_obsolete

logger = logging.getLogger("headrace.speculation")

MAX_ENTRIES = 65536
"""Maximum number of unsent entries of a partition, and of partitions with unsent entries; the
oldest are discarded."""
YIELD_S = 1e-4
"""Pause between two segments: releasing a lock alone does not let a waiting thread run."""

Entry = tuple[int, int] | VersionRecord
"""A segment's header row and its generation, or a record that is sent as it is."""


class ReplicationLog:
    """The segments that one memory still has to send, and the application of received ones.

    Attributes:
        max_lock_s: longest time for which the log held the memory's lock.
        incompatible: number of records refused because of another model or tokenizer.
    """

    def __init__(self, memory: DraftMemory) -> None:
        self.memory = memory
        self.max_lock_s = 0.0
        self.incompatible = 0
        self._queue: dict[PartitionKey, deque[Entry]] = {}
        """Unsent entries of each partition, the partition that has waited longest first."""
        self._in_flight = 0
        self._sent_versions: dict[tuple[PartitionKey, str], int] = {}
        memory.on_insert = self._on_insert
        memory.on_activate = self._on_activate

    @property
    def pending(self) -> int:
        """Number of unsent entries, with those of the last `pending_batch`."""
        with self.memory.lock:
            return sum(map(len, self._queue.values())) + self._in_flight

    def pending_batch(self, max_bytes: int) -> tuple[PartitionKey, bytes] | None:
        """Return the next batch, about `max_bytes` at most, and its partition.

        Partitions take turns. Return None if all entries are sent.
        """
        records: list[SegmentRecord | VersionRecord] = []
        while not records:
            with self._locked():
                self._in_flight = 0
                if not self._queue:
                    return None
                key, waiting = next(iter(self._queue.items()))
            size = 0
            while waiting and size < max_bytes:
                with self._locked():
                    record = self._record(waiting.popleft())
                    self._in_flight += 1
                if record is not None:
                    records.append(record)
                    size += len(record.tokens) if isinstance(record, SegmentRecord) else 0
                    time.sleep(YIELD_S)
            with self._locked():
                self._queue.pop(key, None)
                if waiting:
                    self._queue[key] = waiting
        replica = self.memory.replica
        return key, pack(SegmentBatch(replica, key.scope, key.tenant, records))  # type: ignore[arg-type]

    def requeue_all(self) -> None:
        """Queue all segments that this replica inserted itself and still has."""
        with self._locked():
            self._queue.clear()
            self._in_flight = 0
            headers = self.memory.pool.headers.copy()
            keys = {row: key for key, row in self.memory.pool.items()}
        own = (headers["partition"] != NONE) & (headers["corpus"] == 0) & (headers["foreign"] == 0)
        rows = np.flatnonzero(own)
        queue: dict[PartitionKey, deque[Entry]] = {}
        for row in rows[np.argsort(headers["created_s"][rows], kind="stable")].tolist():
            key = keys[int(headers["partition"][row])]
            waiting = queue.setdefault(key, deque(maxlen=MAX_ENTRIES))  # type: ignore[arg-type]
            waiting.append((row, int(headers["generation"][row])))
        with self._locked():
            added, self._queue = self._queue, queue
            for key, entries in added.items():
                for entry in entries:
                    self._add(key, entry)
            for (key, name), version in list(self._sent_versions.items()):
                self._on_activate(key, name, version)

    def apply(self, data: bytes, name: str) -> int:
        """Insert another replica's batch; return the number of new records.

        Args:
            data: the batch.
            name: name of the batch in errors.

        Raises:
            CorruptBatchError: the batch is damaged; none of it was inserted.
        """
        batch = unpack(data, name)
        if batch.replica == self.memory.replica:
            return 0
        key, new = PartitionKey(batch.scope, batch.tenant), 0
        for record in batch.records:
            with self._locked():
                new += (
                    self._activate(key, record)
                    if isinstance(record, VersionRecord)
                    else self._insert(key, record)
                )
            time.sleep(YIELD_S)
        return new

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.memory.lock:
            started_s = time.perf_counter()
            yield
            self.max_lock_s = max(self.max_lock_s, time.perf_counter() - started_s)

    def _add(self, key: PartitionKey, entry: Entry) -> None:
        self._queue.setdefault(key, deque(maxlen=MAX_ENTRIES)).append(entry)
        if len(self._queue) > MAX_ENTRIES:
            del self._queue[next(iter(self._queue))]

    def _on_insert(self, key: PartitionKey, header: int) -> None:
        self._add(key, (header, int(self.memory.pool.headers[header]["generation"])))

    def _on_activate(self, key: PartitionKey, name: str, version: int) -> None:
        pool, number = self.memory.pool, self.memory.corpus_number(key, name)
        mine = (pool.headers["corpus"] == number) & (pool.headers["version"] == version)
        rows = np.flatnonzero(mine & (pool.headers["partition"] != NONE))
        for header in rows[np.argsort(pool.headers["start"][rows])].tolist():
            self._on_insert(key, header)
        self._add(key, VersionRecord(name, version))
        self._sent_versions[key, name] = version

    def _record(self, entry: Entry) -> SegmentRecord | VersionRecord | None:
        """Return the record of an entry; None if its segment was evicted or is obsolete."""
        if isinstance(entry, VersionRecord):
            return entry
        memory, (row, generation) = self.memory, entry
        fields = memory.pool.headers[row]
        if fields["generation"] != generation or fields["partition"] == NONE:
            return None
        if is_obsolete(fields, memory.pool.versions, memory.clock()):
            return None
        corpus = memory.corpus_names.names[fields["corpus"]]
        return SegmentRecord(
            uid=int(fields["uid"]),
            created_s=float(fields["created_s"]),
            expires_s=float(fields["expires_s"]),
            version=int(fields["version"]),
            source=int(fields["source"]),
            corpus=str(corpus[2]) if isinstance(corpus, tuple) else "",
            model=b"" if fields["corpus"] else memory.settings.model,
            tokenizer=memory.settings.tokenizer,
            tokens=memory.pool.tokens_of(row).astype("<i4").tobytes(),
        )

    def _activate(self, key: PartitionKey, record: VersionRecord) -> bool:
        if not record.corpus or not self.memory.allows_corpora(key):
            return False
        number, versions = self.memory.corpus_number(key, record.corpus), self.memory.pool.versions
        new = record.version > versions[number]
        versions[number] = max(int(versions[number]), record.version)
        return bool(new)

    def _insert(self, key: PartitionKey, record: SegmentRecord) -> bool:
        """Insert a record's segment; return whether it was inserted.

        A segment is not inserted if it is invalid, not allowed here, expired or there already, or
        if there is no room. Invalid segments are those that no memory writes: with negative tokens,
        with other sources than corpora and answers, or with lengths out of bounds.
        """
        memory = self.memory
        count, rest = divmod(len(record.tokens), 4)
        tokens = np.frombuffer(record.tokens, "<i4", count).astype(np.int32)
        if rest or not 2 <= count <= MAX_SEGMENT_TOKENS or int(tokens.min()) < 0:
            return False
        if record.source != (DraftSource.OPERATOR if record.corpus else DraftSource.RESPONSE):
            return False
        if key.scope == PUBLIC_KEY.scope and (key != PUBLIC_KEY or not record.corpus):
            return False
        if record.uid >= 2**64:
            return False
        if not self._is_compatible(record):
            return False
        if record.corpus and not memory.allows_corpora(key):
            return False
        if not record.expires_s > memory.clock():
            return False
        same = memory.pool.headers["partition"][memory.pool.headers["uid"] == record.uid]
        if (same != NONE).any():
            return False
        info = SegmentInfo(
            source=record.source,
            created_s=record.created_s,
            expires_s=record.expires_s,
            corpus=memory.corpus_number(key, record.corpus) if record.corpus else 0,
            version=record.version,
            uid=record.uid,
            foreign=1,
        )
        return memory.pool.insert(key, tokens, info) is not None

    def _is_compatible(self, record: SegmentRecord) -> bool:
        """Return whether a request here could use the record for drafts."""
        ours = self.memory.settings
        for what, theirs, own in (
            ("tokenizer", record.tokenizer, ours.tokenizer),
            ("model", record.model or ours.model, ours.model),
        ):
            if theirs != own:
                if not self.incompatible:
                    logger.warning(
                        "segments of another %s are refused: digest %s, ours %s",
                        *(what, theirs.hex() or "empty", own.hex() or "empty"),
                    )
                self.incompatible += 1
                return False
        return True

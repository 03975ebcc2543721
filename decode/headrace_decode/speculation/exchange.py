"""What replicas tell each other: an append-only log per partition, read in order, absorbed once.

A replica logs the segments that it put in itself and how drafts fared, whosever segments they were
read from. It keeps no bytes for that: an entry names a header row and is encoded when it is read; a
segment that was evicted meanwhile is passed over. Entries carry sequence numbers that only grow
within (replica, partition), so that whoever absorbs keeps one number a replica and partition and
skips what is not above it: absorbing twice, or again after a crash of the carrier, changes nothing.
What was absorbed is not logged again; each replica reads every other's log.

A corpus reaches the replicas that run by itself; one of them logs it whole when its version takes
over, for those that start later. Segments that are there already are not put in again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from headrace_decode.speculation.draft import Source
from headrace_decode.speculation.layout import NONE
from headrace_decode.speculation.memory import Key, Memory
from headrace_decode.speculation.record import (
    FaredRecord,
    FlippedRecord,
    SegmentRecord,
    decode_batch,
    encode_batch,
    encode_record,
)
from headrace_decode.speculation.ring import is_over
from headrace_decode.speculation.step import quarantine
from headrace_decode.speculation.transfer import put_in, record_of

MOST_ENTRIES = 65536
"""Per partition; a reader further behind misses the oldest."""
FARED_PER_RECORD = 1024


Entry = tuple[int, int] | FaredRecord | FlippedRecord
"""Of a segment, its header row and generation."""


@dataclass
class _Entries:
    following: int = 1
    known: deque[tuple[int, Entry]] = field(default_factory=lambda: deque(maxlen=MOST_ENTRIES))

    def add(self, entry: Entry) -> None:
        self.known.append((self.following, entry))
        self.following += 1


class Exchange:
    """The log of one memory, and what it absorbed of others'. Holds the memory's lock while it
    works, for as long as one batch takes."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._log: dict[Key, _Entries] = {}
        self._absorbed: dict[tuple[int, str, str], int] = {}
        memory.inserted = self._note
        memory.flipped = self._note_flip

    def keys(self) -> list[Key]:
        """Partitions that have a log."""
        with self.memory.lock:
            return list(self._log)

    def read(self, key: Key, after: int, most_bytes: int) -> tuple[bytes, int]:
        """What was logged after a sequence number, about `most_bytes` of it at most.

        Returns:
            A batch, empty bytes if there is nothing, and the number to go on from.
        """
        with self.memory.lock:
            self._collect_fared(key)
            log = self._log.get(key)
            records, size = [], 0
            for number, entry in log.known if log else ():
                if number <= after:
                    continue
                record = self._segment(*entry) if isinstance(entry, tuple) else entry
                after = number
                if record is None:
                    continue
                records.append(encode_record(number, record))
                size += len(records[-1])
                if size >= most_bytes:
                    break
        if not records:
            return b"", after
        return encode_batch(self.memory.replica, key.scope, key.tenant, records), after

    def absorb(self, data: bytes, name: str) -> int:
        """Take in another replica's batch; how many records were new.

        Args:
            name: what the batch is called in errors.

        Raises:
            DamagedError: nothing of it was taken in.
        """
        batch = decode_batch(data, name)
        if batch.replica == self.memory.replica:
            return 0
        source, key = (batch.replica, batch.scope, batch.tenant), Key(batch.scope, batch.tenant)
        new = 0
        with self.memory.lock:
            for number, record in batch.records:
                if number <= self._absorbed.get(source, 0):
                    continue
                self._absorbed[source] = number
                new += 1
                if isinstance(record, SegmentRecord):
                    if record.expires_s > self.memory.clock():
                        put_in(self.memory, key, record, foreign=True)
                elif isinstance(record, FlippedRecord):
                    self._flip(key, record)
                else:
                    self._apply(key, record)
        return new

    def _note(self, key: Key, header: int) -> None:
        self._add(key, (header, int(self.memory.pool.headers[header]["generation"])))

    def _add(self, key: Key, entry: Entry) -> None:
        self._log.setdefault(key, _Entries()).add(entry)

    def _note_flip(self, key: Key, name: str, version: int) -> None:
        pool, number = self.memory.pool, self.memory.corpus_number(key, name)
        mine = (pool.headers["corpus"] == number) & (pool.headers["version"] == version)
        rows = np.flatnonzero(mine & (pool.headers["partition"] != NONE))
        for header in rows[np.argsort(pool.headers["start"][rows])].tolist():
            self._note(key, header)
        self._add(key, FlippedRecord(name, version))

    def _flip(self, key: Key, record: FlippedRecord) -> None:
        if record.corpus and self.memory.may_hold(key, Source.OPERATOR):
            number = self.memory.corpus_number(key, record.corpus)
            versions = self.memory.pool.versions
            versions[number] = max(int(versions[number]), record.version)

    def _segment(self, header: int, generation: int) -> SegmentRecord | None:
        fields = self.memory.pool.headers[header]
        if fields["generation"] != generation or fields["partition"] < 0:
            return None
        if is_over(fields, self.memory.pool.versions, self.memory.clock()):
            return None
        return record_of(self.memory, header)

    def _collect_fared(self, key: Key) -> None:
        headers, row = self.memory.pool.headers, self.memory.pool.find(key)
        if row is None:
            return
        told = headers["untold_accepted"].astype(np.int64) + headers["untold_refused"]
        rows = np.flatnonzero((headers["partition"] == row) & (told > 0))
        for start in range(0, len(rows), FARED_PER_RECORD):
            some = rows[start : start + FARED_PER_RECORD]
            columns = (headers[name][some].tolist() for name in _FARED)
            record = FaredRecord(tuple(zip(*columns, strict=True)))
            self._log.setdefault(key, _Entries()).add(record)
        headers["untold_accepted"][rows] = 0
        headers["untold_refused"][rows] = 0

    def _apply(self, key: Key, record: FaredRecord) -> None:
        row = self.memory.pool.find(key)
        if row is None:
            return
        headers = self.memory.pool.headers
        rows = np.flatnonzero(headers["partition"] == row)
        by_uid = dict(zip(headers["uid"][rows].tolist(), rows.tolist(), strict=True))
        for uid, accepted, refused in record.counts:
            header = by_uid.get(uid)
            if header is not None:
                headers[header]["accepted"] += accepted
                headers[header]["refused"] += refused
                quarantine(headers, header, self.memory.clock())


_FARED = ("uid", "untold_accepted", "untold_refused")

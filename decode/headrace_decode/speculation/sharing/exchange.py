"""What replicas tell each other: an append-only log per partition, read in order, absorbed once.

A replica logs the segments that it put in itself. It keeps no bytes for that: an entry names a
header row and is encoded when it is read; a segment that was evicted meanwhile is passed over.
Entries carry sequence numbers that only grow within (replica, partition), so that whoever absorbs
keeps one number a replica and partition and skips what is not above it: absorbing twice, or again
after a crash of the carrier, changes nothing. What was absorbed is not logged again; each replica
reads every other's log.

A corpus reaches the replicas that run by itself; one of them logs it whole when its version takes
over, for those that start later. Segments that are there already are not put in again.

The engine's step needs the memory's lock, so it is held for one entry at a time, and whoever waits
gets it in between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from headrace_decode.speculation.draft import Source
from headrace_decode.speculation.retrieval.draft_memory import Key, Memory
from headrace_decode.speculation.retrieval.ring import is_over
from headrace_decode.speculation.retrieval.segments import NONE
from headrace_decode.speculation.sharing.log_record import (
    FlippedRecord,
    SegmentRecord,
    decode_batch,
    encode_batch,
    encode_record,
)
from headrace_decode.speculation.sharing.transfer import put_in, record_of

MOST_ENTRIES = 65536
"""Per partition; a reader further behind misses the oldest."""
BREATH_S = 1e-4
"""Between two entries: releasing a lock alone does not let a waiting thread run."""

Entry = tuple[int, int] | FlippedRecord
"""A segment's header row and its generation, or what else is told."""


@dataclass
class _Entries:
    """The last entries of a partition; numbers have no gaps."""

    last: int = 0
    known: deque[Entry] = field(default_factory=lambda: deque(maxlen=MOST_ENTRIES))

    def add(self, entry: Entry) -> None:
        self.known.append(entry)
        self.last += 1

    def behind(self, after: int) -> tuple[int, Entry] | None:
        """The first one behind a number that is still known, with its own."""
        first = self.last - len(self.known) + 1
        number = max(after + 1, first)
        return (number, self.known[number - first]) if number <= self.last else None


class Exchange:
    """The log of one memory, and what it absorbed of others'.

    Attributes:
        logged: entries so far, of all partitions.
        longest_hold_s: longest time for which the memory's lock was held here.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.logged = 0
        self.longest_hold_s = 0.0
        self._log: dict[Key, _Entries] = {}
        self._absorbed: dict[tuple[int, str, str], int] = {}
        memory.inserted = self._note
        memory.flipped = self._note_flip

    def heads(self) -> dict[Key, int]:
        """Partitions that have a log, with the number of their last entry."""
        with self._held():
            return {key: log.last for key, log in self._log.items()}

    def read(self, key: Key, after: int, most_bytes: int) -> tuple[bytes, int]:
        """What was logged after a sequence number, about `most_bytes` of it at most.

        Returns:
            A batch, empty bytes if there is nothing, and the number to go on from.
        """
        log, records, size = self._log.get(key), [], 0
        while log is not None and size < most_bytes:
            with self._held():
                found = log.behind(after)
                if found is None:
                    break
                after, entry = found
                record = self._segment(*entry) if isinstance(entry, tuple) else entry
            if record is not None:
                records.append(encode_record(after, record))
                size += len(records[-1])
                time.sleep(BREATH_S)
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
        for number, record in batch.records:
            if number <= self._absorbed.get(source, 0):
                continue
            self._absorbed[source] = number
            new += 1
            if isinstance(record, FlippedRecord):
                with self._held():
                    self._flip(key, record)
            elif record.expires_s > self.memory.clock():
                with self._held():
                    put_in(self.memory, key, record, foreign=True)
            time.sleep(BREATH_S)
        return new

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self.memory.lock:
            started_s = time.perf_counter()
            yield
            self.longest_hold_s = max(self.longest_hold_s, time.perf_counter() - started_s)

    def _note(self, key: Key, header: int) -> None:
        self._add(key, (header, int(self.memory.pool.headers[header]["generation"])))

    def _add(self, key: Key, entry: Entry) -> None:
        self._log.setdefault(key, _Entries()).add(entry)
        self.logged += 1

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

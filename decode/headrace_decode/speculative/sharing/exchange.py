"""Decides which segments a memory sends to other replicas, and which it takes in from them.

The memory is its own log. A replica sends each segment that it inserted itself, once. A queue has
the header rows that are still to be sent; a segment that was evicted in the meantime is skipped.
After a restart of the board all segments of this replica are queued again. Segments have the same
ids on all replicas, so taking one in twice changes nothing. Segments of other replicas are not sent
on. Text of another tokenizer and answers of another model are refused: a backup may contain them,
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

from headrace_decode.speculative.draft import Source
from headrace_decode.speculative.retrieval.draft_memory import PUBLIC_KEY, Key, Memory
from headrace_decode.speculative.retrieval.pool import LONGEST_SEGMENT_TOKENS, SegmentInfo
from headrace_decode.speculative.retrieval.ring import is_over
from headrace_decode.speculative.retrieval.segments import NONE
from headrace_decode.speculative.sharing.record import (
    Batch,
    FlippedRecord,
    SegmentRecord,
    pack,
    unpack,
)

logger = logging.getLogger("headrace.speculation")

MAX_ENTRIES = 65536
"""Maximum number of unsent entries of a partition, and of partitions with unsent entries; the
oldest are discarded."""
BREATH_S = 1e-4
"""Pause between two segments: releasing a lock alone does not let a waiting thread run."""

Entry = tuple[int, int] | FlippedRecord
"""A segment's header row and its generation, or a record that is sent as it is."""


class Exchange:
    """The exchange of one memory's segments with the batches of other replicas.

    Attributes:
        longest_hold_s: longest time for which the exchange held the memory's lock.
        of_others: number of records refused because of another model or tokenizer.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.longest_hold_s = 0.0
        self.of_others = 0
        self._queue: dict[Key, deque[Entry]] = {}
        """Unsent entries of each partition, the partition that has waited longest first."""
        self._in_hand = 0
        self._told_versions: dict[tuple[Key, str], int] = {}
        memory.inserted = self._inserted
        memory.flipped = self._flipped

    @property
    def untold(self) -> int:
        """Number of unsent entries. Those of the last batch count until the next `tell`."""
        with self.memory.lock:
            return sum(map(len, self._queue.values())) + self._in_hand

    def tell(self, most_bytes: int) -> tuple[Key, bytes] | None:
        """Return the next batch, about `most_bytes` at most, and its partition.

        Partitions take turns. Return None if all entries are sent.
        """
        records: list[SegmentRecord | FlippedRecord] = []
        while not records:
            with self._held():
                self._in_hand = 0
                if not self._queue:
                    return None
                key, waiting = next(iter(self._queue.items()))
            size = 0
            while waiting and size < most_bytes:
                with self._held():
                    record = self._record(waiting.popleft())
                    self._in_hand += 1
                if record is not None:
                    records.append(record)
                    size += len(record.tokens) if isinstance(record, SegmentRecord) else 0
                    time.sleep(BREATH_S)
            with self._held():
                self._queue.pop(key, None)
                if waiting:
                    self._queue[key] = waiting
        return key, pack(Batch(self.memory.replica, key.scope, key.tenant, records))  # type: ignore[arg-type]

    def tell_again(self) -> None:
        """Queue all segments that this replica inserted itself and still has."""
        with self._held():
            self._queue.clear()
            self._in_hand = 0
            headers = self.memory.pool.headers.copy()
            keys = {row: key for key, row in self.memory.pool.kept()}
        own = (headers["partition"] != NONE) & (headers["corpus"] == 0) & (headers["foreign"] == 0)
        rows = np.flatnonzero(own)
        queue: dict[Key, deque[Entry]] = {}
        for row in rows[np.argsort(headers["created_s"][rows], kind="stable")].tolist():
            key = keys[int(headers["partition"][row])]
            waiting = queue.setdefault(key, deque(maxlen=MAX_ENTRIES))  # type: ignore[arg-type]
            waiting.append((row, int(headers["generation"][row])))
        with self._held():
            meanwhile, self._queue = self._queue, queue
            for key, entries in meanwhile.items():
                for entry in entries:
                    self._add(key, entry)
            for (key, name), version in list(self._told_versions.items()):
                self._flipped(key, name, version)

    def absorb(self, data: bytes, name: str) -> int:
        """Insert another replica's batch; return the number of new records.

        Args:
            data: the batch.
            name: name of the batch in errors.

        Raises:
            DamagedError: the batch is damaged; none of it was inserted.
        """
        batch = unpack(data, name)
        if batch.replica == self.memory.replica:
            return 0
        key, new = Key(batch.scope, batch.tenant), 0
        for record in batch.records:
            with self._held():
                new += (
                    self._flip(key, record)
                    if isinstance(record, FlippedRecord)
                    else self._put_in(key, record)
                )
            time.sleep(BREATH_S)
        return new

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self.memory.lock:
            started_s = time.perf_counter()
            yield
            self.longest_hold_s = max(self.longest_hold_s, time.perf_counter() - started_s)

    def _add(self, key: Key, entry: Entry) -> None:
        self._queue.setdefault(key, deque(maxlen=MAX_ENTRIES)).append(entry)
        if len(self._queue) > MAX_ENTRIES:
            del self._queue[next(iter(self._queue))]

    def _inserted(self, key: Key, header: int) -> None:
        self._add(key, (header, int(self.memory.pool.headers[header]["generation"])))

    def _flipped(self, key: Key, name: str, version: int) -> None:
        pool, number = self.memory.pool, self.memory.corpus_number(key, name)
        mine = (pool.headers["corpus"] == number) & (pool.headers["version"] == version)
        rows = np.flatnonzero(mine & (pool.headers["partition"] != NONE))
        for header in rows[np.argsort(pool.headers["start"][rows])].tolist():
            self._inserted(key, header)
        self._add(key, FlippedRecord(name, version))
        self._told_versions[key, name] = version

    def _record(self, entry: Entry) -> SegmentRecord | FlippedRecord | None:
        """Return the record of an entry; None if its segment was evicted or is over."""
        if isinstance(entry, FlippedRecord):
            return entry
        memory, (row, generation) = self.memory, entry
        fields = memory.pool.headers[row]
        if fields["generation"] != generation or fields["partition"] == NONE:
            return None
        if is_over(fields, memory.pool.versions, memory.clock()):
            return None
        corpus = memory.corpora.names[fields["corpus"]]
        model, tokenizer = (memory.digests.names[fields[n]] for n in ("model", "tokenizer"))
        return SegmentRecord(
            uid=int(fields["uid"]),
            created_s=float(fields["created_s"]),
            expires_s=float(fields["expires_s"]),
            version=int(fields["version"]),
            source=int(fields["source"]),
            corpus=str(corpus[2]) if isinstance(corpus, tuple) else "",
            model=model if isinstance(model, bytes) else b"",
            tokenizer=tokenizer if isinstance(tokenizer, bytes) else b"",
            tokens=memory.pool.tokens_of(row).astype("<i4").tobytes(),
        )

    def _flip(self, key: Key, record: FlippedRecord) -> bool:
        if not record.corpus or not self.memory.may_hold(key, Source.OPERATOR):
            return False
        number, versions = self.memory.corpus_number(key, record.corpus), self.memory.pool.versions
        new = record.version > versions[number]
        versions[number] = max(int(versions[number]), record.version)
        return bool(new)

    def _put_in(self, key: Key, record: SegmentRecord) -> bool:
        """Insert a record's segment; return whether it was inserted.

        A segment is not inserted if it is invalid, not allowed here, expired or there already, or
        if there is no room. Invalid segments are those that no memory writes: with negative tokens,
        with other sources than corpora and answers, or with lengths out of bounds.
        """
        memory = self.memory
        count, rest = divmod(len(record.tokens), 4)
        tokens = np.frombuffer(record.tokens, "<i4", count).astype(np.int32)
        if rest or not 2 <= count <= LONGEST_SEGMENT_TOKENS or int(tokens.min()) < 0:
            return False
        if record.source != (Source.OPERATOR if record.corpus else Source.RESPONSE):
            return False
        if (key.scope == PUBLIC_KEY.scope and key != PUBLIC_KEY) or record.uid >= 2**64:
            return False
        if not self._is_of_ours(record):
            return False
        if not memory.may_hold(key, record.source) or not record.expires_s > memory.clock():
            return False
        same = memory.pool.headers["partition"][memory.pool.headers["uid"] == record.uid]
        if (same != NONE).any():
            return False
        info = SegmentInfo(
            source=record.source,
            created_s=record.created_s,
            expires_s=record.expires_s,
            model=memory.digest_number(record.model),
            tokenizer=memory.digest_number(record.tokenizer),
            corpus=memory.corpus_number(key, record.corpus) if record.corpus else 0,
            version=record.version,
            uid=record.uid,
            foreign=1,
        )
        return memory.pool.insert(key, tokens, info) is not None

    def _is_of_ours(self, record: SegmentRecord) -> bool:
        """Return whether a request here could use the record for drafts (`retrieve.usable`)."""
        ours = self.memory.settings
        for what, theirs, own in (
            ("tokenizer", record.tokenizer, ours.tokenizer),
            ("model", record.model or ours.model, ours.model),
        ):
            if theirs != own:
                if not self.of_others:
                    logger.warning(
                        "what was learned with another %s is passed over: digest %s, ours %s",
                        *(what, theirs.hex() or "empty", own.hex() or "empty"),
                    )
                self.of_others += 1
                return False
        return True

"""The object tier: KV blocks below a prefix of an object store, shared by all who may read it.

The tier walks through the store's names at the start, and from then on through LIST_OBJECTS of them
every `refresh_s`; the names describe the blocks. So it finds blocks that another cluster wrote, and
drops those that a whole walk did not show. It knows the INDEX_BLOCKS objects used or made last.
Objects under this tier's writer name stay within `size_bytes`, also those beyond the index; the
least recently used are removed first. Objects of other writers are never removed.

No error reaches a request. A missing object, a flipped byte, an endpoint that refuses, hangs or is
away are misses, each counted by name. After failures in a row a circuit breaker stops reads, or
writes, and lets single tries through until one works. With read-only credentials the tier only
reads.

All who can write below the prefix are trusted: checksums find damage, not forgery.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from headrace_kvstore.circuit_breaker import CircuitBreaker
from headrace_kvstore.daemon_thread_pool import DaemonThreadPool
from headrace_kvstore.nvme.record import BlockShape, WriteRequest
from headrace_kvstore.objects.excluded_objects import ExcludedObjects
from headrace_kvstore.objects.object_catalog import ObjectCatalog, StoredObject
from headrace_kvstore.objects.object_client import Listed, ObjectError, StoreClient
from headrace_kvstore.objects.object_format import ObjectName, pack
from headrace_kvstore.objects.object_read import ObjectRead
from headrace_kvstore.objects.object_walk import ListingPass, TrimPlan

logger = logging.getLogger("headrace.kvstore")

REQUESTS = 4
"""Maximum number of reads at once, and of writes at once; each read holds one block in memory."""
INDEX_BLOCKS = 1 << 18
"""Maximum number of objects known at once, those used or made last: about 0.25 GB."""
LIST_OBJECTS, BATCH_OBJECTS = 1 << 16, 1 << 12
"""Number of names listed in one refresh (66 requests to S3), and added under one lock."""
SPARE_SHARE = 100
"""A tier with more objects than it knows leaves at least 1 / SPARE_SHARE of its size free."""
READ_TIMEOUTS = 3
"""Number of request timeouts after which a read is given up, including its wait for a thread."""
TICK_S = 0.1

T = TypeVar("T")
Packed = tuple[ObjectName, memoryview]
"""An object to be made."""


class ObjectTier:
    """Blocks in an object store. Thread-safe; works from `start` to `close`.

    Args:
        client: requests below the prefix; also an attribute.
        writer: name of the writer of its own objects: letters, digits, `_`, `-`; nodes of one name
            share `size_bytes` and may remove each other's objects.
        size_bytes: maximum size of its own objects.
        refresh_s: time between listings.
        timeout_s: of one request of the client.
        ready: called once the first listing is known.
    """

    def __init__(
        self,
        client: StoreClient,
        writer: str,
        size_bytes: int,
        *,
        refresh_s: float = 30.0,
        timeout_s: float = 10.0,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.writer, self.size_bytes = writer, size_bytes
        self.refreshed = threading.Event()
        """Set once the first listing is known."""
        self.client, self._ready = client, ready
        self._refresh_s, self._timeout_s = refresh_s, timeout_s
        self._reads, self._writes = CircuitBreaker(), CircuitBreaker()
        self._lock = threading.RLock()
        self.catalog = ObjectCatalog(writer)
        self._excluded = ExcludedObjects()
        self._listing: ListingPass | None = None
        self._listings = 0
        self._unindexed = self._unindexed_bytes = self._written_in_listing = 0
        self._trim = TrimPlan()
        self._counts: Counter[str] = Counter()
        self._last_error = ""
        self._readers = DaemonThreadPool(REQUESTS, "kv-object")
        self._putters = DaemonThreadPool(REQUESTS, "kv-object-put")
        self._stop = threading.Event()
        self._refresher = threading.Thread(
            target=self._refresh_loop, name="kv-object-keeper", daemon=True
        )

    def start(self) -> ObjectTier:
        """Begin to list in the background, and to take requests."""
        self._refresher.start()
        return self

    def close(self, timeout_s: float = 1.0) -> None:
        """End all work. Late answers of an endpoint that hangs do not reach callers' memory."""
        deadline = time.monotonic() + timeout_s
        self._stop.set()
        for workers in (self._readers, self._putters):
            workers.close(max(0.0, deadline - time.monotonic()))
        if self._refresher.ident is not None:
            self._refresher.join(max(0.0, deadline - time.monotonic()))

    # Looking

    @property
    def may_read(self) -> bool:
        """Whether the breaker allows reads."""
        return not self._reads.blocked(time.monotonic())

    @property
    def may_write(self) -> bool:
        """Whether the breaker allows writes."""
        return not self._writes.blocked(time.monotonic())

    def contains(self, digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
        """Return for each block whether it is known to be here, bool (n,); change nothing."""
        with self._lock:
            return self.catalog.contains(digest, hashes)

    def find(self, digest: bytes, block_hash: bytes) -> StoredObject | None:
        """Return an object that holds a block, or None."""
        with self._lock:
            return self.catalog.find(digest, block_hash)

    def contents(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield namespace digest and rows, SLOT (n,), each block once."""
        with self._lock:
            found = list(self.catalog.contents())
        yield from found

    def stats(self) -> dict[str, Any]:
        """Return JSON-able sizes, states and counts since the start."""
        with self._lock:
            return {
                "state": "on" if self.may_read else "off",
                "reason": "" if self.may_read else f"breaker open: {self._last_error}",
                "writing": "on" if self.may_write else "off",
                "blocks": self.catalog.blocks,
                "objects": len(self.catalog.objects) + self._unindexed,
                "bytes": self._own_bytes,
                "size_bytes": self.size_bytes,
                "ignored": self._excluded.counts(),
                "breaker_opened": self._reads.opened + self._writes.opened,
                "last_error": self._last_error,
                **self._counts,
            }

    # Reading

    def read(
        self, objects: Sequence[StoredObject], addresses: np.ndarray, sums: Sequence[np.ndarray]
    ) -> ObjectRead:
        """Start reading blocks of one shape to u64 addresses (blocks, layers). Waiting for it ends
        within `READ_TIMEOUTS` request timeouts, whatever the endpoint does.

        sums: u64 (layers,) a block, to be filled in.
        """
        now_s = time.monotonic()
        deadline_s = now_s + READ_TIMEOUTS * self._timeout_s
        read = ObjectRead(objects, addresses, sums, deadline_s, self._on_block_read)
        with self._lock:
            self._counts["reads"] += len(objects)
            for held in objects:
                self.catalog.use(held, now_s)
        for block in range(len(objects)):
            self._readers.submit(partial(self._bring, read, block))
        return read

    def _bring(self, read: ObjectRead, block: int) -> None:
        """Make one request, in a worker."""
        data = None
        try:
            data = None if read.aborted else self._get(read.objects[block])
        finally:
            read.answer(block, data)

    def _on_block_read(self, held: StoredObject, right: bool) -> None:
        self._count("reads_good" if right else "reads_corrupt", 1)
        if not right:
            self._ignore_object(held.text, "corrupt")

    def _get(self, held: StoredObject) -> memoryview | None:
        """Return an object's bytes; None if the request fails, or another reader found them bad."""
        with self._lock:
            if held.text not in self.catalog.objects:
                return None

        def get() -> memoryview:
            try:
                return self.client.get(held.text, 0, held.name.size_bytes)
            except ObjectError as error:
                if error.reason == "absent":
                    self._ignore_object(held.text, "gone")
                raise

        data = self._request("reads", self._reads, get)
        if data is None or len(data) == held.name.size_bytes:
            return data
        self._count("reads_truncated", 1)
        self._ignore_object(held.text, "truncated")
        return None

    # Writing

    def pack(self, shape: BlockShape, saves: Sequence[WriteRequest]) -> list[Packed]:
        """Copy blocks that are not here yet into the bytes of new objects.

        The memory may change during the copy: blocks that do not match their sums are left out, and
        so are blocks that no name can describe.
        """
        here = self.contains(shape.digest, [save.hash for save in saves])
        packed: list[Packed] = []
        for save in (save for save, there in zip(saves, here, strict=True) if not there):
            try:
                name = ObjectName.of(shape, self.writer, save)
                str(name)
            except (ValueError, struct.error):
                self._count("writes_impossible", 1)
                continue
            data = pack(shape, save)
            if data is None:
                self._count("writes_overwritten", 1)
            else:
                packed.append((name, data))
        return packed

    def put(self, packed: Sequence[Packed]) -> int:
        """Make objects, `REQUESTS` at once, and wait for them; return how many were made."""
        needed = sum(len(data) for _, data in packed)
        if packed and self.may_write and not self._make_room(needed):
            self._count("writes_full", len(packed))
            return 0
        over = threading.Semaphore(0)
        made: list[ObjectName] = []

        def put(name: ObjectName, data: memoryview) -> None:
            try:
                if not self._stop.is_set() and self._put(name, data):
                    made.append(name)
            finally:
                over.release()

        for each in packed:
            self._putters.submit(partial(put, *each))
        for _ in packed:
            while not over.acquire(timeout=TICK_S):
                if self._stop.is_set():
                    return len(made)
        return len(made)

    def _put(self, name: ObjectName, data: memoryview) -> bool:
        def put() -> bool:
            self.client.put(str(name), data)
            return True

        if not self._request("writes", self._writes, put):
            return False
        self._count("writes", 1)
        self._count("written_bytes", len(data))
        self._add_written(StoredObject(name, str(name), time.monotonic()))
        return True

    def _make_room(self, needed_bytes: int) -> bool:
        """Remove own objects until `needed_bytes` fit; return False if that is impossible."""
        with self._lock:
            names = self.catalog.take_victims(self._own_bytes + needed_bytes - self.size_bytes)
        return names is not None and (not names or self._delete(names))

    def _delete(self, names: Sequence[str]) -> bool:
        with self._lock:
            self._excluded.record_removed(names)
        try:
            self.client.delete(names)
        except ObjectError as error:
            self._failed("deletes", error, len(names))
            return False  # objects that still exist are found again
        self._count("objects_evicted", len(names))
        return True

    # Learning which objects exist

    def refresh(self) -> bool:
        """List the next LIST_OBJECTS names, and add new objects. At the end of a walk, drop objects
        that are missing. Returns False if the listing failed."""
        with self._lock:
            self._excluded.begin_refresh()
        listing = self._listing = self._listing or ListingPass(self._listings + 1)
        self._listings = listing.number
        take = partial(listing.take, self.client, BATCH_OBJECTS)
        for _ in range(LIST_OBJECTS // BATCH_OBJECTS):
            listed = self._request("lists", self._reads, take)
            if listed is None:
                listing.names = None
                if not listing.in_order:
                    self._listing = None
                return False
            self._add_listed(listing, listed)
            if listing.ended:
                self._finish_listing(listing)
                break
        self._count("lists", 1)
        return True

    def _add_listed(self, listing: ListingPass, listed: Sequence[Listed]) -> None:
        """Add new objects as far as there is room; remove own ones that are too many."""
        with self._lock:
            fresh = [each for each in listed if self._is_new(listing, each)]
        found: dict[str, tuple[StoredObject, float]] = {}
        for each in fresh:
            name = ObjectName.parse(each.name)
            if name is None or name.size_bytes != each.size_bytes:
                listing.ignored["foreign" if name is None else "truncated"] += 1
                continue
            age_s = max(0.0, time.time() - each.modified_s)
            held = StoredObject(name, each.name, time.monotonic() - age_s, listing=listing.number)
            found[each.name] = held, each.modified_s
        too_many: list[str] = []
        with self._lock:
            for held, _ in found.values():
                self.catalog.add(held)
            gone = self.catalog.shrink(INDEX_BLOCKS)
            for held in gone:
                if held.text in found:
                    modified_s = found[held.text][1]
                else:
                    modified_s = time.time() - (time.monotonic() - held.used_s)
                    self._unindexed_bytes += held.name.size_bytes * self.catalog.is_own(held)
                if not self.catalog.is_own(held) or held.listing < listing.number:
                    continue  # this walk will still reach the latter
                if self._trim.takes(held.name.size_bytes, modified_s):
                    too_many.append(held.text)
                else:
                    listing.count(held.name.size_bytes, modified_s)
        self._count("index_full", len(gone))
        if too_many and not self._delete(too_many):
            self._trim = TrimPlan()  # until the next walk

    def _is_new(self, listing: ListingPass, each: Listed) -> bool:
        """Whether a listed object is neither known nor ignored nor removed by this tier."""
        held = self.catalog.objects.get(each.name)
        if held is not None:
            held.listing = listing.number
            return False
        return not self._excluded.excludes(each, listing.number)

    def _finish_listing(self, listing: ListingPass) -> None:
        """Drop the objects that the whole walk did not show, and plan the next walk."""
        with self._lock:
            known = list(self.catalog.objects.values())
        gone = [held for held in known if held.listing < listing.number]
        with self._lock:
            for held in gone:
                if held.listing < listing.number:
                    self.catalog.remove(held.text)
            self._excluded.finish_listing(listing)
            self._listing = None
            self._unindexed, self._unindexed_bytes = listing.own_objects, listing.own_bytes
            written, self._written_in_listing = self._written_in_listing, 0
            # The next walk makes room for the writes until the walk after it has ended.
            spare = max(self.size_bytes // SPARE_SHARE, 2 * written) if listing.own_objects else 0
            excess = self._own_bytes - max(0, self.size_bytes - spare)
            self._trim = TrimPlan.of(listing, excess)
        if not listing.own_objects:
            self._make_room(0)
        if not self.refreshed.is_set():
            self.refreshed.set()
            self._ready()

    @property
    def _own_bytes(self) -> int:
        """Bytes of all own objects; for those beyond the index, by the last walk's count."""
        return self.catalog.own_bytes + self._unindexed_bytes

    def _add_written(self, held: StoredObject) -> None:
        with self._lock:
            self._excluded.readmit(held.text)
            held.listing = self._listings
            self.catalog.add(held)
            self._written_in_listing += held.name.size_bytes
            for gone in self.catalog.shrink(INDEX_BLOCKS):
                self._unindexed_bytes += gone.name.size_bytes * self.catalog.is_own(gone)

    def _ignore_object(self, name: str, why: str) -> None:
        """Drop an object, and do not use it until it is written again."""
        with self._lock:
            self.catalog.remove(name)
            self._excluded.ignore(name, why, self._listings)

    # Inside

    def _refresh_loop(self) -> None:
        """Refresh every `refresh_s`, until `close`."""
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            pause_s = min(1.0, self._refresh_s)
            try:
                if self.refresh():
                    hurries = not self.refreshed.is_set() or self._trim.bytes > 0
                    pause_s = 0.0 if hurries else self._refresh_s
            except Exception:
                logger.exception("looking after the object tier failed; it goes on")

    def _request(self, what: str, breaker: CircuitBreaker, call: Callable[[], T]) -> T | None:
        """Make a request and return its answer; None if it fails or the breaker stops it, which is
        counted."""
        if not breaker.allow(time.monotonic()):
            self._count(f"{what}_breaker", 1)
            return None
        try:
            answer = call()
        except ObjectError as error:
            if what == "reads" and error.reason == "absent":
                breaker.success()
            else:
                breaker.failure(time.monotonic())
            self._failed(what, error, 1)
            return None
        finally:
            breaker.neither()
        breaker.success()
        return answer

    def _failed(self, what: str, error: ObjectError, count: int) -> None:
        self._count(f"{what}_{error.reason}", count)
        if what == "reads" and error.reason == "absent":
            return
        with self._lock:
            known, self._last_error = self._last_error, error.reason
        if known != error.reason:
            logger.warning("object tier: %s", error)

    def _count(self, name: str, blocks: int) -> None:
        if blocks > 0:
            with self._lock:
                self._counts[name] += blocks

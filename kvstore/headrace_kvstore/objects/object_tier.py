"""The object tier: KV blocks below a prefix of an object store, shared by everyone who may read it.

The tier lists the store at the start and every `refresh_s`, and reads the headers of new objects.
So it finds blocks that another cluster wrote and forgets those that were removed. Several blocks
are written as one object, which appears whole or not at all. Objects under this tier's writer name
stay within `size_bytes`; the least recently used are removed first. Objects of others are never
removed.

No error reaches a request. A missing object, a flipped byte, an endpoint that refuses, hangs or is
gone are misses, each counted by name. After failures in a row a circuit breaker stops reads, or
writes, and lets single tries through until one works. With read-only credentials the tier reads.

Everyone who can write below the prefix is trusted: checksums find damage, not forgery.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from headrace_kvstore.breaker import Breaker
from headrace_kvstore.nvme.record import Save, Shape, TierEvent
from headrace_kvstore.objects.object_catalog import Bundle, ObjectCatalog, Place
from headrace_kvstore.objects.object_client import Listed, ObjectError, StoreClient
from headrace_kvstore.objects.object_format import ObjectName, unpack_headers
from headrace_kvstore.objects.object_pack import Packed, pack_blocks
from headrace_kvstore.objects.object_read import RUN_BYTES, ObjectRead, copy_verified
from headrace_kvstore.workers import Workers

logger = logging.getLogger("headrace.kvstore")

REQUESTS = 4
"""At once; each holds at most a run, or one block if that is more, in memory."""
INDEX_BLOCKS = 1 << 18
"""Blocks known at once: the newest objects'."""
LISTED_OBJECTS = 1 << 20
READ_TIMEOUTS = 3
"""Request timeouts after which a read is given up, with the time that it waited for its turn."""
TICK_S = 0.1


class ObjectTier:
    """Blocks in an object store. Thread-safe; works from `start` to `close`.

    Args:
        client: requests below the prefix.
        writer: whose objects count as its own: letters, digits, `_`, `-`; nodes of one name share
            `size_bytes` and may remove each other's objects.
        size_bytes: what its own objects may take.
        refresh_s: between listings.
        timeout_s: of one request of the client.
        events: called with each `TierEvent`; reasons are "found", "written"; "evicted", "gone",
            "corrupt", "truncated".
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
        requests: int = REQUESTS,
        run_bytes: int = RUN_BYTES,
        breaker: Callable[[], Breaker] = Breaker,
        events: Sequence[Callable[[TierEvent], None]] = (),
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.writer, self.size_bytes = writer, size_bytes
        self.events = list(events)
        self.refreshed = threading.Event()
        """Set once the first listing is known."""
        self._client, self._ready = client, ready
        self._refresh_s, self._timeout_s, self._run_bytes = refresh_s, timeout_s, run_bytes
        self._reads, self._writes = breaker(), breaker()
        self._lock = threading.RLock()
        self._catalog = ObjectCatalog()
        self._ignored: dict[str, str] = {}
        self._flying: set[ObjectRead] = set()
        self._counts: Counter[str] = Counter()
        self._last_error = ""
        self._workers = Workers(requests, "kv-object")
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kv-object-keeper", daemon=True)

    def start(self) -> ObjectTier:
        """Begin to list in the background, and to take requests."""
        self._keeper.start()
        return self

    def close(self, timeout_s: float = 1.0) -> bool:
        """Give up what is under way; False if bytes may still arrive in a caller's memory."""
        deadline = time.monotonic() + timeout_s
        self._stop.set()
        with self._lock:
            flying = list(self._flying)
        for read in flying:
            read.call_off()
        self._workers.close(timeout_s)
        if self._keeper.ident is not None:
            self._keeper.join(max(0.0, deadline - time.monotonic()))
        return all(read.done() for read in flying)

    # Looking

    @property
    def may_read(self) -> bool:
        """Reads are not stopped by the breaker."""
        return not self._reads.blocked(time.monotonic())

    @property
    def may_write(self) -> bool:
        """Writes are not stopped by the breaker."""
        return not self._writes.blocked(time.monotonic())

    def contains(self, digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
        """Which blocks are known to be here, bool (n,); changes nothing."""
        with self._lock:
            return self._catalog.contains(digest, hashes)

    def find(self, digest: bytes, block_hash: bytes) -> Place | None:
        """Where a block lies, or None."""
        with self._lock:
            return self._catalog.find(digest, block_hash)

    def contents(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Namespace digest and rows, SLOT (n,), of each object's blocks, each block once."""
        with self._lock:
            found = list(self._catalog.contents())
        yield from found

    def pin(self, digest: bytes, block_hash: bytes, pinned: bool = True) -> bool:
        """Keep an object of ours that holds this block, until unpinned or a restart."""
        with self._lock:
            return self._catalog.pin(digest, block_hash, pinned)

    def stats(self) -> dict[str, Any]:
        """JSON-able sizes, states and counts since the start."""
        with self._lock:
            return {
                "state": "on" if self.may_read else "off",
                "reason": "" if self.may_read else f"breaker open: {self._last_error}",
                "writing": "on" if self.may_write else "off",
                "blocks": len(self._catalog),
                "objects": len(self._catalog.bundles),
                "bytes": self._catalog.written_bytes(self.writer),
                "size_bytes": self.size_bytes,
                "ignored": dict(Counter(self._ignored.values())),
                "breaker_opened": self._reads.opened + self._writes.opened,
                "last_error": self._last_error,
                **self._counts,
            }

    # Reading

    def read(self, places: Sequence[Place], addresses: np.ndarray) -> ObjectRead:
        """Start reading blocks of one shape to u64 addresses (blocks, layers). It ends by itself
        within `READ_TIMEOUTS` request timeouts, whatever the endpoint does."""
        now_s = time.monotonic()
        read = ObjectRead(
            places, addresses, now_s + READ_TIMEOUTS * self._timeout_s, self._run_bytes
        )
        with self._lock:
            self._flying.add(read)
            self._counts["reads"] += len(places)
            for bundle in {place.bundle for place in places}:
                bundle.readers += 1
                bundle.hits += 1
                bundle.used_s = now_s
        read.when_done(lambda: self._over(read))
        for run in read.runs:
            self._workers.submit(partial(self._bring, read, run))
        return read

    def _over(self, read: ObjectRead) -> None:
        with self._lock:
            self._flying.discard(read)
            for bundle in {place.bundle for place in read.places}:
                bundle.readers -= 1

    def _bring(self, read: ObjectRead, run: Sequence[int]) -> None:
        """One request, in a worker."""
        good: np.ndarray | None = None
        copied = False
        try:
            data = None if read.given_up else self._get_run([read.places[i] for i in run])
            if data is not None and read.begin_copy():
                copied = True
                good = self._copy(read, run, data)
        finally:
            read.settle(run, good, copied)

    def _get_run(self, places: Sequence[Place]) -> memoryview | None:
        name = places[0].bundle.name
        length = len(places) * name.shape.payload_bytes
        data = self._get(name, name.payload_offset(places[0].position), length, len(places))
        if data is not None and len(data) != length:
            self._count("reads_truncated", len(places))
            self._forget(str(name), "truncated")
            return None
        return data

    def _get(self, name: ObjectName, offset: int, length: int, blocks: int) -> memoryview | None:
        """None if the bytes cannot be had; everything is counted for so many blocks."""
        if not self._reads.allow(time.monotonic()):
            self._count("reads_breaker", blocks)
            return None
        try:
            data = self._client.get(str(name), offset, length)
        except ObjectError as error:
            self._failed("reads", error, blocks, self._reads)
            if error.reason == "absent":
                self._forget(str(name), "gone")
            return None
        except BaseException:
            self._reads.neither()
            raise
        self._reads.success()
        return data

    def _copy(self, read: ObjectRead, run: Sequence[int], data: memoryview) -> np.ndarray | None:
        with self._lock:
            places = [read.places[i] for i in run]
            if any(place.bundle.blocks[place.position] is None for place in places):
                return None  # found bad by another reader, while this one waited
        source = np.frombuffer(data, np.uint8).ctypes.data
        sums = np.array([place.block.sums for place in places])
        good = copy_verified(source, places, read.addresses[list(run)], sums)
        for place, right in zip(places, good.tolist(), strict=True):
            if not right:
                self._bad(place)
        self._count("reads_good", int(good.sum()))
        return good

    def _bad(self, place: Place) -> None:
        with self._lock:
            self._counts["reads_corrupt"] += 1
            if place.bundle.blocks[place.position] is None:
                return
            block_hash = place.block.hash
            last = self._catalog.forget(place)
        if last:
            self._tell(TierEvent(False, place.bundle.digest, block_hash, "corrupt"))

    # Writing

    def write(self, shape: Shape, saves: Sequence[Save]) -> bool:
        """`pack`, then `put`."""
        packed = self.pack(shape, saves)
        return packed is not None and self.put(packed)

    def pack(self, shape: Shape, saves: Sequence[Save]) -> Packed | None:
        """Copy blocks that are not here yet into an object to be; None if there is nothing to do.

        Memory may change meanwhile: bytes that do not match their sums are left out.

        Raises ValueError or struct.error for a block that no header can describe.
        """
        here = self.contains(shape.digest, [save.hash for save in saves])
        missing = [save for save, there in zip(saves, here, strict=True) if not there]
        if not missing or not self.may_write:
            return None
        packed = pack_blocks(shape, self.writer, missing)
        self._count("writes_overwritten", len(missing) - len(packed.blocks))
        return packed if packed.blocks else None

    def put(self, packed: Packed) -> bool:
        """Make the object, in one request, and wait for it; whether its blocks can be found now."""
        blocks = len(packed.blocks)
        if not self._writes.allow(time.monotonic()):
            self._count("writes_breaker", blocks)
            return False
        try:
            if not self._make_room(len(packed.data)):
                self._count("writes_full", blocks)
                return False
            self._client.put(str(packed.name), packed.data)
        except ObjectError as error:
            self._failed("writes", error, blocks, self._writes, always=True)
            return False
        finally:
            self._writes.neither()
        self._writes.success()
        self._count("writes", blocks)
        self._count("written_bytes", len(packed.data))
        self._learned(Bundle(packed.name, list(packed.blocks), time.monotonic()), "written")
        return True

    def _make_room(self, needed_bytes: int) -> bool:
        """Remove objects of ours until there is room for so much; False if there is none."""
        with self._lock:
            excess = self._catalog.written_bytes(self.writer) + needed_bytes - self.size_bytes
            chosen = self._catalog.victims(self.writer, excess)
            names = [str(bundle.name) for bundle in chosen]
            if sum(bundle.name.size_bytes for bundle in chosen) < excess:
                return False
        return not names or self._delete(names)

    def _delete(self, names: Sequence[str]) -> bool:
        for name in names:
            self._forget(name, "evicted", ignore=False)
        try:
            self._client.delete(names)
        except ObjectError as error:
            self._failed("deletes", error, len(names), None)
            return False  # what is still there is found again
        self._count("objects_evicted", len(names))
        return True

    def clear(self, digest: bytes | None = None) -> int:
        """Remove all objects of ours, of one namespace or all; how many blocks were in them."""
        with self._lock:
            mine = [b for b in self._catalog.bundles.values() if b.name.writer == self.writer]
            mine = [b for b in mine if digest in (None, b.digest)]
        blocks = sum(block is not None for bundle in mine for block in bundle.blocks)
        return blocks if not mine or self._delete([str(b.name) for b in mine]) else 0

    # Learning what is there

    def refresh(self) -> bool:
        """List, read the headers of new objects, forget what is gone; False if it failed."""
        if not self._reads.allow(time.monotonic()):
            return False
        with self._lock:
            before = set(self._catalog.bundles)
        try:
            listed = {each.name: each for each in islice(self._client.list(), LISTED_OBJECTS)}
        except ObjectError as error:
            self._failed("lists", error, 1, self._reads, always=True)
            return False
        except BaseException:
            self._reads.neither()
            raise
        self._reads.success()
        self._count("lists", 1)
        for name in before - listed.keys():
            self._forget(name, "gone", ignore=False)
        with self._lock:
            self._ignored = {name: why for name, why in self._ignored.items() if name in listed}
            fresh = [
                each
                for each in listed.values()
                if each.name not in self._catalog.bundles and each.name not in self._ignored
            ]
        self._learn_all(sorted(fresh, key=lambda each: -each.modified_s))
        self._make_room(0)
        if not self.refreshed.is_set():
            self.refreshed.set()
            self._ready()
        return True

    def _learn_all(self, fresh: Sequence[Listed]) -> None:
        left = threading.Semaphore(0)

        def learn(each: Listed) -> None:
            try:
                if not self._stop.is_set():
                    self._learn(each)
            finally:
                left.release()

        for each in fresh:
            self._workers.submit(partial(learn, each))
        for _ in fresh:
            while not left.acquire(timeout=TICK_S):
                self._expire()
                if self._stop.is_set():
                    return

    def _learn(self, listed: Listed) -> None:
        name = ObjectName.parse(listed.name)
        if name is None or name.size_bytes != listed.size_bytes:
            with self._lock:
                self._ignored[listed.name] = "foreign" if name is None else "truncated"
            return
        with self._lock:
            if len(self._catalog) + name.count > INDEX_BLOCKS:
                self._counts["index_full"] += 1
                return
        data = self._get(name, name.headers_offset, name.headers_bytes, name.count)
        if data is None:
            return
        blocks = unpack_headers(name, data)
        self._count("headers_bad", sum(block is None for block in blocks))
        if all(block is None for block in blocks):
            with self._lock:
                self._ignored[listed.name] = "bad"
            return
        age_s = max(0.0, time.time() - listed.modified_s)
        self._learned(Bundle(name, blocks, time.monotonic() - age_s), "found")

    def _learned(self, bundle: Bundle, reason: str) -> None:
        with self._lock:
            self._ignored.pop(str(bundle.name), None)
            new = self._catalog.add(bundle)
        for block_hash in new:
            self._tell(TierEvent(True, bundle.digest, block_hash, reason))

    def _forget(self, name: str, reason: str, ignore: bool = True) -> None:
        """Forget an object. With `ignore` it is not read again while it is listed."""
        with self._lock:
            bundle = self._catalog.bundles.get(name)
            gone = self._catalog.remove(name)
            if ignore:
                self._ignored[name] = reason
        for block_hash in gone:
            assert bundle is not None
            self._tell(TierEvent(False, bundle.digest, block_hash, reason))

    # Inside

    def _keep(self) -> None:
        """Refresh now and then, and give up reads that take too long."""
        next_s = time.monotonic()
        while True:
            try:
                self._expire()
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + self._refresh_s
                    if not self.refresh():
                        next_s = min(next_s, time.monotonic() + 1.0)
            except Exception:
                logger.exception("looking after the object tier failed; it goes on")
            if self._stop.wait(TICK_S):
                return

    def _expire(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            overdue = [read for read in self._flying if now_s > read.deadline_s]
            self._counts["reads_given_up"] += len(overdue)
        for read in overdue:
            read.call_off()

    def _failed(
        self,
        what: str,
        error: ObjectError,
        count: int,
        breaker: Breaker | None,
        always: bool = False,
    ) -> None:
        self._count(f"{what}_{error.reason}", count)
        if not (always or error.endpoint):
            if breaker is not None:
                breaker.success()
            return
        if breaker is not None:
            breaker.failure(time.monotonic())
        with self._lock:
            known, self._last_error = self._last_error, error.reason
        if known != error.reason:
            logger.warning("object tier: %s", error)

    def _count(self, name: str, blocks: int) -> None:
        if blocks:
            with self._lock:
                self._counts[name] += blocks

    def _tell(self, event: TierEvent) -> None:
        for listener in self.events:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener of the object tier failed")

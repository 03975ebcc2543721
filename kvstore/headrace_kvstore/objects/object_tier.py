"""The object tier: KV blocks below a prefix of an object store, shared by everyone who may read it.

The tier lists the store at the start and every `refresh_s`; names say which blocks there are. So it
finds blocks that another cluster wrote and forgets those that were removed. Objects under this
tier's writer name stay within `size_bytes`; the least recently used are removed first. Objects of
others are never removed.

No error reaches a request. A missing object, a flipped byte, an endpoint that refuses, hangs or is
gone are misses, each counted by name. After failures in a row a circuit breaker stops reads, or
writes, and lets single tries through until one works. With read-only credentials the tier reads.

Everyone who can write below the prefix is trusted: checksums find damage, not forgery.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from headrace_kvstore.breaker import Breaker
from headrace_kvstore.nvme.record import Save, Shape
from headrace_kvstore.objects.object_catalog import Held, ObjectCatalog
from headrace_kvstore.objects.object_client import Listed, ObjectError, StoreClient
from headrace_kvstore.objects.object_format import BOARD_NAME, ObjectName, pack, unpack
from headrace_kvstore.workers import Workers

logger = logging.getLogger("headrace.kvstore")

REQUESTS = 4
"""Reads at once, and writes at once; each read holds one block in memory."""
INDEX_BLOCKS = 1 << 18
"""Objects known at once: the newest."""
LISTED_OBJECTS = 1 << 20
READ_TIMEOUTS = 3
"""Request timeouts after which a read is given up, with the time that it waited for its turn."""
TICK_S = 0.1

T = TypeVar("T")
Packed = tuple[ObjectName, memoryview]
"""An object to be made."""


class ObjectRead:
    """Blocks on their way from objects into memory: a `staging.sources.Fill`.

    Each block comes with one request, and the answer lands in memory of its own. The thread that
    waits for the read copies it to its destination, in the same pass that computes its checksums.
    So a caller may give up at any time: a late answer never touches the caller's memory.

    Args:
        objects: of one shape.
        addresses: u64 (blocks, layers), where each layer goes.
        sums: u64 (layers,) a block: filled in for those that are right.
        deadline_s: monotonic seconds at which what has not come is given up.
        judge: told of each block that came whether it is right.
    """

    def __init__(
        self,
        objects: Sequence[Held],
        addresses: np.ndarray,
        sums: Sequence[np.ndarray],
        deadline_s: float,
        judge: Callable[[Held, bool], None],
    ) -> None:
        self.objects, self._sums = list(objects), sums
        self._addresses = np.ascontiguousarray(addresses, np.uint64)
        self._deadline_s, self._judge = deadline_s, judge
        self._answers: list[Future[memoryview | None]] = [Future() for _ in objects]
        self.called_off = False

    def answer(self, block: int, data: memoryview | None) -> None:
        """A block's bytes are here, or will not come."""
        with suppress(InvalidStateError):  # it was given up
            self._answers[block].set_result(data)

    def call_off(self) -> None:
        """Do without what has not come; all blocks count as not there."""
        self.called_off = True
        for block in range(len(self._answers)):
            self.answer(block, None)

    def wait(self) -> np.ndarray:
        """Which blocks are in memory whole and proven right: bool (blocks,)."""
        good = np.zeros(len(self.objects), np.bool_)
        for block, answer in enumerate(self._answers):
            try:
                data = answer.result(max(0.0, self._deadline_s - time.monotonic()))
            except TimeoutError:
                self.call_off()
            if self.called_off:
                return np.zeros_like(good)
            if data is not None:
                good[block] = self._copy(block, data)
                self._judge(self.objects[block], bool(good[block]))
        return good

    def _copy(self, block: int, data: memoryview) -> bool:
        name = self.objects[block].name
        sums = unpack(name.shape, name.hash, data, self._addresses[block])
        if sums is not None:
            self._sums[block][:] = sums
        return sums is not None


class ObjectTier:
    """Blocks in an object store. Thread-safe; works from `start` to `close`.

    Args:
        client: requests below the prefix; also an attribute.
        writer: whose objects count as its own: letters, digits, `_`, `-`; nodes of one name share
            `size_bytes` and may remove each other's objects.
        size_bytes: what its own objects may take.
        refresh_s: between listings.
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
        breaker: Callable[[], Breaker] = Breaker,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.writer, self.size_bytes = writer, size_bytes
        self.refreshed = threading.Event()
        """Set once the first listing is known."""
        self.client, self._ready = client, ready
        self._refresh_s, self._timeout_s = refresh_s, timeout_s
        self._reads, self._writes = breaker(), breaker()
        self._lock = threading.RLock()
        self._catalog = ObjectCatalog(writer)
        self._ignored: dict[str, tuple[str, float | None]] = {}
        """By name: why it is not used, and its time stamp; it is, once it was written anew."""
        self._removed: set[str] = set()
        """Names, since the last listing began: it may still show them."""
        self._counts: Counter[str] = Counter()
        self._last_error = ""
        self._readers = Workers(REQUESTS, "kv-object")
        self._putters = Workers(REQUESTS, "kv-object-put")
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kv-object-keeper", daemon=True)

    def start(self) -> ObjectTier:
        """Begin to list in the background, and to take requests."""
        self._keeper.start()
        return self

    def close(self, timeout_s: float = 1.0) -> None:
        """End it; what an endpoint that hangs still sends reaches nobody's memory."""
        deadline = time.monotonic() + timeout_s
        self._stop.set()
        for workers in (self._readers, self._putters):
            workers.close(max(0.0, deadline - time.monotonic()))
        if self._keeper.ident is not None:
            self._keeper.join(max(0.0, deadline - time.monotonic()))

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

    def find(self, digest: bytes, block_hash: bytes) -> Held | None:
        """An object that holds a block, or None."""
        with self._lock:
            return self._catalog.find(digest, block_hash)

    def contents(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Namespace digest and rows, SLOT (n,), each block once."""
        with self._lock:
            found = list(self._catalog.contents())
        yield from found

    def stats(self) -> dict[str, Any]:
        """JSON-able sizes, states and counts since the start."""
        with self._lock:
            return {
                "state": "on" if self.may_read else "off",
                "reason": "" if self.may_read else f"breaker open: {self._last_error}",
                "writing": "on" if self.may_write else "off",
                "blocks": self._catalog.blocks,
                "objects": len(self._catalog.objects),
                "bytes": self._catalog.own_bytes,
                "size_bytes": self.size_bytes,
                "ignored": dict(Counter(why for why, _ in self._ignored.values())),
                "breaker_opened": self._reads.opened + self._writes.opened,
                "last_error": self._last_error,
                **self._counts,
            }

    # Reading

    def read(
        self, objects: Sequence[Held], addresses: np.ndarray, sums: Sequence[np.ndarray]
    ) -> ObjectRead:
        """Start reading blocks of one shape to u64 addresses (blocks, layers). Waiting for it ends
        within `READ_TIMEOUTS` request timeouts, whatever the endpoint does.

        sums: u64 (layers,) a block, to be filled in.
        """
        now_s = time.monotonic()
        deadline_s = now_s + READ_TIMEOUTS * self._timeout_s
        read = ObjectRead(objects, addresses, sums, deadline_s, self._came)
        with self._lock:
            self._counts["reads"] += len(objects)
            for held in objects:
                self._catalog.use(held, now_s)
        for block in range(len(objects)):
            self._readers.submit(partial(self._bring, read, block))
        return read

    def _bring(self, read: ObjectRead, block: int) -> None:
        """One request, in a worker."""
        data = None
        try:
            data = None if read.called_off else self._get(read.objects[block])
        finally:
            read.answer(block, data)

    def _came(self, held: Held, right: bool) -> None:
        self._count("reads_good" if right else "reads_corrupt", 1)
        if not right:
            self._forget(held.text, "corrupt")

    def _get(self, held: Held) -> memoryview | None:
        """An object's bytes; None if they cannot be had, or another reader found them bad."""
        with self._lock:
            if held.text not in self._catalog.objects:
                return None

        def get() -> memoryview:
            try:
                return self.client.get(held.text, 0, held.name.size_bytes)
            except ObjectError as error:
                if error.reason == "absent":
                    self._forget(held.text, "gone")
                raise

        data = self._request("reads", self._reads, get)
        if data is None:
            return None
        if len(data) == held.name.size_bytes:
            return data
        self._count("reads_truncated", 1)
        self._forget(held.text, "truncated")
        return None

    # Writing

    def pack(self, shape: Shape, saves: Sequence[Save]) -> list[Packed]:
        """Copy blocks that are not here yet into objects to be.

        Memory may change meanwhile: bytes that do not match their sums are left out, and so are
        blocks that no name can describe.
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
        """Make objects, `REQUESTS` at once, and wait for them; how many can be found now."""
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
        self._learned(Held(name, str(name), time.monotonic()))
        return True

    def _make_room(self, needed_bytes: int) -> bool:
        """Remove objects of ours until there is room for so much; False if there is none."""
        with self._lock:
            names = self._catalog.victims(self._catalog.own_bytes + needed_bytes - self.size_bytes)
        return names is not None and (not names or self._delete(names))

    def _delete(self, names: Sequence[str]) -> bool:
        with self._lock:
            for name in names:
                self._catalog.remove(name)
            self._removed.update(names)
        try:
            self.client.delete(names)
        except ObjectError as error:
            self._failed("deletes", error, len(names))
            return False  # what is still there is found again
        self._count("objects_evicted", len(names))
        return True

    # Learning what is there

    def refresh(self) -> bool:
        """List, take in new objects, forget what is gone; False if it failed."""
        with self._lock:
            before = set(self._catalog.objects)
            self._removed.clear()

        def read_all() -> dict[str, Listed]:
            listed = islice(self.client.list(), LISTED_OBJECTS)
            return {each.name: each for each in listed if each.name != BOARD_NAME}

        listed = self._request("lists", self._reads, read_all)
        if listed is None:
            return False
        self._count("lists", 1)
        with self._lock:
            for name in before - listed.keys():
                self._catalog.remove(name)
            for name, (why, stamp) in list(self._ignored.items()):
                if name not in listed or stamp not in (None, listed[name].modified_s):
                    del self._ignored[name]
                else:
                    self._ignored[name] = why, listed[name].modified_s
            known = self._catalog.objects.keys() | self._ignored.keys() | self._removed
            room = max(0, INDEX_BLOCKS - len(self._catalog.objects))
        fresh = [listed[name] for name in listed.keys() - known]
        fresh.sort(key=lambda each: -each.modified_s)
        self._count("index_full", len(fresh) - room)
        for each in reversed(fresh[:room]):  # the oldest first: it is the first to be evicted
            parsed = ObjectName.parse(each.name)
            if parsed is None or parsed.size_bytes != each.size_bytes:
                why = "foreign" if parsed is None else "truncated"
                with self._lock:
                    self._ignored[each.name] = why, each.modified_s
                continue
            age_s = max(0.0, time.time() - each.modified_s)
            self._learned(Held(parsed, each.name, time.monotonic() - age_s))
        self._make_room(0)
        if not self.refreshed.is_set():
            self.refreshed.set()
            self._ready()
        return True

    def _learned(self, held: Held) -> None:
        with self._lock:
            self._ignored.pop(held.text, None)
            self._catalog.add(held)

    def _forget(self, name: str, why: str) -> None:
        """Forget an object, and do not use it again until it is written anew."""
        with self._lock:
            self._catalog.remove(name)
            self._ignored[name] = why, None

    # Inside

    def _keep(self) -> None:
        """Refresh now and then."""
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            pause_s = min(1.0, self._refresh_s)
            try:
                if self.refresh():
                    pause_s = self._refresh_s
            except Exception:
                logger.exception("looking after the object tier failed; it goes on")

    def _request(self, what: str, breaker: Breaker, call: Callable[[], T]) -> T | None:
        """What a request gives; None if it fails, or the breaker allows none. That is counted."""
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

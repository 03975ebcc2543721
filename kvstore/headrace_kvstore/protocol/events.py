"""KV events of a store or an engine, in the format in which vLLM publishes those of its KV cache.

A subscriber can follow both alike.

The structs are field for field those of `vllm.distributed.kv_events` (0.32), so that both encode to
the same msgpack; vLLM itself is not imported. Frames are those of vLLM's `ZmqEventPublisher`:

    PUB    ("", sequence number: 8 bytes big-endian, batch)
           ("report", number, number of the next batch, report) if reports are published, too;
           an empty report is a beat
    replay  REQ or DEALER sends ("", first number wanted), ROUTER answers with
            ("", "", number, batch) for each batch, and ("", "", -1, "") in the end

What the fields hold here, of a store:
- `medium`: "DRAM" or "NVME". `locality`: "LOCAL". `ownership`: the namespace's digest in
  hex, since equal hashes in two namespaces are different blocks.
- `token_ids`: empty, `block_size`: 0, as the store knows blocks by hash only. The hashes suffice:
  vLLM's block hash covers all tokens up to the block's end, so a subscriber that hashes a prompt's
  blocks finds them in an index of hashes. The bytes are those of vLLM's own hashes.
- `parent_block_hash`: None, for the same reason. Blocks of an engine have theirs: a block whose
  parent is not the block before it begins a run.

Batches are numbered from 0, and each has at most `BATCH_BLOCKS` blocks in `BATCH_EVENTS` events,
which take less than 256 KiB. A whole state begins with `AllBlocksCleared` and takes as many batches
as it needs. The publisher sends one at the start, when changes were dropped because the queue was
full, and when the batches since the last one take more than `KEPT_BYTES`. The log then drops the
batches before it, so the log is never longer than a state and `KEPT_BYTES`. A subscriber may ask
for a batch that was dropped, or that was never sent because the node was restarted. It then gets
the log from its beginning. A block may be published twice, which does no harm to an index of
hashes.

Reports are bytes to this module. They have numbers of their own. Only the newest report is sent, so
a subscriber that misses some loses nothing. The number of the next batch in a report tells a
subscriber whether it has missed the last batch.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any, NamedTuple

import msgspec
import zmq

from headrace_kvstore.blocks.slot_record import HASH_BYTES
from headrace_kvstore.protocol.address import bind
from headrace_kvstore.protocol.membership import Membership
from headrace_kvstore.protocol.wakeup import WakeupSignal

logger = logging.getLogger("headrace.kvstore")

DRAM, NVME, OBJECT = "DRAM", "NVME", "OBJECT"
LOCAL = "LOCAL"
BLOCKS_TOPIC, REPORT_TOPIC = b"", b"report"
END_SEQ = (-1).to_bytes(8, "big", signed=True)
BATCH_BLOCKS, BATCH_EVENTS = 4096, 512
KEPT_BYTES = 64 * 2**20
BATCH_COST_BYTES = 128
"""Bytes counted for each batch in addition to its payload."""
QUEUED_BATCHES = 10_000
SEND_QUEUE = 1000
"""Batches that may wait for one subscriber; it asks for a replay of further ones."""
REPLAYED_BATCHES = SEND_QUEUE // 2
MAX_TOPICS = 64
"""Maximum number of topics that are remembered; a subscriber needs one."""
MAX_REQUEST_BYTES = 4096
"""Maximum size of a request for replay."""
MIN_REPORT_INTERVAL_S = 0.02
"""Minimum time between two reports."""
HEARTBEAT_S = 0.2
"""Silence after which a beat is sent, if reports are published."""
_SHORT_HASH = 16


class KVEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """vLLM's KVCacheEvent."""


class BlockStored(KVEvent):
    """Blocks can be read from a medium."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVEvent):
    """Blocks were removed from a medium."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVEvent):
    """No medium holds any block."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's KVEventBatch; `ts` in seconds of time.time()."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Change(NamedTuple):
    """One block that was stored or removed.

    Attributes:
        hash: 32 bytes, zero-padded, or an engine's key.
        parent: hash of the block before it in its prompt; empty for a prompt's first block; None if
            it is not known.
        group: 0, or the number of a window of an engine's KV cache groups, from 1 on.
    """

    stored: bool
    medium: str
    digest: bytes
    hash: bytes
    parent: bytes | None = None
    group: int = 0


def batches(changes: Iterable[Change]) -> Iterator[list[KVEvent]]:
    """Yield batches of events in the order of the changes; a run of one kind becomes one event."""
    left = iter(changes)
    while part := list(islice(left, BATCH_BLOCKS)):
        events = [_event(run) for run in _runs(part)]
        yield from (events[i : i + BATCH_EVENTS] for i in range(0, len(events), BATCH_EVENTS))


def _runs(changes: list[Change]) -> Iterator[list[Change]]:
    """Cut changes into runs of one kind, in which each block is the parent of the next."""
    run = changes[:1]
    for one, following in pairwise(changes):
        follows = not following.stored or following.parent in (None, one.hash)
        if not follows or one[:3] != following[:3] or one.group != following.group:
            yield run
            run = []
        run.append(following)
    yield run


def _event(run: list[Change]) -> KVEvent:
    first = run[0]
    hashes: list[bytes | int] = [plain_hash(change.hash) for change in run]
    where: dict[str, Any] = {"locality": LOCAL, "ownership": first.digest.hex()}
    if first.group:
        where["group_idx"] = first.group
    if not first.stored:
        return BlockRemoved(hashes, first.medium, **where)
    parent = plain_hash(first.parent) if first.parent else None
    return BlockStored(hashes, parent, [], 0, None, first.medium, None, **where)


def plain_hash(padded: bytes) -> bytes:
    """Return a hash as vLLM has it: 32 bytes, or 16 if the rest is padding."""
    short = padded[:_SHORT_HASH]
    return short if padded == short.ljust(HASH_BYTES, b"\0") else padded


class EventLog:
    """Numbered batches from the last whole state on. One thread writes, any thread may read."""

    def __init__(self, kept_bytes: int) -> None:
        self._lock = threading.Lock()
        self._kept_bytes = kept_bytes
        self._first = self._size_bytes = 0
        self._batches: list[bytes] = []

    @property
    def next_seq(self) -> int:
        """Number of the next batch."""
        return self._first + len(self._batches)

    @property
    def full(self) -> bool:
        """Whether a new whole state is due."""
        return self._size_bytes > self._kept_bytes

    def add(self, batch: bytes) -> int:
        """Append a batch and return its number."""
        with self._lock:
            self._batches.append(batch)
            self._size_bytes += len(batch) + BATCH_COST_BYTES
            return self.next_seq - 1

    def drop_before(self, seq: int) -> None:
        """Drop the batches before `seq`: it begins a whole state that the last batch ends."""
        with self._lock:
            self._batches = self._batches[seq - self._first :]
            self._first, self._size_bytes = seq, 0

    def read(self, seq: int, most_bytes: float = float("inf")) -> tuple[int, list[bytes]]:
        """Return the number of the first batch returned, and the batches.

        They begin with batch `seq`, or with the first one there is if `seq` is not in the log. They
        have at most `most_bytes` together, but there is at least one if the log has any.
        """
        with self._lock:
            if not self._first <= seq <= self.next_seq:
                seq = self._first
            found: list[bytes] = []
            for batch in self._batches[seq - self._first :]:
                most_bytes -= len(batch)
                if found and most_bytes < 0:
                    break
                found.append(batch)
            return seq, found


class EventPublisher:
    """Publisher of changes, with a thread of its own that sleeps while there is nothing to send.

    Any thread may call `publish`, `report` and `resync`; they never wait.

    Args:
        endpoint: to bind the PUB socket to, such as `tcp://*:5557`; None for `log` alone.
        replay_endpoint: to bind the ROUTER socket to; None for no replay.
        contents: everything that is held now, as changes; called on the publisher's thread.
        members: the app's members, the only ones let in; None lets in all that reach the sockets.
        heartbeats: whether reports are published, and empty ones while there is no report.
        on_first_subscriber: called on the publisher's thread when the first subscriber subscribes.
        name: of the thread.

    Raises:
        zmq.ZMQError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str | None,
        replay_endpoint: str | None,
        contents: Callable[[], Iterable[Change]],
        *,
        kept_bytes: int = KEPT_BYTES,
        members: Membership | None = None,
        heartbeats: bool = False,
        on_first_subscriber: Callable[[], None] = lambda: None,
        name: str = "kv-events",
    ) -> None:
        self._contents, self._heartbeats = contents, heartbeats
        self._on_first_subscriber = on_first_subscriber
        self._context = zmq.Context()
        ends = {zmq.XPUB: endpoint, zmq.ROUTER: replay_endpoint}
        self._sockets: dict[int, zmq.Socket[bytes]] = {
            kind: self._context.socket(kind) for kind, end in ends.items() if end is not None
        }
        self._guard = None if members is None else members.guard(*self._sockets.values())
        self.log = EventLog(kept_bytes)
        try:
            self.endpoint = self._bind(zmq.XPUB, endpoint)
            self.replay_endpoint = self._bind(zmq.ROUTER, replay_endpoint)
        except BaseException:
            self._destroy(0)
            raise
        self._queue: queue.Queue[list[Change]] = queue.Queue(QUEUED_BATCHES)
        self._wake = WakeupSignal()
        self._poller = zmq.Poller()
        for socket in (self._wake, *self._sockets.values()):
            self._poller.register(socket, zmq.POLLIN)
        self._resync_due = threading.Event()
        self.resync()
        self._encoder = msgspec.msgpack.Encoder()
        self._report: deque[bytes] = deque(maxlen=1)
        self._reported_s = -HEARTBEAT_S
        self.resyncs = self.dropped_batches = self.replays = self.reports = 0
        self._topics: set[bytes] = set()
        """Topics that have a subscriber."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _bind(self, kind: int, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        socket = self._sockets[kind]
        socket.set_hwm(SEND_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        return bind(socket, endpoint)

    def publish(self, changes: list[Change]) -> None:
        """Queue changes. If the queue is full, drop them and publish the whole state later."""
        if not changes:
            return
        try:
            self._queue.put_nowait(changes)
        except queue.Full:
            self.dropped_batches += 1
            self._resync_due.set()
        self._wake.set()

    def resync(self) -> None:
        """Publish the whole state: a subscriber may have missed changes."""
        self._resync_due.set()
        self._wake.set()

    @property
    def has_subscribers(self) -> bool:
        """Whether there is a subscriber. Without one, no reports or beats are sent."""
        return bool(self._topics)

    def report(self, report: bytes) -> None:
        """Publish a report at once, or `MIN_REPORT_INTERVAL_S` after the previous one. A newer
        report that arrives before then replaces it."""
        self._report.append(report)
        self._wake.set()

    def stats(self) -> dict[str, Any]:
        """Return JSON-able counts."""
        return {
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "batches": self.log.next_seq,
            "queued": self._queue.qsize(),
            "dropped_batches": self.dropped_batches,
            "resyncs": self.resyncs,
            "replays": self.replays,
            "reports": self.reports,
        }

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what waits, as far as the time allows, and unbind."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._wake.close()
            self._destroy(int(1e3 * min(timeout_s, 0.2)))

    def _destroy(self, linger_ms: int) -> None:
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger_ms)

    # The thread

    def _run(self) -> None:
        while True:
            try:
                self._run_once()
            except Exception:
                logger.exception("publishing KV events failed; it goes on")
                time.sleep(0.1)
                self.resync()
            if self._stop.is_set() and self._queue.empty():
                return

    def _run_once(self) -> None:
        """Wait until there is something to do, and do it."""
        wait_s = self._send_report() if self._heartbeats and self.has_subscribers else None
        ready = self._poller.poll(None if wait_s is None else math.ceil(1e3 * wait_s))
        self._wake.clear()
        for socket, _ in ready:
            if socket is self._sockets.get(zmq.ROUTER):
                self._answer(self._sockets[zmq.ROUTER])
            elif socket is self._sockets.get(zmq.XPUB):
                self._subscribed(self._sockets[zmq.XPUB].recv())
        if self._resync_due.is_set():
            # Drop the queue. Its changes were made before the state is taken, and later changes to
            # the same blocks may have been dropped. Changes that are queued from here on are
            # published after the state, in order, so the last change published for a block is the
            # last one made.
            self._resync_due.clear()
            with suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            first = self._send([AllBlocksCleared()])
            for events in batches(self._contents()):
                self._send(events)
            self.log.drop_before(first)
            self.resyncs += 1
        with suppress(queue.Empty):
            for _ in range(QUEUED_BATCHES):
                for events in batches(self._queue.get_nowait()):
                    self._send(events)
        if self.log.full:
            self.resync()

    def _subscribed(self, message: bytes) -> None:
        """Handle ZeroMQ's notice that a topic has its first subscriber, or has lost its last."""
        kind, topic = message[:1], message[1:]
        if kind == b"\1" and len(self._topics) < MAX_TOPICS:
            before = self.has_subscribers
            self._topics.add(topic)
            if not before:
                self._on_first_subscriber()
        elif kind == b"\0":
            self._topics.discard(topic)
        if not self._topics:
            self._report.clear()  # the next subscriber needs no outdated report

    def _send(self, events: list[Any]) -> int:
        payload = self._encoder.encode(EventBatch(time.time(), events, 0))
        seq = self.log.add(payload)
        if zmq.XPUB in self._sockets:
            self._sockets[zmq.XPUB].send_multipart((BLOCKS_TOPIC, seq.to_bytes(8, "big"), payload))
        return seq

    def _send_report(self) -> float:
        """Send a report or a beat if one is due; return the seconds until the next can be due."""
        silent_s = time.monotonic() - self._reported_s
        due_s = MIN_REPORT_INTERVAL_S if self._report else HEARTBEAT_S
        if silent_s < due_s:
            return due_s - silent_s
        report = self._report.popleft() if self._report else b""
        self._reported_s = time.monotonic()
        if zmq.XPUB in self._sockets:
            numbers = [each.to_bytes(8, "big") for each in (self.reports, self.log.next_seq)]
            self._sockets[zmq.XPUB].send_multipart((REPORT_TOPIC, *numbers, report))
        self.reports += 1
        return MIN_REPORT_INTERVAL_S if self._report else HEARTBEAT_S

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a replay request that is none: %d frames", len(frames))
            return
        client, _, wanted = frames
        self.replays += 1
        # The frames are not copied, so a subscriber that asks and does not read costs no memory
        # beyond the log's own. A long replay is sent in parts: the subscriber asks again.
        first, found = self.log.read(int.from_bytes(wanted, "big"))
        for seq, payload in enumerate(found[:REPLAYED_BATCHES], first):
            frame = (client, b"", b"", seq.to_bytes(8, "big"), payload)
            socket.send_multipart(frame, copy=False)
        socket.send_multipart((client, b"", b"", END_SEQ, b""))

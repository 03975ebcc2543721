"""What the store holds, published as vLLM publishes its KV cache: its subscribers can follow both.

The structs are field for field those of `vllm.distributed.kv_events` (0.29), so that both encode to
the same msgpack; vLLM itself is not imported. Frames are those of vLLM's `ZmqEventPublisher`:

    PUB    (topic, sequence number: 8 bytes big-endian, batch)
    replay  REQ or DEALER sends ("", first number wanted), ROUTER answers with
            ("", topic, number, batch) for each batch, and ("", "", -1, "") in the end

What the fields hold here:
- `medium`: "DRAM", "NVME" or "OBJECT". `locality`: "LOCAL". `ownership`: the namespace's digest in
  hex, since equal hashes in two namespaces are different blocks.
- `token_ids`: empty, `block_size`: 0, as the store knows blocks by hash only. The hashes suffice:
  vLLM's block hash covers all tokens up to the block's end, so whoever hashes a prompt's blocks
  finds them in an index of hashes. They are the bytes that vLLM calls them by.
- `parent_block_hash`: where it was seen lately, else None. A run of hashes in one event is a chain.

Batches are numbered from 0 and kept for replay within bounds. Who asks for one that is gone, or
was never sent because the node fell behind or was restarted, gets the whole state instead:
`AllBlocksCleared`, then everything stored, numbered as the latest batch. The first batch of each
node is such a state. Blocks may be told twice; an index of hashes does not mind.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import zmq

from headrace_kvstore.table import HASH_BYTES, hash_word

logger = logging.getLogger("headrace.kvstore")

DRAM, NVME, OBJECT = "DRAM", "NVME", "OBJECT"
LOCAL = "LOCAL"
END_SEQ = (-1).to_bytes(8, "big", signed=True)
KEPT_BATCHES = 10_000
KEPT_BYTES = 64 * 2**20
QUEUED_BATCHES = 10_000
SEND_QUEUE = 100_000
KNOWN_PARENTS = 1 << 16
CHAIN_BLOCKS = 4096
"""Hashes in one event, at most."""
POLL_S = 0.02
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


class BlockRemoved(KVEvent):
    """Blocks are gone from a medium."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVEvent):
    """Nothing is held in any medium."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's KVEventBatch; `ts` in seconds of time.time()."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Change(NamedTuple):
    """One block came or went.

    `hash`: 32 bytes, zero-padded. `parent`: as in SLOT, the first 8 bytes of the parent's hash as a
    number, 0 for a root or where it is not known.
    """

    stored: bool
    medium: str
    digest: bytes
    hash: bytes
    parent: int = 0


class EventMaker:
    """Changes to events; remembers hashes, to name parents by."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, bytes] = OrderedDict()

    def events(self, changes: Iterable[Change]) -> list[KVEvent]:
        """Events in the order of the changes; chains, and runs of removals, become one each."""
        return [self._event(run) for run in self._runs(changes)]

    def _runs(self, changes: Iterable[Change]) -> Iterator[list[Change]]:
        run: list[Change] = []
        for change in changes:
            if run and not (self._continues(run[-1], change) and len(run) < CHAIN_BLOCKS):
                yield run
                run = []
            run.append(change)
            if change.stored:
                self._remember(change.hash)
        if run:
            yield run

    @staticmethod
    def _continues(last: Change, change: Change) -> bool:
        if last[:3] != change[:3]:
            return False
        return not change.stored or change.parent == hash_word(last.hash) != 0

    def _event(self, run: list[Change]) -> KVEvent:
        first = run[0]
        hashes: list[bytes | int] = [plain_hash(change.hash) for change in run]
        where: dict[str, Any] = {"locality": LOCAL, "ownership": first.digest.hex()}
        if not first.stored:
            return BlockRemoved(hashes, first.medium, **where)
        parent = self._known.get(first.parent) if first.parent else None
        return BlockStored(
            hashes,
            None if parent is None else plain_hash(parent),
            *([], 0, None),
            first.medium,
            None,
            **where,
        )

    def _remember(self, block_hash: bytes) -> None:
        word = hash_word(block_hash)
        self._known[word] = block_hash
        self._known.move_to_end(word)
        if len(self._known) > KNOWN_PARENTS:
            self._known.popitem(last=False)


def plain_hash(padded: bytes) -> bytes:
    """A hash as vLLM has it: 32 bytes, or 16 where the rest is padding."""
    short = padded[:_SHORT_HASH]
    return short if padded == short.ljust(HASH_BYTES, b"\0") else padded


class EventPublisher:
    """Publishes changes from a thread of its own. `publish` may be called from any, never waits.

    Args:
        endpoint: to bind the PUB socket to, such as `tcp://*:5557`.
        replay_endpoint: to bind the ROUTER socket to; None for no replay.
        contents: everything that is held now, as changes; called on the publisher's thread.
        topic: of all batches.

    Raises:
        zmq.ZMQError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        contents: Callable[[], Iterable[Change]],
        topic: str = "",
        *,
        kept_batches: int = KEPT_BATCHES,
        kept_bytes: int = KEPT_BYTES,
        queued_batches: int = QUEUED_BATCHES,
    ) -> None:
        self._contents, self._topic = contents, topic.encode()
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(SEND_QUEUE)
            self._pub.bind(endpoint)
            self.endpoint = str(self._pub.get_string(zmq.LAST_ENDPOINT))
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.SNDHWM, 0)  # a replay is whole, or useless
                self._replay.bind(replay_endpoint)
                self.replay_endpoint = str(self._replay.get_string(zmq.LAST_ENDPOINT))
        except BaseException:
            self._context.destroy(0)
            raise
        self._maker = EventMaker()
        self._queue: queue.Queue[list[Change]] = queue.Queue(queued_batches)
        self._behind = threading.Event()
        self._behind.set()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_batches, self._kept_limit, self._kept_bytes = kept_batches, kept_bytes, 0
        self._next_seq = 0
        self.resyncs = self.dropped_batches = self.replays = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, changes: list[Change]) -> None:
        """Queue changes; if the queue is full, the whole state is published later instead."""
        if not changes:
            return
        try:
            self._queue.put_nowait(changes)
        except queue.Full:
            self.dropped_batches += 1
            self._behind.set()

    def resync(self) -> None:
        """Publish the whole state: a subscriber may have missed changes."""
        self._behind.set()

    @property
    def next_seq(self) -> int:
        """The number that the next batch will have."""
        return self._next_seq

    def stats(self) -> dict[str, Any]:
        """JSON-able counts."""
        return {
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "batches": self._next_seq,
            "queued": self._queue.qsize(),
            "dropped_batches": self.dropped_batches,
            "resyncs": self.resyncs,
            "replays": self.replays,
        }

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what waits, as far as the time allows, and unbind."""
        self._stop.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._context.destroy(int(1e3 * min(timeout_s, 0.2)))

    # The thread

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except Exception:
                logger.exception("publishing KV events failed; it goes on")
                self._behind.set()
                time.sleep(0.1)
            if self._stop.is_set() and self._queue.empty():
                return

    def _turn(self) -> None:
        if self._replay is not None and self._replay.poll(0):
            self._answer(self._replay)
        if self._behind.is_set():
            # What waits was made before the state is taken, and later changes to the same blocks
            # may have been dropped: it goes. What comes and is not dropped from here on is told
            # after the state, in order; so the last one told of a block is the last one made.
            self._behind.clear()
            self._forget_queue()
            self._send(self._state())
            self.resyncs += 1
        try:
            changes = self._queue.get(timeout=POLL_S)
        except queue.Empty:
            return
        self._send(self._maker.events(changes))

    def _forget_queue(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

    def _state(self) -> list[KVEvent]:
        return [AllBlocksCleared(), *self._maker.events(self._contents())]

    def _send(self, events: list[KVEvent]) -> None:
        seq, payload = self._next_seq, self._pack(events)
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        self._next_seq += 1
        self._kept.append((seq, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._kept_batches or (
            self._kept_bytes > self._kept_limit and len(self._kept) > 1
        ):
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _pack(self, events: list[Any]) -> bytes:
        return self._encoder.encode(EventBatch(time.time(), events, 0))

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a replay request that is none: %d frames", len(frames))
            return
        client, _, wanted = frames
        first = int.from_bytes(wanted, "big")
        self.replays += 1
        batches = [(seq, payload) for seq, payload in self._kept if seq >= first]
        oldest = self._kept[0][0] if self._kept else self._next_seq
        if self._next_seq and (first < oldest or first > self._next_seq):
            batches = [(self._next_seq - 1, self._pack(self._state()))]
        for seq, payload in batches:
            socket.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
        socket.send_multipart((client, b"", b"", END_SEQ, b""))

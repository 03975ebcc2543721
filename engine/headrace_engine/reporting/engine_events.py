"""Follows vLLM's own events to know which KV blocks an engine holds.

The engine's process publishes the events over sockets in a private folder of this machine, as
batches that are numbered from 0 (`vllm.distributed.kv_events`, 0.32). At its start and after a gap,
the follower has vLLM replay batches; vLLM keeps the last `REPLAYED_STEPS`. If vLLM no longer keeps
a missing batch, the follower removes all blocks and continues with the batches that are left.

A block's key is the low 64 bits of its hash, 8 bytes big-endian. Only blocks of the engine's own
memory are followed. Of a model with several KV cache groups, only the first group is followed.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from headrace_kvstore.protocol.batch_sequence import BatchAction, BatchSequence
from headrace_kvstore.protocol.events import END_SEQ, LOCAL, Change
from headrace_kvstore.protocol.wakeup import WakeupSignal

logger = logging.getLogger("headrace.engine")

GPU = "GPU"
"""vLLM's name for the engine's own memory, also on a CPU."""
KEY_BYTES = 8
REPLAYED_STEPS = 1000
"""Batches that vLLM keeps. Each also has the token ids of its blocks."""
WAITING_BATCHES = 1000
"""Batches that may wait for this process. vLLM drops further ones, and they are replayed."""
MAX_BLOCKS = 2**22
REPLAY_S = 2.0
_MASK = (1 << 8 * KEY_BYTES) - 1

Hashes = list[bytes | int]


class BlockStored(msgspec.Struct, gc=False, tag=True):
    """The fields of vLLM's event that are read here. Its token ids are not decoded."""

    block_hashes: Hashes
    parent_block_hash: bytes | int | None = None
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, gc=False, tag=True):
    """The fields of vLLM's event that are read here."""

    block_hashes: Hashes
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, gc=False, tag=True):
    """vLLM's event that the engine holds no block any more."""


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_batches = msgspec.msgpack.Decoder(_Batch)


def key_of(block_hash: bytes | int) -> bytes:
    """Return the key of a block from vLLM's hash of it, bytes or a number.

    Raises:
        ValueError: the hash has fewer than 8 bytes.
    """
    if isinstance(block_hash, int):
        return (block_hash & _MASK).to_bytes(KEY_BYTES, "big")
    if len(block_hash) < KEY_BYTES:
        raise ValueError(f"a block hash has at least {KEY_BYTES} bytes, not {len(block_hash)}")
    return block_hash[-KEY_BYTES:]


class HeldBlocks:
    """The blocks that one engine holds. One thread writes, any thread may read.

    vLLM may hold a block twice, and reports it as removed when one of the two copies is. The block
    is removed here then. So blocks may be missing here, but none stays too long.
    """

    def __init__(self, most_blocks: int = MAX_BLOCKS) -> None:
        self._parents: dict[bytes, bytes] = {}
        """By key of a held block: the key of the block before it; empty for a prompt's first."""
        self._most, self._lock = most_blocks, threading.Lock()

    def __len__(self) -> int:
        return len(self._parents)

    def clear(self) -> None:
        """Remove all blocks."""
        with self._lock:
            self._parents.clear()

    def contents(self) -> list[Change]:
        """Return all held blocks, as changes. Each follows its parent if that is possible."""
        with self._lock:
            parents = dict(self._parents)
        following: dict[bytes, list[bytes]] = {}
        for key, parent in parents.items():
            following.setdefault(parent if parent in parents else b"", []).append(key)
        found, left = [], following.pop(b"", [])
        while left:
            key = left.pop()
            found.append(Change(True, GPU, b"", key, parents[key]))
            left.extend(following.pop(key, ()))
        circles = (key for rest in following.values() for key in rest)  # of keys that collide
        found.extend(Change(True, GPU, b"", key, parents[key]) for key in circles)
        return found

    def apply(self, payload: bytes) -> list[Change] | None:
        """Apply one of vLLM's batches.

        Returns:
            The changes, in order; None if everything may have changed: `contents` has the blocks.

        Raises:
            ValueError: it is no batch; nothing of it was applied.
        """
        changes: list[Change] = []
        cleared = False
        events = [(event, *_keys(event)) for event in _batches.decode(payload).events]
        with self._lock:
            for event, before, keys in events:
                if isinstance(event, AllBlocksCleared):
                    self._parents.clear()
                    cleared = True
                elif isinstance(event, BlockRemoved):
                    gone = [key for key in keys if self._parents.pop(key, None) is not None]
                    changes.extend(Change(False, GPU, b"", key) for key in gone)
                else:
                    for key in keys:
                        if key not in self._parents:
                            self._parents[key] = before
                            changes.append(Change(True, GPU, b"", key, before))
                        before = key
            if len(self._parents) > self._most:
                logger.error("%d KV blocks are held by vLLM's events; removed", len(self._parents))
                self._parents.clear()
                cleared = True
        return None if cleared else changes


def _keys(event: BlockStored | BlockRemoved | AllBlocksCleared) -> tuple[bytes, list[bytes]]:
    """Return the key of the block before an event's blocks, empty if there is none, and theirs;
    none if these blocks are not followed."""
    if (
        isinstance(event, AllBlocksCleared)
        or event.medium not in (None, GPU)
        or event.locality not in (None, LOCAL)
        or event.group_idx
    ):
        return b"", []
    parent = event.parent_block_hash if isinstance(event, BlockStored) else None
    before = b"" if parent is None else key_of(parent)
    return before, [key_of(block_hash) for block_hash in event.block_hashes]


class EngineEvents:
    """Follower of one engine's events from `start` to `close`, on a thread of its own.

    Attributes:
        events, replay: endpoints for vLLM's publisher, in a folder that only this user may enter.
            It lasts until `close`.
        held: the blocks that the engine holds.
    """

    def __init__(self) -> None:
        """
        Raises:
            OSError: no temporary folder can be made.
        """
        beside = os.environ.get("VLLM_RPC_BASE_PATH")  # vLLM's own sockets
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-events-", dir=beside))
        self.events, self.replay = (f"ipc://{self._folder / name}" for name in ("events", "replay"))
        self.held = HeldBlocks()
        self._numbers = BatchSequence()
        self._subscriber: tuple[Callable[[list[Change]], None], Callable[[], None]] | None = None
        self._stop, self._wake = threading.Event(), WakeupSignal()
        self._thread: threading.Thread | None = None
        self.batches = self.replays = self.lost = 0

    def start(self) -> None:
        """Follow the engine, which publishes already. Its earlier batches are replayed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)
            self._thread.start()

    def subscribe(
        self, publish: Callable[[list[Change]], None], resync: Callable[[], None]
    ) -> None:
        """Report each change from now on, on the follower's thread.

        Args:
            publish: gets changes, in order; never waits.
            resync: called when `held.contents()` has to be read again, and once now.
        """
        self._subscriber = publish, resync
        resync()

    def stats(self) -> dict[str, Any]:
        """Return JSON-able counts. `lost`: how often all blocks were removed."""
        return {
            "blocks": len(self.held),
            "batches": self.batches,
            "replays": self.replays,
            "lost": self.lost,
        }

    def close(self) -> None:
        """Stop following, and remove the folder."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(1.0)
        self._wake.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # The thread

    def _run(self) -> None:
        context = zmq.Context()
        context.linger = 0
        events = context.socket(zmq.SUB)
        events.set_hwm(WAITING_BATCHES)
        events.setsockopt(zmq.SUBSCRIBE, b"")
        events.connect(self.events)
        poller = self._poller(events)
        begun = complained = False
        while not self._stop.is_set():
            try:
                if not begun:
                    begun = True
                    self._mend(context)
                if events in dict(poller.poll()):
                    self._take(context, events.recv_multipart())
            except Exception:
                if not complained:
                    complained = True
                    logger.exception("vLLM's KV events cannot be followed; this is said once")
                self._clear()
                self._stop.wait(0.1)
        context.destroy(0)

    def _poller(self, socket: zmq.Socket[Any]) -> zmq.Poller:
        """Return a poller that waits for the socket, or for `close`."""
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        return poller

    def _take(self, context: zmq.Context[Any], frames: list[bytes]) -> None:
        """Apply a published batch, after those before it."""
        _, number, payload = frames
        seq = int.from_bytes(number, "big")
        if self._numbers.classify(seq, whole=False) is BatchAction.WAIT:
            self._mend(context)
            if self._numbers.classify(seq, whole=False) is BatchAction.WAIT:
                self._clear()
                self._apply(seq, payload)
                return
        if self._numbers.classify(seq, whole=False) is BatchAction.TAKE:
            self._apply(seq, payload)

    def _mend(self, context: zmq.Context[Any]) -> None:
        """Have vLLM replay the missing batches, and apply them."""
        self.replays += 1
        until_s = time.monotonic() + REPLAY_S
        with context.socket(zmq.DEALER) as replay:
            replay.set_hwm(2 * REPLAYED_STEPS)
            replay.connect(self.replay)
            replay.send_multipart((b"", self._numbers.wanted.to_bytes(8, "big")))
            poller = self._poller(replay)
            while not self._stop.is_set() and time.monotonic() < until_s:
                if replay not in dict(poller.poll(round(1e3 * REPLAY_S))):
                    continue
                _, _, number, payload = replay.recv_multipart()
                if number == END_SEQ:
                    return
                seq = int.from_bytes(number, "big")
                fate = self._numbers.classify(seq, whole=False)
                if fate is BatchAction.WAIT:  # vLLM no longer keeps those before it
                    self._clear()
                if fate is not BatchAction.SKIP:
                    self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        self._numbers.mark_applied(seq)
        self.batches += 1
        changes = self.held.apply(payload)
        if self._subscriber is not None:
            publish, resync = self._subscriber
            if changes is None:
                resync()
            elif changes:
                publish(changes)

    def _clear(self) -> None:
        """Remove all blocks, because batches were lost."""
        self.lost += 1
        self.held.clear()
        if self._subscriber is not None:
            self._subscriber[1]()

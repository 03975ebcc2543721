"""Which KV blocks an engine holds, followed from vLLM's own events.

The engine's process publishes them over sockets in a private folder of this machine, as batches
that are numbered from 0 (`vllm.distributed.kv_events`, 0.29). Who subscribes late, or loses a
batch, has batches replayed; vLLM keeps the last `REPLAYED_STEPS`. If one that is missing is gone,
nothing of what was known can be believed: what is held counts again from there on.

A block is known by its key, the low 64 bits of its hash, 8 bytes big-endian. Only blocks of the
engine's own memory are followed, and of the first KV cache group where a model has several.
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

from headrace_kvstore.protocol.events import END_SEQ, LOCAL, Change
from headrace_kvstore.protocol.sequence import Fate, Sequence
from headrace_kvstore.protocol.wake import Wake

logger = logging.getLogger("headrace.engine")

GPU = "GPU"
"""vLLM's name for the engine's own memory, also on a CPU."""
KEY_BYTES = 8
REPLAYED_STEPS = 1000
"""Batches that vLLM keeps; each has the token ids of its blocks, too."""
WAITING_BATCHES = 1000
"""That wait for this process; vLLM drops those beyond, and they are replayed."""
MOST_BLOCKS = 2**22
REPLAY_S = 2.0
_MASK = (1 << 8 * KEY_BYTES) - 1

Hashes = list[bytes | int]


class BlockStored(msgspec.Struct, gc=False, tag=True):
    """What is needed of vLLM's event; the tokens are not even decoded."""

    block_hashes: Hashes
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, gc=False, tag=True):
    """Likewise."""

    block_hashes: Hashes
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, gc=False, tag=True):
    """Nothing is held."""


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_batches = msgspec.msgpack.Decoder(_Batch)


def key_of(block_hash: bytes | int) -> bytes:
    """The key of a block that vLLM knows by this hash, or by this number.

    Raises:
        ValueError: the hash has fewer than 8 bytes.
    """
    if isinstance(block_hash, int):
        return (block_hash & _MASK).to_bytes(KEY_BYTES, "big")
    if len(block_hash) < KEY_BYTES:
        raise ValueError(f"a block hash has at least {KEY_BYTES} bytes, not {len(block_hash)}")
    return block_hash[-KEY_BYTES:]


class HeldBlocks:
    """The blocks of one engine. One thread writes, any may read.

    vLLM may hold a block twice, and says it is removed when one of the two is: then it does not
    count any more. So blocks may be missing here, but none is held too long.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._keys: dict[bytes, None] = {}
        self._most, self._lock = most_blocks, threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def clear(self) -> None:
        """Nothing is known to be held."""
        with self._lock:
            self._keys.clear()

    def contents(self) -> list[Change]:
        """All that is held, as changes."""
        with self._lock:
            return [Change(True, GPU, b"", key) for key in self._keys]

    def apply(self, payload: bytes) -> list[Change] | None:
        """Take one of vLLM's batches.

        Returns:
            What changed, in order; None if all of it did, and `contents` says what is held now.

        Raises:
            ValueError: it is no batch; nothing of it was taken.
        """
        changes: list[Change] = []
        cleared = False
        events = [(event, _keys(event)) for event in _batches.decode(payload).events]
        with self._lock:
            for event, keys in events:
                if isinstance(event, AllBlocksCleared):
                    self._keys.clear()
                    cleared = True
                    continue
                stored = isinstance(event, BlockStored)
                for key in keys:
                    if (key in self._keys) is stored:
                        continue
                    if stored:
                        self._keys[key] = None
                    else:
                        del self._keys[key]
                    changes.append(Change(stored, GPU, b"", key))
            if len(self._keys) > self._most:
                logger.error("%d KV blocks are held by vLLM's events; forgotten", len(self._keys))
                self._keys.clear()
                cleared = True
        return None if cleared else changes


def _keys(event: BlockStored | BlockRemoved | AllBlocksCleared) -> list[bytes]:
    """Of the blocks that are followed."""
    if (
        isinstance(event, AllBlocksCleared)
        or event.medium not in (None, GPU)
        or event.locality not in (None, LOCAL)
        or event.group_idx
    ):
        return []
    return [key_of(block_hash) for block_hash in event.block_hashes]


class EngineEvents:
    """Follows one engine from `start` to `close`, in a thread of its own.

    Attributes:
        events, replay: endpoints for vLLM's publisher, in a folder that only this user may enter.
            It lasts until `close`.
        held: what the engine holds.
    """

    def __init__(self) -> None:
        """
        Raises:
            OSError: there can be no temporary folder.
        """
        beside = os.environ.get("VLLM_RPC_BASE_PATH")  # vLLM's own sockets
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-events-", dir=beside))
        self.events, self.replay = (f"ipc://{self._folder / name}" for name in ("events", "replay"))
        self.held = HeldBlocks()
        self._numbers = Sequence()
        self._told: tuple[Callable[[list[Change]], None], Callable[[], None]] | None = None
        self._stop, self._wake = threading.Event(), Wake()
        self._thread: threading.Thread | None = None
        self.batches = self.replays = self.lost = 0

    def start(self) -> None:
        """Follow the engine, which publishes by now. What it did before is replayed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)
            self._thread.start()

    def tell(self, publish: Callable[[list[Change]], None], resync: Callable[[], None]) -> None:
        """Have each change told from now on, on the follower's thread.

        Args:
            publish: gets changes, in order; never waits.
            resync: `held.contents()` is to be read anew. Called now, too.
        """
        self._told = publish, resync
        resync()

    def stats(self) -> dict[str, Any]:
        """JSON-able counts. `lost`: how often all was forgotten."""
        return {
            "blocks": len(self.held),
            "batches": self.batches,
            "replays": self.replays,
            "lost": self.lost,
        }

    def close(self) -> None:
        """Follow no longer, and remove the folder."""
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
                self._forget()
                self._stop.wait(0.1)
        context.destroy(0)

    def _poller(self, socket: zmq.Socket[Any]) -> zmq.Poller:
        """Waits for the socket, or for the end."""
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        return poller

    def _take(self, context: zmq.Context[Any], frames: list[bytes]) -> None:
        """Take a published batch, after those before it."""
        _, number, payload = frames
        seq = int.from_bytes(number, "big")
        if self._numbers.judge(seq, whole=False) is Fate.WAIT:
            self._mend(context)
            if self._numbers.judge(seq, whole=False) is Fate.WAIT:
                self._forget()
                self._apply(seq, payload)
                return
        if self._numbers.judge(seq, whole=False) is Fate.TAKE:
            self._apply(seq, payload)

    def _mend(self, context: zmq.Context[Any]) -> None:
        """Have vLLM replay what is missing."""
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
                fate = self._numbers.judge(seq, whole=False)
                if fate is Fate.WAIT:  # vLLM has forgotten those before it
                    self._forget()
                if fate is not Fate.SKIP:
                    self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        self._numbers.taken(seq)
        self.batches += 1
        changes = self.held.apply(payload)
        if self._told is not None:
            publish, resync = self._told
            if changes is None:
                resync()
            elif changes:
                publish(changes)

    def _forget(self) -> None:
        """Batches were lost."""
        self.lost += 1
        self.held.clear()
        if self._told is not None:
            self._told[1]()

"""Follows vLLM's own events to know which KV blocks an engine holds.

The engine's process publishes the events over sockets in a private folder of this machine, as
batches that are numbered from 0 (`vllm.distributed.kv_events`, 0.32). At its start and after a gap,
the follower has vLLM replay batches; vLLM keeps the last `REPLAYED_STEPS`. If vLLM no longer keeps
a missing batch, the follower removes all blocks and continues with the batches that are left.

A block's key is the low 64 bits of its hash, 8 bytes big-endian. Only blocks of the engine's own
memory are followed.

An engine with several KV cache groups has a block of each for the same tokens. It can use a prefix
if the groups that keep all tokens have all its blocks, and if the others have its last ones
(`kv_groups.HitGroups`). Therefore two facts are reported about a block: it is held, that is, all
groups of the former kind have it; and, as a group from 1 on, all groups with the same window have
it, too.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from headrace_engine.kv_groups import HitGroups
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
    token_ids: msgspec.Raw = msgspec.Raw(b"\x90")
    block_size: int = 0
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

    vLLM may hold a block several times, and reports each copy as stored and as removed. The block
    is held until the last copy is removed. If events were lost, blocks may be missing here, but
    none stays too long.

    Args:
        groups: what the engine must hold to use a prefix.
        most_blocks: maximum number of blocks of all groups; with more, all are removed.
    """

    def __init__(self, groups: HitGroups = HitGroups(), most_blocks: int = MAX_BLOCKS) -> None:
        self._parents: dict[bytes, bytes] = {}
        """By key of a held block: the key of the block before it; empty for a prompt's first."""
        self._masks: dict[bytes, int] = {}
        """By key: the groups that have the block, as bits. Empty for an engine with one group,
        which has the blocks in `_parents`."""
        self._copies: dict[tuple[int, bytes], int] = {}
        """By group and key: copies of a block beyond the first."""
        self._kept = _mask(groups.kept)
        self._windows = [_mask(window.groups) for window in groups.windows]
        self._groups = self._kept | sum(self._windows)
        self._most, self._lock = most_blocks, threading.Lock()

    def __len__(self) -> int:
        return len(self._parents)

    def clear(self) -> None:
        """Remove all blocks."""
        with self._lock:
            self._clear()

    def contents(self) -> list[Change]:
        """Return all held blocks, as changes. Each follows its parent if that is possible."""
        with self._lock:
            parents, masks = dict(self._parents), dict(self._masks)
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
        windows = [
            each._replace(group=number)
            for number, wanted in enumerate(self._windows, 1)
            for each in found
            if masks[each.hash] & wanted == wanted
        ]
        return found + windows

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
                    self._clear()
                    cleared = True
                elif not self._groups >> (event.group_idx or 0) & 1:
                    continue
                elif isinstance(event, BlockRemoved):
                    changes.extend(self._removed(event.group_idx or 0, keys))
                else:
                    group = event.group_idx or 0
                    if not (self._kept >> group & 1 and _has_gaps(event)):
                        changes.extend(self._stored(group, keys, before))
            if max(len(self._parents), len(self._masks)) > self._most:
                logger.error("%d KV blocks are held by vLLM's events; removed", len(self._parents))
                self._clear()
                cleared = True
        return None if cleared else changes

    def _clear(self) -> None:
        for each in (self._parents, self._masks, self._copies):
            each.clear()

    def _stored(self, group: int, keys: list[bytes], before: bytes) -> list[Change]:
        """Add blocks of a group, each the parent of the next if the group keeps all tokens."""
        bit, held = 1 << group, list[Change]()
        windows: list[list[Change]] = [[] for _ in self._windows]
        for key in keys:
            parent, before = before, key
            if self._has(bit, key):
                self._copies[group, key] = self._copies.get((group, key), 0) + 1
                continue
            mask = bit
            if self._groups != bit:
                mask = self._masks[key] = self._masks.get(key, 0) | bit
            if bit & self._kept and mask & self._kept == self._kept:
                self._parents[key] = parent
                held.append(Change(True, GPU, b"", key, parent))
                changed = self._windows
            elif key in self._parents:
                changed = [wanted if wanted & bit else 0 for wanted in self._windows]
            else:
                continue
            for number, wanted in enumerate(changed):
                if wanted and mask & wanted == wanted:
                    one = Change(True, GPU, b"", key, self._parents[key], number + 1)
                    windows[number].append(one)
        return sum(windows, held)

    def _removed(self, group: int, keys: list[bytes]) -> list[Change]:
        """Remove a copy of blocks of a group."""
        bit, gone = 1 << group, list[Change]()
        for key in keys:
            if not self._has(bit, key):
                continue
            more = self._copies.pop((group, key), 0)
            if more:
                if more > 1:
                    self._copies[group, key] = more - 1
                continue
            mask = bit
            if self._groups != bit:
                mask = self._masks.pop(key)
                if mask != bit:
                    self._masks[key] = mask ^ bit
            if key not in self._parents:
                continue
            for number, wanted in enumerate(self._windows, 1):
                if mask & wanted == wanted and bit & (wanted | self._kept):
                    gone.append(Change(False, GPU, b"", key, group=number))
            if bit & self._kept:
                del self._parents[key]
                gone.append(Change(False, GPU, b"", key))
        return gone

    def _has(self, bit: int, key: bytes) -> bool:
        """Return whether a group has a block."""
        if self._groups == bit:
            return key in self._parents
        return bool(self._masks.get(key, 0) & bit)


def _mask(groups: Iterable[int]) -> int:
    return sum(1 << group for group in groups)


def _has_gaps(event: BlockStored) -> bool:
    """Return whether vLLM has left out blocks between those of an event."""
    data = bytes(event.token_ids)
    wide = {0xDC: 2, 0xDD: 4}.get(data[0], 0)
    count = int.from_bytes(data[1 : 1 + wide], "big") if wide else data[0] & 0x0F
    return bool(count and event.block_size) and count != event.block_size * len(event.block_hashes)


def _keys(event: BlockStored | BlockRemoved | AllBlocksCleared) -> tuple[bytes, list[bytes]]:
    """Return the key of the block before an event's blocks, empty if there is none, and theirs;
    none if these blocks are not followed."""
    if (
        isinstance(event, AllBlocksCleared)
        or event.medium not in (None, GPU)
        or event.locality not in (None, LOCAL)
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
        held: the blocks that the engine holds. groups: what it must hold to use a prefix.
    """

    def __init__(self) -> None:
        """
        Raises:
            OSError: no temporary folder can be made.
        """
        beside = os.environ.get("VLLM_RPC_BASE_PATH")  # vLLM's own sockets
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-events-", dir=beside))
        self.events, self.replay = (f"ipc://{self._folder / name}" for name in ("events", "replay"))
        self.held, self.groups = HeldBlocks(), HitGroups()
        self._numbers = BatchSequence()
        self._subscriber: tuple[Callable[[list[Change]], None], Callable[[], None]] | None = None
        self._stop, self._wake = threading.Event(), WakeupSignal()
        self._thread: threading.Thread | None = None
        self.batches = self.replays = self.lost = 0

    def start(self, groups: HitGroups = HitGroups()) -> None:
        """Follow the engine, which publishes already. Its earlier batches are replayed.

        Args:
            groups: what the engine must hold to use a prefix.
        """
        if self._thread is None:
            self.groups, self.held = groups, HeldBlocks(groups)
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

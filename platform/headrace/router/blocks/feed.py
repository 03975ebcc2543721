"""Applies streams of KV events to the block index: handles gaps, restarts and invalid data. Pure.

A *source* is one stream: an engine (one data parallel rank of it) or a StoreNode. Both use the
schema of `vllm.distributed.kv_events`. They number their batches from 0 and label them with the
source's epoch, which changes when the source restarts. The caller moves the bytes and calls:

    join        a source appeared           leave    a source disappeared
    heard       a batch arrived, new or replayed
    replayed    the source's answer to a request for replay has ended
    turn        returns the replays to request now and the sources that expired

The feed treats a batch by its case:
- It is the next batch: it is applied. It was applied before: it is skipped.
- Batches before it are missing: a few batches are kept, and `turn` asks for a replay from the
  first missing one. Later batches are kept too, or arrive with the next replay.
- It begins with `AllBlocksCleared`: it needs no batch before it. A snapshot consists of such a
  batch and as many more as the state needs (`headrace_kvstore.protocol.events`). A new subscriber
  asks for a replay from 0, and the source sends either all batches or a snapshot.
- The replay begins later than requested: the source no longer has the missing batches. They may
  contain removals, so the source's holders are cleared, and the feed continues from this batch.
- A field of an event is invalid: this event is left out, the others are applied, and `FeedError`
  names the event and the field. The batch counts as applied.
- The batch cannot be decoded: it counts as lost, and a replay is requested. If the replayed batch
  cannot be decoded either, it is passed over.
- Its epoch is new: the source has restarted, and its holders are cleared. A batch of an earlier
  epoch is skipped.

A source that is silent for `silent_s` expires together with its holders.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from headrace.router.blocks.hashing import (
    MAX_HASH_BYTES,
    MIN_HASH_BYTES,
    key_of,
    keys_of,
)
from headrace.router.blocks.index import BlockIndex
from headrace_kvstore.protocol.events import DRAM, LOCAL, NVME
from headrace_kvstore.protocol.sequence import Fate, Sequence

GPU = "GPU"
"""vLLM's name for its own cache."""
ANY = "ANY"
"""Any of a source's two media."""
MAX_BATCH_BYTES = 16 * 2**20
MAX_BLOCKS, MAX_EVENTS = 1 << 17, 1 << 16
"""Maximum number of blocks in one event, and of events in one batch."""
MAX_SOURCES = 16_384
KEPT_BATCHES, KEPT_BYTES = 64, 2**20
"""Maximum number and total bytes of one source's batches that wait for missing earlier ones."""
KEPT_EPOCHS = 4
ASK_AGAIN_S = 2.0
SILENT_S = 10.0

Hash = Annotated[bytes, Meta(min_length=MIN_HASH_BYTES, max_length=MAX_HASH_BYTES)]
Number = Annotated[int, Meta(ge=0)]
Hashes = Annotated[list[Hash | Number], Meta(max_length=MAX_BLOCKS)]
Name = Annotated[str, Meta(max_length=64)]


class BlockStored(msgspec.Struct, gc=False, tag=True):
    """Fields of vLLM's event that the index needs; the tokens are not decoded."""

    block_hashes: Hashes
    parent_block_hash: Hash | Number | None = None
    block_size: Annotated[int, Meta(ge=0, le=2**20)] = 0
    medium: Name | None = None
    group_idx: Number | None = None
    locality: Name | None = None
    ownership: Name | None = None


class BlockRemoved(msgspec.Struct, gc=False, tag=True):
    """Fields of vLLM's event that the index needs."""

    block_hashes: Hashes
    medium: Name | None = None
    group_idx: Number | None = None
    locality: Name | None = None
    ownership: Name | None = None


class AllBlocksCleared(msgspec.Struct, gc=False, tag=True):
    """Event after which the source holds no block."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[Event], Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: int | None = None


class _Loose(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: int | None = None


_batches = msgspec.msgpack.Decoder(_Batch)
_loose = msgspec.msgpack.Decoder(_Loose)
_events = msgspec.msgpack.Decoder(Event)


class FeedError(ValueError):
    """A batch or one of its events is invalid; the text names the source, the number and why."""


@dataclass(frozen=True)
class Kind:
    """Description of the blocks that a source reports.

    Args:
        media: the source's media; each becomes a holder. With two media, `ANY` is a third holder.
        block_tokens: block size of the engine; runs with another block size are ignored. 0: any.
        ownership: digest of a store's namespace in hex; None for an engine's own cache.
    """

    media: tuple[str, ...] = (GPU,)
    block_tokens: int = 0
    ownership: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.media) <= 2 or len(set(self.media)) != len(self.media):
            raise ValueError(f"a source has one medium or two, not {self.media}")


STORE_MEDIA = (DRAM, NVME)


class Ask(NamedTuple):
    """Request that a source replays its batches from this number on."""

    source: str
    epoch: str
    seq: int


class Turn(NamedTuple):
    """Replays to request now, and names of the sources that expired."""

    asks: list[Ask]
    expired: list[str]


class _Source:
    def __init__(self, epoch: str, kind: Kind, holders: dict[str, int], now_s: float) -> None:
        self.epoch, self.kind, self.holders, self.heard_s = epoch, kind, holders, now_s
        self.past: deque[str] = deque(maxlen=KEPT_EPOCHS)
        self.restart(epoch)

    def restart(self, epoch: str) -> None:
        self.epoch = epoch
        self.numbers = Sequence()
        self.end = 0
        """One more than the highest batch number known."""
        self.kept: dict[int, bytes] = {}
        self.asked_s: float | None = None
        """When a replay was requested; None: no request is open."""
        self.asked_seq = -1
        """First number of the requested replay, until its first batch arrives; then -1."""

    @property
    def incomplete(self) -> bool:
        """Whether batches are missing, so that a replay must be requested."""
        return self.numbers.next is None or self.numbers.next < self.end


def _merged(events: list[Event]) -> list[Event]:
    """Merge consecutive removals into one event, since vLLM sends one removal per block."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if (
            isinstance(event, BlockRemoved)
            and isinstance(last, BlockRemoved)
            and (event.medium, event.group_idx) == (last.medium, last.group_idx)
            and (event.ownership, event.locality) == (last.ownership, last.locality)
        ):
            last.block_hashes += event.block_hashes
        else:
            merged.append(event)
    return merged


class Feed:
    """All sources of one index. One thread owns both.

    Args:
        index: gets a holder for each medium of a source.
        silent_s: how long a source may be silent. A source without events sends an empty batch or
            a heartbeat (`alive`).
    """

    def __init__(
        self, index: BlockIndex, silent_s: float = SILENT_S, most_sources: int = MAX_SOURCES
    ) -> None:
        self._index, self._silent_s, self._most = index, silent_s, most_sources
        self._sources: dict[str, _Source] = {}
        self.counts: Counter[str] = Counter()

    # Sources

    def join(self, source: str, epoch: str, kind: Kind, now_s: float) -> dict[str, int]:
        """Add a source and return its holders by medium.

        A source that is known with this epoch and kind stays as it is.

        Raises:
            OverflowError: there are too many sources or holders.
        """
        known = self._sources.get(source)
        if known is not None and known.kind == kind:
            known.heard_s = now_s
            if epoch != known.epoch:
                self._restart(known, epoch)
            return known.holders
        if known is not None:
            self.leave(source)
        if len(self._sources) >= self._most:
            raise OverflowError(f"there are {self._most} sources already")
        names = (*kind.media, ANY) if len(kind.media) == 2 else kind.media
        holders: dict[str, int] = {}
        try:
            for name in names:
                holders[name] = self._index.open()
        except OverflowError:
            for holder in holders.values():
                self._index.expire(holder)
            raise
        self._sources[source] = _Source(epoch, kind, holders, now_s)
        return holders

    def leave(self, source: str) -> None:
        """Remove a source. Its holders' numbers may be used again."""
        known = self._sources.pop(source, None)
        if known is not None:
            for holder in known.holders.values():
                self._index.expire(holder)

    def holders(self, source: str) -> dict[str, int]:
        """Return a source's holders by medium.

        Raises:
            KeyError: there is no such source.
        """
        return self._sources[source].holders

    def complete(self, source: str) -> bool:
        """Return whether all batches that a source is known to have sent were applied.

        Raises:
            KeyError: there is no such source.
        """
        return not self._sources[source].incomplete

    # Messages of the sources

    def alive(self, source: str, now_s: float, next_seq: int = 0) -> None:
        """Record a sign of life other than a batch.

        Args:
            next_seq: number of the source's next batch, if the source sent it: earlier batches
                that have not arrived are missing.
        """
        known = self._sources.get(source)
        if known is not None:
            known.heard_s = now_s
            known.end = max(known.end, next_seq)

    def heard(
        self, source: str, epoch: str, seq: int, payload: bytes, now_s: float, replay: bool = False
    ) -> None:
        """Apply a batch that arrived.

        Args:
            replay: the batch is part of a replay that `turn` requested.

        Raises:
            FeedError: the batch or some of its events are invalid. The valid events were applied.
            KeyError: no such source.
        """
        known = self._sources[source]
        known.heard_s = now_s
        if epoch != known.epoch:
            if epoch in known.past:
                self.counts["late"] += 1
                return
            self._restart(known, epoch)
        if seq < 0 or len(payload) > MAX_BATCH_BYTES:
            self.counts["bad"] += 1
            raise FeedError(
                f"{source}: number {seq}, {len(payload)} bytes: not from 0 on, or more than "
                f"{MAX_BATCH_BYTES} bytes"
            )
        errors: list[str] = []
        self._take(source, known, seq, payload, replay, errors)
        self._take_kept(source, known)
        if errors:
            self.counts["bad"] += len(errors)
            raise FeedError("; ".join(errors[:4]))

    def replayed(self, source: str, epoch: str, now_s: float) -> None:
        """Record that a replay has ended, or that the source cannot replay."""
        known = self._sources.get(source)
        if known is None or epoch != known.epoch:
            return
        known.heard_s, known.asked_s = now_s, None
        if known.asked_seq >= 0 and known.incomplete:
            # The replay had no batch: the source no longer has the missing ones.
            self._lose(known, min(known.kept, default=known.end))
            self._take_kept(source, known)
        known.asked_seq = -1

    def turn(self, now_s: float) -> Turn:
        """Remove sources that were silent for too long, and list the replays to request."""
        asks: list[Ask] = []
        expired = [
            source
            for source, known in self._sources.items()
            if now_s - known.heard_s > self._silent_s
        ]
        for source in expired:
            self.leave(source)
            self.counts["expired"] += 1
        for source, known in self._sources.items():
            if not known.incomplete:
                continue
            if known.asked_s is None or now_s - known.asked_s > ASK_AGAIN_S:
                known.asked_s = now_s
                known.asked_seq = known.numbers.wanted
                asks.append(Ask(source, known.epoch, known.asked_seq))
                self.counts["asks"] += 1
        return Turn(asks, expired)

    def stats(self) -> dict[str, Any]:
        """Return counts for JSON."""
        incomplete = sum(known.incomplete for known in self._sources.values())
        return {"sources": len(self._sources), "incomplete": incomplete, **self.counts}

    # Inside

    def _restart(self, known: _Source, epoch: str) -> None:
        self.counts["restarts"] += 1
        known.past.append(known.epoch)
        known.restart(epoch)
        self._clear(known)

    def _clear(self, known: _Source) -> None:
        for holder in known.holders.values():
            self._index.cleared(holder)

    def _lose(self, known: _Source, seq: int) -> None:
        """Give up the batches before a number: clear the source's holders and continue there."""
        self.counts["lost_batches"] += seq - known.numbers.wanted
        if known.numbers.next is not None:
            self._clear(known)
        known.numbers.next = seq

    def _take(
        self,
        source: str,
        known: _Source,
        seq: int,
        payload: bytes,
        replay: bool,
        errors: list[str],
    ) -> None:
        events = self._decode(source, seq, payload, errors)
        if events is None:
            if not replay or seq != known.numbers.wanted:
                return
            events = []
        whole = bool(events) and isinstance(events[0], AllBlocksCleared)
        fate = known.numbers.judge(seq, whole)
        if fate is Fate.WAIT and replay and known.asked_seq == known.numbers.wanted:
            self._lose(known, seq)
            fate = Fate.TAKE
        if replay:
            known.asked_seq = -1
        if fate is Fate.TAKE:
            for event in _merged(events):
                self._apply(known, event)
            known.numbers.taken(seq)
            self.counts["batches"] += 1
        elif fate is Fate.SKIP:
            self.counts["repeated"] += 1
        else:
            self.counts["gaps"] += not known.incomplete
            room = KEPT_BYTES - sum(map(len, known.kept.values())) - len(payload)
            if len(known.kept) < KEPT_BATCHES and room >= 0:
                known.kept[seq] = payload
        known.end = max(known.end, seq + 1)

    def _take_kept(self, source: str, known: _Source) -> None:
        """Apply kept batches up to the next gap. Their errors were raised when they arrived."""
        if not known.kept:
            return
        while (payload := known.kept.pop(known.numbers.wanted, None)) is not None:
            self._take(source, known, known.numbers.wanted, payload, False, [])
        known.kept = {n: kept for n, kept in known.kept.items() if n >= known.numbers.wanted}

    def _decode(
        self, source: str, seq: int, payload: bytes, errors: list[str]
    ) -> list[Event] | None:
        """Return a batch's valid events; None if the batch cannot be decoded."""
        try:
            return _batches.decode(payload).events
        except (ValueError, RecursionError) as error:
            first = error
        try:
            parts = _loose.decode(payload).events
        except (ValueError, RecursionError):
            errors.append(f"{source}: batch {seq}: {first}")
            return None
        events: list[Event] = []
        for i, part in enumerate(parts):
            try:
                events.append(_events.decode(part))
            except (ValueError, RecursionError) as error:
                errors.append(f"{source}: batch {seq}, event {i}: {error}")
        return events

    def _apply(self, known: _Source, event: Event) -> None:
        index, kind = self._index, known.kind
        if isinstance(event, AllBlocksCleared):
            self._clear(known)
            return
        medium = event.medium or GPU
        holder = known.holders.get(medium)
        if (
            holder is None
            or medium == ANY
            or event.group_idx
            or event.ownership != kind.ownership
            or event.locality not in (None, LOCAL)
        ):
            self.counts["not_followed"] += 1
            return
        keys = keys_of(event.block_hashes)
        self.counts["blocks"] += len(keys)
        some = known.holders.get(ANY)
        if isinstance(event, BlockRemoved):
            index.removed(holder, keys)
            if some is not None:
                other = next(one for one in kind.media if one != medium)
                index.removed(some, keys, unless=known.holders[other])
            return
        parent = event.parent_block_hash
        if event.block_size not in (0, kind.block_tokens) and kind.block_tokens:
            self.counts["not_followed"] += 1
            return
        apart = parent is None and event.block_size == 0
        above = None if parent is None else key_of(parent)
        for each in (holder,) if some is None else (holder, some):
            if apart:  # a store's event: the store does not know the block's parent
                index.stored_apart(each, keys)
            else:
                index.stored(each, above, keys)

"""Applies streams of KV events to the block index: handles gaps, restarts and invalid data. Pure.

A *source* is the stream in which a replica reports the blocks of its engine
(`headrace_engine.reporting`), in the schema of `vllm.distributed.kv_events`. It numbers its batches
from 0 and labels them with its epoch, which changes when it restarts. The caller moves the bytes
and calls:

    add_source     a source appeared        remove_source   a source disappeared
    on_batch       a batch arrived, new or replayed
    on_replay_end  the source's answer to a request for replay has ended
    poll           returns the replays to request now and the sources that expired

The processor treats a batch by its case:
- It is the next batch: it is applied. It was applied before: it is skipped.
- Batches before it are missing: a few batches are kept, and `poll` asks for a replay from the
  first missing one. Later batches are kept too, or arrive with the next replay.
- It begins with `AllBlocksCleared`: it needs no batch before it. A snapshot consists of such a
  batch and as many more as the state needs (`headrace_kvstore.protocol.events`). A new subscriber
  asks for a replay from 0, and the source sends either all batches or a snapshot.
- The replay begins later than requested: the source no longer has the missing batches. They may
  contain removals, so the source's holder is cleared, and the processor continues from this
  batch.
- A field of an event is invalid: this event is left out, the others are applied, and `KvEventError`
  names the event and the field. The batch counts as applied.
- The batch cannot be decoded: it counts as lost, and a replay is requested. If the replayed batch
  cannot be decoded either, it is passed over.
- Its epoch is new: the source has restarted, and its holder is cleared. A batch of an earlier
  epoch is skipped.

A source that is silent for `silent_s` expires together with its holder.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from headrace.router.blocks.block_index import BlockIndex
from headrace_kvstore.identity.prompt_hash import KEY_BYTES, key_of, keys_of
from headrace_kvstore.protocol.batch_sequence import BatchAction, BatchSequence

MAX_BATCH_BYTES = 16 * 2**20
MAX_BLOCKS, MAX_EVENTS = 1 << 17, 1 << 16
"""Maximum number of blocks in one event, and of events in one batch."""
MAX_SOURCES = 16_384
KEPT_BATCHES, KEPT_BYTES = 64, 2**20
"""Maximum number and total bytes of one source's batches that wait for missing earlier ones."""
KEPT_EPOCHS = 4
REPLAY_RETRY_S = 2.0
SILENT_S = 10.0

Hash = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=32)]
Number = Annotated[int, Meta(ge=0)]
Hashes = Annotated[list[Hash | Number], Meta(max_length=MAX_BLOCKS)]


class BlockStored(msgspec.Struct, gc=False, tag=True):
    """Fields of vLLM's event that the index needs; the tokens are not decoded."""

    block_hashes: Hashes
    parent_block_hash: Hash | Number | None = None
    group_idx: Number | None = None


class BlockRemoved(msgspec.Struct, gc=False, tag=True):
    """Fields of vLLM's event that the index needs."""

    block_hashes: Hashes
    group_idx: Number | None = None


class AllBlocksCleared(msgspec.Struct, gc=False, tag=True):
    """Event after which the source holds no block."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[Event], Meta(max_length=MAX_EVENTS)]


class _Loose(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_EVENTS)]


_batches = msgspec.msgpack.Decoder(_Batch)
_loose = msgspec.msgpack.Decoder(_Loose)
_events = msgspec.msgpack.Decoder(Event)


class KvEventError(ValueError):
    """A batch or one of its events is invalid; the text names the source, the number and why."""


class ReplayRequest(NamedTuple):
    """Request that a source replays its batches from this number on."""

    source: str
    epoch: str
    seq: int


class PollResult(NamedTuple):
    """Replays to request now, and names of the sources that expired."""

    requests: list[ReplayRequest]
    expired: list[str]


class _Source:
    def __init__(self, epoch: str, windows: tuple[int, ...], holder: int, now_s: float) -> None:
        self.epoch, self.windows, self.holder, self.last_seen_s = epoch, windows, holder, now_s
        self.past: deque[str] = deque(maxlen=KEPT_EPOCHS)
        self.restart(epoch)

    def restart(self, epoch: str) -> None:
        self.epoch = epoch
        self.numbers = BatchSequence()
        self.end = 0
        """One more than the highest batch number known."""
        self.kept: dict[int, bytes] = {}
        self.requested_s: float | None = None
        """When a replay was requested; None: no request is open."""
        self.requested_seq = -1
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
            and event.group_idx == last.group_idx
        ):
            last.block_hashes += event.block_hashes
        else:
            merged.append(event)
    return merged


class KvEventProcessor:
    """All sources of one index. One thread owns both.

    Args:
        index: gets a holder for each source.
        silent_s: how long a source may be silent. A source without events sends an empty batch or
            a heartbeat (`on_heartbeat`).
    """

    def __init__(
        self, index: BlockIndex, silent_s: float = SILENT_S, max_sources: int = MAX_SOURCES
    ) -> None:
        self._index, self._silent_s, self._max_sources = index, silent_s, max_sources
        self._sources: dict[str, _Source] = {}
        self.counts: Counter[str] = Counter()

    # Sources

    def add_source(
        self, source: str, epoch: str, now_s: float, windows: tuple[int, ...] = ()
    ) -> int:
        """Add a source and return its holder.

        A source that is known with this epoch and these windows stays as it is.

        Args:
            windows: number of blocks that each window of its KV cache groups needs before the end
                of a prefix (`headrace_engine.kv_groups.Window.blocks`). Events name windows by
                their group, from 1 on.

        Raises:
            OverflowError: there are too many sources or holders.
        """
        known = self._sources.get(source)
        if known is not None and known.windows == windows:
            known.last_seen_s = now_s
            if epoch != known.epoch:
                self._restart(known, epoch)
            return known.holder
        if known is not None:
            self.remove_source(source)
        if len(self._sources) >= self._max_sources:
            raise OverflowError(f"there are {self._max_sources} sources already")
        holder = self._index.open(windows)
        self._sources[source] = _Source(epoch, windows, holder, now_s)
        return holder

    def remove_source(self, source: str) -> None:
        """Remove a source. Its holder's number may be used again."""
        known = self._sources.pop(source, None)
        if known is not None:
            self._index.expire(known.holder)

    def holder(self, source: str) -> int:
        """Return a source's holder.

        Raises:
            KeyError: there is no such source.
        """
        return self._sources[source].holder

    # Messages of the sources

    def on_heartbeat(self, source: str, now_s: float, next_seq: int = 0) -> None:
        """Record a sign of life other than a batch.

        Args:
            next_seq: number of the source's next batch, if the source sent it: earlier batches
                that have not arrived are missing.
        """
        known = self._sources.get(source)
        if known is not None:
            known.last_seen_s = now_s
            known.end = max(known.end, next_seq)

    def on_batch(
        self, source: str, epoch: str, seq: int, payload: bytes, now_s: float, replay: bool = False
    ) -> None:
        """Apply a batch that arrived.

        Args:
            replay: the batch is part of a replay that `poll` requested.

        Raises:
            KvEventError: the batch or some of its events are invalid. The valid events were
                applied.
            KeyError: no such source.
        """
        known = self._sources[source]
        known.last_seen_s = now_s
        if epoch != known.epoch:
            if epoch in known.past:
                self.counts["late"] += 1
                return
            self._restart(known, epoch)
        if seq < 0 or len(payload) > MAX_BATCH_BYTES:
            self.counts["bad"] += 1
            raise KvEventError(
                f"{source}: number {seq}, {len(payload)} bytes: not from 0 on, or more than "
                f"{MAX_BATCH_BYTES} bytes"
            )
        errors: list[str] = []
        self._take(source, known, seq, payload, replay, errors)
        self._take_kept(source, known)
        if errors:
            self.counts["bad"] += len(errors)
            raise KvEventError("; ".join(errors[:4]))

    def on_replay_end(self, source: str, epoch: str, now_s: float) -> None:
        """Record that a replay has ended, or that the source cannot replay."""
        known = self._sources.get(source)
        if known is None or epoch != known.epoch:
            return
        known.last_seen_s, known.requested_s = now_s, None
        if known.requested_seq >= 0 and known.incomplete:
            # The replay had no batch: the source no longer has the missing ones.
            self._lose(known, min(known.kept, default=known.end))
            self._take_kept(source, known)
        known.requested_seq = -1

    def poll(self, now_s: float) -> PollResult:
        """Remove sources that were silent for too long, and list the replays to request."""
        requests: list[ReplayRequest] = []
        expired = [
            source
            for source, known in self._sources.items()
            if now_s - known.last_seen_s > self._silent_s
        ]
        for source in expired:
            self.remove_source(source)
            self.counts["expired"] += 1
        for source, known in self._sources.items():
            if not known.incomplete:
                continue
            if known.requested_s is None or now_s - known.requested_s > REPLAY_RETRY_S:
                known.requested_s = now_s
                known.requested_seq = known.numbers.wanted
                requests.append(ReplayRequest(source, known.epoch, known.requested_seq))
                self.counts["asks"] += 1
        return PollResult(requests, expired)

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
        self._index.cleared(known.holder)

    def _lose(self, known: _Source, seq: int) -> None:
        """Give up the batches before a number: clear the source's holder and continue there."""
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
        fate = known.numbers.classify(seq, whole)
        if fate is BatchAction.WAIT and replay and known.requested_seq == known.numbers.wanted:
            self._lose(known, seq)
            fate = BatchAction.TAKE
        if replay:
            known.requested_seq = -1
        if fate is BatchAction.TAKE:
            for event in _merged(events):
                self._apply(known, event)
            known.numbers.mark_applied(seq)
            self.counts["batches"] += 1
        elif fate is BatchAction.SKIP:
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
        if isinstance(event, AllBlocksCleared):
            self._clear(known)
            return
        group = event.group_idx or 0
        if group > len(known.windows):
            self.counts["not_followed"] += 1
            return
        keys = keys_of(event.block_hashes)
        self.counts["blocks"] += len(keys)
        if isinstance(event, BlockRemoved):
            self._index.removed(known.holder, keys, group)
            return
        parent = event.parent_block_hash
        before = None if parent is None else key_of(parent)
        self._index.stored(known.holder, before, keys, group)

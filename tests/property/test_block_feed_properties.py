"""Whatever is lost, repeated, reordered or restarted, the index ends with what the sources hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.blocks.feed import ANY, GPU, STORE_MEDIA, Feed, FeedError, Kind
from headrace.router.blocks.hashing import key_of
from headrace.router.blocks.index import BlockIndex

HASHES = [bytes([i]) * 32 for i in range(1, 21)]
KEYS = np.array([key_of(one) for one in HASHES], np.uint64)
ENGINE, STORE = Kind(block_tokens=16), Kind(STORE_MEDIA)
KEPT_BATCHES = 12
"""Of a source, for replay."""


class Source:
    """An engine or a store with a numbered log that forgets its oldest batches.

    An engine's log is only events; where it has forgotten some, they are lost. A store's log begins
    with its whole state.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind, self.epoch = kind, 0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.held: dict[str, set[int]] = {medium: set() for medium in self.kind.media}
        self.log: list[tuple[int, bytes]] = []
        self.next = 0
        self.forgot = False
        if self.kind is STORE:
            self.add([{"type": "AllBlocksCleared"}])

    def add(self, events: list[dict]) -> tuple[int, bytes]:
        self.log.append((self.next, msgspec.msgpack.encode([0.0, events, 0])))
        self.next += 1
        return self.log[-1]

    def change(self, medium: int, stored: bool, block: int, many: int) -> tuple[int, bytes]:
        name = self.kind.media[medium % len(self.kind.media)]
        blocks = range(block, min(block + many, len(HASHES)))
        event: dict = {"block_hashes": [HASHES[i] for i in blocks], "medium": name}
        if stored:
            self.held[name].update(blocks)
            event |= {"type": "BlockStored"}
            if self.kind is ENGINE:
                event |= {
                    "block_size": 16,
                    "parent_block_hash": HASHES[block - 1] if block else None,
                }
        else:
            self.held[name].difference_update(blocks)
            event |= {"type": "BlockRemoved"}
        sent = self.add([event])
        if len(self.log) > KEPT_BATCHES:
            if self.kind is STORE:
                self.log = []
                self.add([{"type": "AllBlocksCleared"}])
                for name, held in self.held.items():
                    hashes = [HASHES[i] for i in sorted(held)]
                    self.add([{"type": "BlockStored", "block_hashes": hashes, "medium": name}])
            else:
                self.log.pop(0)
                self.forgot = True
        return sent

    def usable(self, blocks: set[int]) -> int:
        return next((i for i in range(len(HASHES)) if i not in blocks), len(HASHES))


CHANGE = st.tuples(
    st.just("change"),
    st.integers(0, 1),
    st.integers(0, 1),
    st.booleans(),
    st.integers(0, 19),
    st.integers(1, 8),
    st.sampled_from(["sent", "sent", "sent", "lost", "twice", "late"]),
)
OTHER = st.tuples(
    st.sampled_from(["restart", "replay", "replay", "late", "garbage"]),
    st.integers(0, 1),
    st.integers(0, 100),
)


@settings(max_examples=300)
@given(steps=st.lists(st.one_of(CHANGE, CHANGE, CHANGE, OTHER), max_size=60))
def test_it_ends_with_what_the_sources_hold(steps: list[tuple]) -> None:
    index = BlockIndex(2**20)
    feed = Feed(index, silent_s=1e9)
    sources = {"engine": Source(ENGINE), "store": Source(STORE)}
    for name, source in sources.items():
        feed.join(name, str(source.epoch), source.kind, 0.0)
    delayed: list[Callable[[], None]] = []
    now_s = 0.0

    def hear(name: str, seq: int, payload: bytes, replay: bool = False) -> Callable[[], None]:
        epoch = str(sources[name].epoch)
        return lambda: feed.heard(name, epoch, seq, payload, now_s, replay)

    def replay() -> None:
        for name, epoch, wanted in feed.turn(now_s).asks:
            source = sources[name]
            if epoch != str(source.epoch):
                continue  # it was sent to one that is gone
            found = [batch for batch in source.log if batch[0] >= wanted]
            if source.kind is STORE and (not source.log or wanted < source.log[0][0]):
                found = source.log
            for seq, payload in found:
                hear(name, seq, payload, replay=True)()
            feed.replayed(name, epoch, now_s)

    for step in steps:
        now_s += 1.0
        name = sorted(sources)[step[1]]
        source = sources[name]
        if step[0] == "change":
            _, _, medium, stored, block, many, how = step
            seq, payload = source.change(medium, stored, block, many)
            if how == "late":
                delayed.append(hear(name, seq, payload))
            elif how != "lost":
                for _ in range(2 if how == "twice" else 1):
                    hear(name, seq, payload)()
        elif step[0] == "restart":
            source.restart()
            feed.join(name, str(source.epoch), source.kind, now_s)
        elif step[0] == "replay":
            replay()
        elif step[0] == "late" and delayed:
            delayed.pop(step[2] % len(delayed))()
        elif step[0] == "garbage":
            with suppress(FeedError):
                feed.heard(name, str(source.epoch), source.next + step[2], b"\xc1", now_s)
    for source in sources.values():  # something is sent at last, so that gaps are seen
        while source.next < 200:
            source.add([])
    for name, source in sources.items():
        hear(name, *source.add([]))()
    for _ in range(5):
        now_s += 10.0
        replay()
    assert all(feed.complete(name) for name in sources)
    found = index.match(KEYS)
    engine, store = sources["engine"], sources["store"]
    reached = found[feed.holders("engine")[GPU]]
    whole = engine.usable(engine.held[GPU])
    if engine.forgot or feed.counts["lost_batches"]:
        assert reached <= whole
    else:
        assert reached == whole
    for medium in STORE_MEDIA:
        assert found[feed.holders("store")[medium]] == store.usable(store.held[medium])
    both = store.usable(set.union(*store.held.values()))
    assert found[feed.holders("store")[ANY]] == both

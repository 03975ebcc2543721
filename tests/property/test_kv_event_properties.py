"""Whatever is lost, repeated, reordered or restarted, the index ends with what the sources hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.blocks.block_index import BlockIndex
from headrace.router.blocks.kv_events import KvEventError, KvEventProcessor
from headrace_kvstore.identity.prompt_hash import key_of

HASHES = [bytes([i]) * 32 for i in range(1, 21)]
KEYS = np.array([key_of(one) for one in HASHES], np.uint64)
KEPT_BATCHES = 12
"""Of a source, for replay."""


class Source:
    """An engine with a numbered log that drops its oldest batches.

    With snapshots, the log then begins with the whole state; without, the dropped events are lost.
    """

    def __init__(self, has_snapshots: bool) -> None:
        self.has_snapshots, self.epoch = has_snapshots, 0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.held: set[int] = set()
        self.log: list[tuple[int, bytes]] = []
        self.next = 0
        self.forgot = False
        if self.has_snapshots:
            self.add([{"type": "AllBlocksCleared"}])

    def add(self, events: list[dict]) -> tuple[int, bytes]:
        self.log.append((self.next, msgspec.msgpack.encode([0.0, events, 0])))
        self.next += 1
        return self.log[-1]

    def change(self, stored: bool, block: int, many: int) -> tuple[int, bytes]:
        blocks = range(block, min(block + many, len(HASHES)))
        event: dict = {"block_hashes": [HASHES[i] for i in blocks], "medium": "GPU"}
        if stored:
            self.held.update(blocks)
            event |= {
                "type": "BlockStored",
                "block_size": 16,
                "parent_block_hash": HASHES[block - 1] if block else None,
            }
        else:
            self.held.difference_update(blocks)
            event |= {"type": "BlockRemoved"}
        sent = self.add([event])
        if len(self.log) > KEPT_BATCHES:
            if self.has_snapshots:
                self.log = []
                self.add([{"type": "AllBlocksCleared"}])
                for i in sorted(self.held):
                    event = {"type": "BlockStored", "block_hashes": [HASHES[i]], "medium": "GPU"}
                    event["parent_block_hash"] = HASHES[i - 1] if i else None
                    self.add([event])
            else:
                self.log.pop(0)
                self.forgot = True
        return sent

    @property
    def usable(self) -> int:
        return next((i for i in range(len(HASHES)) if i not in self.held), len(HASHES))


CHANGE = st.tuples(
    st.just("change"),
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
    processor = KvEventProcessor(index, silent_s=1e9)
    sources = {"plain": Source(False), "snapshots": Source(True)}
    for name, source in sources.items():
        processor.add_source(name, str(source.epoch), 0.0)
    delayed: list[Callable[[], None]] = []
    now_s = 0.0

    def hear(name: str, seq: int, payload: bytes, replay: bool = False) -> Callable[[], None]:
        epoch = str(sources[name].epoch)
        return lambda: processor.on_batch(name, epoch, seq, payload, now_s, replay)

    def replay() -> None:
        for name, epoch, wanted in processor.poll(now_s).requests:
            source = sources[name]
            if epoch != str(source.epoch):
                continue  # it was sent to one that is gone
            found = [batch for batch in source.log if batch[0] >= wanted]
            if source.has_snapshots and (not source.log or wanted < source.log[0][0]):
                found = source.log
            for seq, payload in found:
                hear(name, seq, payload, replay=True)()
            processor.on_replay_end(name, epoch, now_s)

    for step in steps:
        now_s += 1.0
        name = sorted(sources)[step[1]]
        source = sources[name]
        if step[0] == "change":
            _, _, stored, block, many, how = step
            seq, payload = source.change(stored, block, many)
            if how == "late":
                delayed.append(hear(name, seq, payload))
            elif how != "lost":
                for _ in range(2 if how == "twice" else 1):
                    hear(name, seq, payload)()
        elif step[0] == "restart":
            source.restart()
            processor.add_source(name, str(source.epoch), now_s)
        elif step[0] == "replay":
            replay()
        elif step[0] == "late" and delayed:
            delayed.pop(step[2] % len(delayed))()
        elif step[0] == "garbage":
            with suppress(KvEventError):
                processor.on_batch(name, str(source.epoch), source.next + step[2], b"\xc1", now_s)
    for source in sources.values():  # something is sent at last, so that gaps are seen
        while source.next < 200:
            source.add([])
    for name, source in sources.items():
        hear(name, *source.add([]))()
    for _ in range(5):
        now_s += 10.0
        replay()
    assert processor.stats()["incomplete"] == 0
    found = index.match(KEYS)
    for name, source in sources.items():
        reached = found[processor.holder(name)]
        if source.forgot or processor.counts["lost_batches"]:
            assert reached <= source.usable
        else:
            assert reached == source.usable

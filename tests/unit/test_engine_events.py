"""Following vLLM's own publisher of KV events: late starts, gaps, and what is lost for good."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed import kv_events

from headrace_engine.kv_groups import HitGroups, Window
from headrace_engine.reporting.engine_events import (
    GPU,
    EngineEvents,
    HeldBlocks,
    key_of,
)
from headrace_engine.vllm.engine import engine_events
from headrace_kvstore.protocol.events import Change
from tests.support.kvnode import until

HASHES = [bytes([n]) * 32 for n in range(40)]


def stored(*blocks: int, **changes: Any) -> kv_events.BlockStored:
    fields: dict[str, Any] = dict(
        block_hashes=[HASHES[n] for n in blocks],
        parent_block_hash=None,
        token_ids=list(range(16 * len(blocks))),
        block_size=16,
        lora_id=None,
        medium=GPU,
        lora_name=None,
        group_idx=0,
    )
    return kv_events.BlockStored(**{**fields, **changes})


def removed(*blocks: int, **changes: Any) -> kv_events.BlockRemoved:
    fields: dict[str, Any] = dict(block_hashes=[HASHES[n] for n in blocks], medium=GPU, group_idx=0)
    return kv_events.BlockRemoved(**{**fields, **changes})


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode(kv_events.KVEventBatch(1.0, list(events), 0))


def keys(*blocks: int) -> set[bytes]:
    return {key_of(HASHES[n]) for n in blocks}


def held(blocks: HeldBlocks) -> set[bytes]:
    return {change.hash for change in blocks.contents()}


# What is held


def test_blocks_come_and_go_and_only_changes_are_told() -> None:
    blocks = HeldBlocks()
    told = blocks.apply(batch(stored(0, 1, 2), removed(1), stored(2, 3)))
    assert told == [
        Change(True, GPU, b"", key_of(HASHES[0]), b""),
        *(Change(True, GPU, b"", key_of(HASHES[n]), key_of(HASHES[n - 1])) for n in (1, 2)),
        Change(False, GPU, b"", key_of(HASHES[1])),
        Change(True, GPU, b"", key_of(HASHES[3]), key_of(HASHES[2])),
    ]
    assert held(blocks) == keys(0, 2, 3) and len(blocks) == 3
    assert blocks.apply(batch(removed(1), stored(0))) == []


def test_a_block_is_held_until_its_last_copy_is_removed() -> None:
    blocks = HeldBlocks()
    blocks.apply(batch(stored(0), stored(0), stored(0)))
    assert blocks.apply(batch(removed(0), removed(0))) == []
    assert blocks.apply(batch(removed(0))) == [Change(False, GPU, b"", key_of(HASHES[0]))]
    assert blocks.apply(batch(removed(0))) == [] and len(blocks) == 0


TWO = HitGroups(frozenset({1}), (Window(2, frozenset({0, 2})),))
"""Full attention as group 1, beside two groups with one window."""


def test_a_window_is_told_when_all_its_groups_have_a_block() -> None:
    blocks, key = HeldBlocks(TWO), key_of(HASHES[0])
    assert blocks.apply(batch(stored(0, group_idx=0))) == []
    assert blocks.apply(batch(stored(0, group_idx=1))) == [Change(True, GPU, b"", key, b"")]
    window = Change(True, GPU, b"", key, b"", 1)
    assert blocks.apply(batch(stored(0, group_idx=2))) == [window]
    assert blocks.contents() == [window._replace(group=0), window]
    assert blocks.apply(batch(removed(0, group_idx=0))) == [Change(False, GPU, b"", key, group=1)]
    assert blocks.apply(batch(stored(0, group_idx=0))) == [window]
    assert blocks.apply(batch(removed(0, group_idx=1))) == [
        Change(False, GPU, b"", key, group=1),
        Change(False, GPU, b"", key),
    ]
    assert blocks.apply(batch(removed(0, group_idx=2))) == [] and len(blocks) == 0


def test_a_run_of_a_window_is_told_after_that_of_all_tokens() -> None:
    blocks = HeldBlocks(TWO)
    told = blocks.apply(batch(*(stored(0, 1, 2, group_idx=group) for group in (0, 2, 1))))
    assert told is not None
    assert [(change.group, change.hash) for change in told] == [
        (group, key_of(HASHES[n])) for group in (0, 1) for n in range(3)
    ]


def test_parents_are_those_of_full_attention() -> None:
    """vLLM's event of a window leaves out the blocks that have left it."""
    blocks = HeldBlocks(TWO)
    blocks.apply(batch(stored(2, group_idx=0, token_ids=list(range(48))), stored(2, group_idx=2)))
    told = blocks.apply(batch(stored(0, 1, 2, group_idx=1)))
    assert told is not None
    assert told[-1] == Change(True, GPU, b"", key_of(HASHES[2]), key_of(HASHES[1]), 1)


def test_without_full_attention_a_run_with_gaps_is_left_out() -> None:
    blocks = HeldBlocks(HitGroups(frozenset({0})))
    assert blocks.apply(batch(stored(2, 3, token_ids=list(range(64))))) == []
    assert blocks.apply(batch(stored(2, 3, token_ids=list(range(70_000)), block_size=35_000)))


def test_hashes_and_their_numbers_name_the_same_block() -> None:
    blocks = HeldBlocks()
    number = int.from_bytes(HASHES[3], "big") & (2**64 - 1)
    blocks.apply(batch(stored(block_hashes=[number])))
    assert held(blocks) == keys(3)
    assert blocks.apply(batch(stored(3))) == []


def test_clearing_tells_that_all_has_changed() -> None:
    blocks = HeldBlocks()
    blocks.apply(batch(stored(0, 1)))
    assert blocks.apply(batch(kv_events.AllBlocksCleared(), stored(5))) is None
    assert held(blocks) == keys(5)


@pytest.mark.parametrize("changes", [{"medium": "CPU"}, {"group_idx": 1}, {"locality": "REMOTE"}])
def test_blocks_elsewhere_are_not_the_engines(changes: dict[str, Any]) -> None:
    blocks = HeldBlocks()
    blocks.apply(batch(stored(0)))
    assert blocks.apply(batch(stored(1, **changes), removed(0, **changes))) == []
    assert held(blocks) == keys(0)


@pytest.mark.parametrize("payload", [b"", b"\xff", batch(stored(block_hashes=[b"short"]))])
def test_what_is_no_batch_changes_nothing(payload: bytes) -> None:
    blocks = HeldBlocks()
    blocks.apply(batch(stored(0)))
    with pytest.raises(ValueError):
        blocks.apply(payload)
    assert held(blocks) == keys(0)


def test_more_blocks_than_an_engine_has_are_forgotten() -> None:
    blocks = HeldBlocks(most_blocks=3)
    assert blocks.apply(batch(stored(0, 1, 2))) is not None
    assert blocks.apply(batch(stored(3))) is None
    assert len(blocks) == 0


events_lists = st.lists(
    st.tuples(st.sampled_from(["stored", "removed", "cleared"]), st.sets(st.integers(0, 39))),
    max_size=20,
)


@given(st.lists(events_lists, max_size=10))
def test_whoever_applies_the_changes_holds_the_same(history: list[Any]) -> None:
    blocks, model, follower = HeldBlocks(), Counter[int](), set[bytes]()
    for events in history:
        made: list[Any] = []
        for kind, numbers in events:
            if kind == "cleared":
                model.clear()
                made.append(kv_events.AllBlocksCleared())
            elif kind == "stored":
                model.update(numbers)
                made.append(stored(*numbers))
            else:
                model.subtract(n for n in numbers if model[n])
                made.append(removed(*numbers))
        changes = blocks.apply(batch(*made))
        if changes is None:
            follower = held(blocks)
        for change in changes or ():
            assert (change.hash in follower) is not change.stored
            (follower.add if change.stored else follower.discard)(change.hash)
        assert held(blocks) == keys(*+model) == follower


# Following


class Told:
    """Whoever is told of changes."""

    def __init__(self, events: EngineEvents) -> None:
        self.held: set[bytes] = set()
        self.resyncs = 0
        self._events = events
        events.subscribe(self.publish, self.resync)

    def publish(self, changes: list[Change]) -> None:
        for change in changes:
            (self.held.add if change.stored else self.held.discard)(change.hash)

    def resync(self) -> None:
        self.resyncs += 1
        self.held = held(self._events.held)


class Engine:
    """vLLM's publisher, as an engine's process has it."""

    def __init__(self, events: EngineEvents, buffer_steps: int = 1000) -> None:
        self.publisher = kv_events.ZmqEventPublisher(
            0, endpoint=events.events, replay_endpoint=events.replay, buffer_steps=buffer_steps
        )

    def tell(self, *events: Any) -> None:
        self.publisher.publish(kv_events.KVEventBatch(time.time(), list(events)))

    def lose(self, batches: int) -> None:
        """Batches that are published and never come."""
        until(self.publisher._event_queue.empty)
        time.sleep(0.05)
        socket, self.publisher._pub = self.publisher._pub, SimpleNamespace(send_multipart=id)
        for n in range(batches):
            self.tell(stored(30 + n))
        until(self.publisher._event_queue.empty)
        time.sleep(0.05)
        self.publisher._pub = socket


@pytest.fixture
def events() -> Iterator[EngineEvents]:
    made = EngineEvents()
    yield made
    made.close()
    assert not Path(made.events.removeprefix("ipc://")).parent.exists()


def test_changes_are_told_as_they_come(events: EngineEvents) -> None:
    engine = Engine(events)
    events.start()
    told = Told(events)
    engine.tell(stored(0, 1, 2))
    engine.tell(removed(1), stored(3))
    until(lambda: told.held == keys(0, 2, 3))
    engine.tell(kv_events.AllBlocksCleared())
    until(lambda: told.held == set())
    engine.publisher.shutdown()


def test_what_the_engine_told_before_is_replayed(events: EngineEvents) -> None:
    engine = Engine(events)
    for n in range(5):
        engine.tell(stored(n))
    until(engine.publisher._event_queue.empty)
    events.start()
    until(lambda: held(events.held) == keys(0, 1, 2, 3, 4))
    told = Told(events)
    assert told.held == keys(0, 1, 2, 3, 4)
    engine.publisher.shutdown()


def test_a_gap_is_mended_by_a_replay(events: EngineEvents) -> None:
    engine = Engine(events)
    events.start()
    told = Told(events)
    engine.tell(stored(0))
    until(lambda: told.held == keys(0))
    engine.lose(3)
    engine.tell(stored(1))
    until(lambda: told.held == keys(0, 1, 30, 31, 32))
    assert events.stats()["lost"] == 0
    engine.publisher.shutdown()


def test_what_vllm_has_forgotten_makes_all_that_was_known_doubtful(events: EngineEvents) -> None:
    engine = Engine(events, buffer_steps=2)
    events.start()
    told = Told(events)
    engine.tell(stored(0))
    until(lambda: told.held == keys(0))
    engine.lose(5)
    engine.tell(stored(1))
    until(lambda: told.held == keys(1, 33, 34) or told.held == keys(1, 34))
    assert events.stats()["lost"] == 1
    engine.publisher.shutdown()


def test_an_engine_that_never_publishes_is_left_in_peace(events: EngineEvents) -> None:
    events.start()
    time.sleep(0.1)
    assert events.stats()["blocks"] == 0


def test_nobody_else_enters_the_folder(events: EngineEvents) -> None:
    folder = Path(events.events.removeprefix("ipc://")).parent
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


# Which engines are followed


def config(**changes: Any) -> Any:
    fields: dict[str, Any] = dict(
        kv_events_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    return SimpleNamespace(**{**fields, **changes})


def test_an_engine_is_made_to_publish_to_this_process() -> None:
    made = config()
    events = engine_events(made)
    assert events is not None
    told = made.kv_events_config
    assert (told.enable_kv_cache_events, told.publisher) == (True, "zmq")
    assert (told.endpoint, told.replay_endpoint) == (events.events, events.replay)
    events.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_events_config": kv_events.KVEventsConfig()},
        {"cache_config": SimpleNamespace(enable_prefix_caching=False)},
        {"parallel_config": SimpleNamespace(data_parallel_size=2)},
    ],
)
def test_an_engine_whose_events_go_elsewhere_or_are_none_is_left_alone(
    changes: dict[str, Any],
) -> None:
    made = config(**changes)
    before = made.kv_events_config
    assert engine_events(made) is None
    assert made.kv_events_config is before

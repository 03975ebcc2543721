"""From vLLM's KV events to the gateway's index: what an engine holds, gateways find."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed import kv_events

from headrace.gateway.placement.event_subscriber import MAX_MESSAGE_BYTES
from headrace.router.blocks.block_index import BlockIndex
from headrace.router.blocks.kv_events import KvEventProcessor
from headrace_engine.reporting.engine_events import GPU, HeldBlocks, key_of
from headrace_kvstore.protocol.events import (
    BATCH_BLOCKS,
    AllBlocksCleared,
    Change,
    EventBatch,
    batches,
)

PROMPTS, BLOCKS = 5, 4


def block(prompt: int, number: int) -> bytes:
    return bytes([prompt + 1, number + 1]) * 16


def stored(prompt: int, first: int = 0, last: int = BLOCKS) -> kv_events.BlockStored:
    """vLLM's event about a part of a prompt."""
    return kv_events.BlockStored(
        block_hashes=[block(prompt, n) for n in range(first, last)],
        parent_block_hash=block(prompt, first - 1) if first else None,
        token_ids=[],
        block_size=128,
        lora_id=None,
        medium=GPU,
        lora_name=None,
    )


def removed(prompt: int, first: int, last: int = BLOCKS) -> kv_events.BlockRemoved:
    hashes = [block(prompt, n) for n in range(first, last)]
    return kv_events.BlockRemoved(block_hashes=hashes, medium=GPU)


class Chain:
    """An engine's events, as its replica publishes them and a gateway takes them."""

    def __init__(self) -> None:
        self.held = HeldBlocks()
        self._index = BlockIndex(2**20)
        self._processor = KvEventProcessor(self._index, silent_s=10.0)
        self._holder = self._processor.add_source("e", "1", 0.0)
        self._seq = 0
        self._processor.poll(0.0)
        self._processor.on_replay_end("e", "1", 0.0)
        self._publish([[AllBlocksCleared()]])

    def step(self, *events: Any) -> None:
        """One step of the engine."""
        payload = msgspec.msgpack.encode(kv_events.KVEventBatch(1.0, list(events), 0))
        changes = self.held.apply(payload)
        assert changes is not None
        self._publish(batches(changes))

    def resync(self) -> None:
        """Publish the whole state, as after each 4 MiB of batches."""
        self._publish([[AllBlocksCleared()], *batches(self.held.contents())])

    def found(self) -> list[int]:
        """Leading blocks of each prompt that the gateway finds at the engine."""
        keys = [
            np.array([int.from_bytes(key_of(block(p, n)), "big") for n in range(BLOCKS)], np.uint64)
            for p in range(PROMPTS)
        ]
        return [int(self._index.match(each)[self._holder]) for each in keys]

    def _publish(self, events: Iterable[list[Any]]) -> None:
        for each in events:
            payload = msgspec.msgpack.encode(EventBatch(1.0, each, 0))
            self._processor.on_batch("e", "1", self._seq, payload, 0.0)
            self._seq += 1


@pytest.mark.parametrize("again", [False, True], ids=["as it comes", "from a whole state"])
def test_prompts_of_one_step_are_all_found(again: bool) -> None:
    chain = Chain()
    chain.step(*(stored(p) for p in range(PROMPTS)))
    if again:
        chain.resync()
    assert chain.found() == [BLOCKS] * PROMPTS


@pytest.mark.parametrize("again", [False, True], ids=["as it comes", "from a whole state"])
def test_prompts_that_are_computed_in_turns_are_all_found(again: bool) -> None:
    chain = Chain()
    for n in range(BLOCKS):
        chain.step(*(stored(p, n, n + 1) for p in range(PROMPTS)))
    if again:
        chain.resync()
    assert chain.found() == [BLOCKS] * PROMPTS


def test_a_whole_state_is_as_few_events_as_there_are_prompts() -> None:
    chain = Chain()
    for n in range(BLOCKS):
        chain.step(*(stored(p, n, n + 1) for p in range(PROMPTS)))
    [events] = batches(chain.held.contents())
    assert len(events) == PROMPTS


def test_a_batch_of_single_blocks_is_no_longer_than_a_gateway_takes() -> None:
    changes = [
        Change(True, "DRAM", b"n" * 16, each.to_bytes(32, "big"), b"p" * 32)
        for each in range(BATCH_BLOCKS)
    ]
    made = list(batches(changes))
    assert sum(len(event.block_hashes) for events in made for event in events) == BATCH_BLOCKS
    for events in made:
        payload = msgspec.msgpack.encode(EventBatch(1.0, events, 0))
        assert len(payload) < MAX_MESSAGE_BYTES


def test_blocks_behind_a_removed_one_are_found_when_it_is_back() -> None:
    chain = Chain()
    chain.step(stored(0), stored(1))
    chain.step(removed(0, 1, 2))
    assert chain.found()[:2] == [1, BLOCKS]
    chain.resync()
    assert chain.found()[:2] == [1, BLOCKS]
    chain.step(stored(0, 1, 2))
    assert chain.found()[:2] == [BLOCKS, BLOCKS]


def test_changes_without_a_known_parent_stay_one_run() -> None:
    """Those of the store, which knows blocks by hash alone."""
    changes = [Change(True, "DRAM", b"n", block(0, n)) for n in range(BLOCKS)]
    [[event]] = batches(changes)
    assert (event.block_hashes, event.parent_block_hash) == ([c.hash for c in changes], None)


steps = st.lists(
    st.tuples(st.booleans(), st.integers(0, PROMPTS - 1), st.integers(0, BLOCKS - 1), st.booleans())
)


@given(steps)
def test_a_gateway_finds_what_is_held_from_the_first_block_on(history: list[Any]) -> None:
    chain, held = Chain(), [0] * PROMPTS
    for is_stored, prompt, number, whole in history:
        if is_stored and number >= held[prompt]:
            chain.step(stored(prompt, held[prompt], number + 1))
            held[prompt] = number + 1
        elif not is_stored and number < held[prompt]:
            chain.step(removed(prompt, number, held[prompt]))
            held[prompt] = number
        if whole:
            chain.resync()
        assert chain.found() == held

"""Pulls over real NIXL, proved: which blocks a decode engine uses, and which it refuses.

Two agents of one process stand for the two engines (`benchmarks.integrity.pair`). The cases of
vLLM's issue 52234, in which a decode engine answered with another prompt's text or with garbage,
are here by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.integrity.pair import Consumer, Producer, Shape, agent, digest
from headrace_engine.pull_proof.identity import Claim, Unproved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

SHAPE = Shape(layers=3, blocks=16, heads=2, tokens=32, width=16)
BLOCKS, LAYERS = SHAPE.blocks, SHAPE.layers
TIMEOUT_S = 0.3
PROMPT, OTHER = list(range(100)), list(range(50, 150))


@dataclass
class Pair:
    producer: Producer
    consumer: Consumer


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    producer = Producer(agent("producer"), SHAPE)
    yield Pair(producer, Consumer(agent("consumer"), producer, TIMEOUT_S))


@pytest.fixture
def pair(engines: Pair) -> Pair:
    engines.producer.restart()
    engines.producer.notes()
    return engines


def same(pair: Pair, theirs: list[int], ours: list[int]) -> bool:
    """Whether the blocks hold the same bytes on both sides."""
    caches = zip(pair.producer.caches.values(), pair.consumer.caches.values(), strict=True)
    return all(torch.equal(p[theirs], c[ours]) for p, c in caches)


def told(producer: Producer) -> list[bytes]:
    """What the producer hears within half a second."""
    deadline = time.monotonic() + 0.5
    while not (notes := producer.notes()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return notes


def test_kv_that_is_the_prompts_is_used_and_only_then_the_producer_may_free_it(pair: Pair) -> None:
    claim = pair.producer.prefill("a", PROMPT, [3, 5, 4])
    assert pair.consumer.pull(claim, [3, 5, 4], [7, 1, 2]) == "DONE"
    assert same(pair, [3, 5, 4], [7, 1, 2])
    assert told(pair.producer) == [b"pulled"]


# vLLM's issue 52234: five references that a decode engine must not believe


def test_an_unknown_request_of_the_producer_is_refused(pair: Pair) -> None:
    """Unknown `remote_request_id`: nothing was handed out."""
    claim = pair.producer.prefill("a", PROMPT, [3])
    nobodys = pair.producer.table.address + 9 * pair.producer.geometry.row_bytes
    assert pair.consumer.pull(replace(claim, places={(0, 0): nobodys}), [3], [1]) == "gone"
    outside = pair.producer.table.address + pair.producer.geometry.nbytes
    assert pair.consumer.pull(replace(claim, places={(0, 0): outside}), [3], [1]) == "unreachable"


def test_blocks_that_were_not_handed_out_are_refused_before_they_are_read(pair: Pair) -> None:
    """Out-of-range `remote_block_ids`, or those of another request."""
    claim = pair.producer.prefill("a", PROMPT, [3, 4])
    for blocks in ([3, BLOCKS], [3, 5], [4, 3], [3]):
        with pytest.raises(Unproved, match="not of its blocks"):
            claim.own(digest(PROMPT), [blocks])


def test_a_reference_that_was_pulled_already_is_refused(pair: Pair) -> None:
    """Consumed reference used again at once."""
    claim = pair.producer.prefill("a", PROMPT, [3])
    assert pair.consumer.pull(claim, [3], [1]) == "DONE"
    pair.producer.free("a")
    assert pair.consumer.pull(claim, [3], [1]) == "gone"


def test_a_stale_reference_to_blocks_of_another_prompt_is_refused(pair: Pair) -> None:
    """The case that returned the previous prompt's answer: the producer used the blocks again."""
    claim = pair.producer.prefill("a", PROMPT, [3, 4])
    pair.producer.free("a")
    pair.producer.prefill("b", OTHER, [3, 4])
    assert pair.consumer.pull(claim, [3, 4], [1, 2]) == "gone"


def test_a_reference_whose_lease_has_ended_is_refused(pair: Pair) -> None:
    claim = pair.producer.prefill("a", PROMPT, [3])
    pair.producer.free("a")
    assert pair.consumer.pull(claim, [3], [1]) == "gone"
    assert told(pair.producer) == []


# What else a reference may have become


def test_a_lease_that_ends_while_the_bytes_are_on_their_way_is_seen(pair: Pair) -> None:
    claim = pair.producer.prefill("a", PROMPT, [3])
    handle = pair.consumer.begin(claim, [3], [1])
    pair.producer.free("a")
    assert pair.consumer.end(handle) == "ERR"
    assert pair.consumer.agent.outcomes.failed.pop("r").kind == "gone"


def test_the_same_row_and_blocks_for_the_same_request_id_are_another_hand_out(pair: Pair) -> None:
    claim = pair.producer.prefill("a", PROMPT, [3])
    pair.producer.free("a")
    for _ in range(pair.producer.geometry.rows):
        again = pair.producer.prefill("a", PROMPT, [3])
        if again.places == claim.places:
            break
        pair.producer.free("a")
    assert pair.consumer.pull(claim, [3], [1]) == "reused"
    assert pair.consumer.pull(again, [3], [1]) == "DONE"


def test_an_engine_that_started_again_in_the_same_place_is_another(pair: Pair) -> None:
    claim = pair.producer.prefill("a", PROMPT, [3])
    pair.producer.restart()
    now = pair.producer.prefill("a", PROMPT, [3])
    assert now.places == claim.places
    assert pair.consumer.pull(claim, [3], [1]) == "restarted"


def test_blocks_of_a_prompt_that_differs_in_one_token_are_refused(pair: Pair) -> None:
    claim = pair.producer.prefill("a", PROMPT, [3])
    other = replace(claim.identity, digest=digest([*PROMPT[:-1], 7]))
    assert pair.consumer.pull(replace(claim, identity=other), [3], [1]) == "prompt"


# Bytes


@pytest.mark.parametrize("theirs, ours", [([3, 5, 4], [7, 1, 2]), ([3, 5, 4], [8])])
def test_fingerprints_agree_where_bytes_do(pair: Pair, theirs: list[int], ours: list[int]) -> None:
    """Also where the first blocks of the prompt are cached here, and only the last are pulled."""
    claim = pair.producer.prefill("a", PROMPT, theirs, demanded=True)
    assert pair.consumer.pull(claim, theirs, ours) == "DONE"
    [(_, checked)] = pair.consumer.agent.take_proved()[-1:]
    assert checked


def test_one_flipped_bit_anywhere_in_a_pull_is_caught(pair: Pair) -> None:
    """The producer's memory differs from what it computed, which is what the puller gets."""
    draw = np.random.default_rng(5)
    for _ in range(20):
        claim = pair.producer.prefill("a", PROMPT, [3, 4], demanded=True)
        layer = list(pair.producer.caches.values())[draw.integers(LAYERS)]
        block = layer[int(draw.integers(3, 5))].view(torch.uint8).view(-1)
        block[int(draw.integers(block.numel()))] ^= 1 << int(draw.integers(8))
        assert pair.consumer.pull(claim, [3, 4], [1, 2]) == "content"
        assert told(pair.producer) == [b"pulled"], "nobody else will have its blocks freed"
        pair.producer.free("a")


def test_fingerprints_that_do_not_come_are_not_waited_for_long(pair: Pair) -> None:
    grant = pair.producer.grants.begin("a", digest(PROMPT), len(PROMPT), True)
    assert grant is not None
    row, identity = grant
    pair.producer.table.write(row, identity.record())
    at = pair.producer.table.address + row * pair.producer.geometry.row_bytes
    claim = Claim(identity, {(0, 0): at}, identity.proof([[3]]))
    started = time.monotonic()
    handle = pair.consumer.begin(claim, [3], [1])
    looks: list[float] = []
    while True:
        before = time.monotonic()
        state = pair.consumer.look(handle)
        looks.append(time.monotonic() - before)
        if state != "PROC":
            break
        time.sleep(0.005)
    pair.consumer.agent.release_xfer_handle(handle)
    assert pair.consumer.agent.outcomes.failed.pop("r").kind == "late"
    assert TIMEOUT_S <= time.monotonic() - started < 10 * TIMEOUT_S
    assert float(np.median(looks)) < 0.005, "a look must not hold the engine up"


def test_a_pull_whose_bytes_do_not_come_is_known_to_hang(pair: Pair) -> None:
    claim = pair.producer.prefill("a", PROMPT, [3])
    handle = pair.consumer.begin(claim, [3], [1])
    assert pair.consumer.agent.hanging(60.0) == set()
    assert pair.consumer.agent.hanging(-1.0) == {"engine"}
    assert pair.consumer.end(handle) == "DONE"
    assert pair.consumer.agent.hanging(-1.0) == set()


def test_a_request_fails_only_when_none_of_its_reads_is_on_its_way(pair: Pair) -> None:
    """With several ranks: its blocks are computed when no bytes can arrive in them any more."""
    good = pair.producer.prefill("a", PROMPT, [3])
    bad = replace(good, places={(0, 0): pair.producer.table.address + 4096})
    first, second = pair.consumer.begin(bad, [3], [1]), pair.consumer.begin(good, [3], [2])
    hold: Callable[[Any], str] = pair.consumer.agent._agent.check_xfer_state
    pair.consumer.agent._agent.check_xfer_state = lambda h: "PROC" if h is second else hold(h)
    try:
        assert [pair.consumer.look(first) for _ in range(3)] == ["PROC"] * 3
        assert pair.consumer.look(second) == "PROC"
    finally:
        pair.consumer.agent._agent.check_xfer_state = hold
    assert pair.consumer.end(second) == "DONE"
    assert pair.consumer.end(first) == "ERR"
    pair.consumer.agent.outcomes.failed.clear()

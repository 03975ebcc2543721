"""Pulls over real NIXL, proved: which blocks a decode engine uses, and which it refuses.

Two agents of one process stand for the two engines. Their memory is KV-shaped; the records, the
fingerprints and the agent that proves are those of the engines. The cases of vLLM's issue 52234,
in which a decode engine answered with another prompt's text or with garbage, are here by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace_engine.integrity.content import BlockSums, block_seeds
from headrace_engine.integrity.identity import Claim, Unproved, prompt_digest
from headrace_engine.integrity.proving import ProvingAgent, Pull
from headrace_engine.integrity.records import Geometry, Grants, RecordTable
from headrace_engine.integrity.settings import IntegritySettings, Sampling
from headrace_engine.quiet_nixl import event_driven

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 16, 2, 32, 16
TIMEOUT_S = 0.3
PROMPT, OTHER = list(range(100)), list(range(50, 150))


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return event_driven(nixl_agent(name, nixl_agent_config(num_threads=1, capture_telemetry=True)))


def _caches() -> dict[str, torch.Tensor]:
    shape = BLOCKS, HEADS, TOKENS, 2 * WIDTH
    return {f"layers.{n}": torch.zeros(shape, dtype=torch.bfloat16) for n in range(LAYERS)}


def _descriptors(caches: dict[str, torch.Tensor]) -> list[tuple[int, int, int]]:
    """Block by block of each layer, as vLLM numbers them."""
    each = next(iter(caches.values()))[0].nbytes
    return [(c.data_ptr() + b * each, each, 0) for c in caches.values() for b in range(BLOCKS)]


def digest(tokens: list[int]) -> bytes:
    return prompt_digest(b"model", "tenant", "", tokens)


@dataclass
class Producer:
    """A prefill engine's memory, records and rules; `restart` is a new one in its place."""

    agent: Any
    caches: dict[str, torch.Tensor] = field(default_factory=_caches)
    geometry: Geometry = field(default_factory=lambda: Geometry.of(1024, TOKENS))

    def __post_init__(self) -> None:
        self.table, self.sums = RecordTable(self.geometry), BlockSums(self.caches, BLOCKS)
        for cache in self.caches.values():
            self._register(cache.data_ptr(), cache.nbytes)
        self._register(self.table.address, self.geometry.nbytes)
        self.restart()

    def _register(self, address: int, size: int) -> None:
        self.agent.register_memory([(address, size, 0, "")], mem_type="DRAM")

    def restart(self, check: str = "off") -> None:
        settings = IntegritySettings(check=check)  # type: ignore[arg-type]
        incarnation = np.random.default_rng().bytes(16)
        self.grants = Grants(self.geometry.rows, incarnation, Sampling(settings))
        for row in range(self.geometry.rows):
            self.table.erase(row)

    def compute(self, tokens: list[int], blocks: list[int]) -> None:
        """KV that depends on the tokens, in these blocks."""
        made = torch.Generator().manual_seed(sum(tokens))
        for cache in self.caches.values():
            cache[blocks] = torch.randn((len(blocks), *cache.shape[1:]), generator=made).bfloat16()

    def prefill(
        self, request_id: str, tokens: list[int], blocks: list[int], *, demanded: bool = False
    ) -> Claim:
        """Compute a prompt, hand its blocks out: the reference, as a puller reads it."""
        grant = self.grants.begin(request_id, digest(tokens), len(tokens), demanded)
        assert grant is not None
        row, identity = grant
        self.table.write(row, identity.record())
        self.compute(tokens, blocks)
        if identity.checked:
            sums = self.sums.of(blocks, block_seeds(identity, range(len(blocks))))
            assert self.table.put_sums(row, identity.generation, sums)
        at = self.table.address + row * self.geometry.row_bytes
        return Claim(identity, {(0, 0): at}, identity.proof([blocks]))

    def free(self, request_id: str) -> None:
        """The lease ended, or the blocks were pulled."""
        row = self.grants.end(request_id)
        assert row is not None
        self.table.erase(row)

    def notes(self) -> list[bytes]:
        return [note for notes in self.agent.get_new_notifs().values() for note in notes]


class Consumer:
    """A decode engine's side."""

    def __init__(self, agent: Any, producer: Producer) -> None:
        self.caches, self.sums = _caches(), BlockSums(caches := _caches(), BLOCKS)
        self.caches = caches
        row_bytes = producer.geometry.row_bytes
        self.agent = ProvingAgent(agent, row_bytes, self, TIMEOUT_S)
        for cache in caches.values():
            agent.register_memory([(cache.data_ptr(), cache.nbytes, 0, "")], mem_type="DRAM")
        self.peer = agent.add_remote_agent(producer.agent.get_agent_metadata())
        self.local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(caches), "DRAM")
        self.remote = agent.prep_xfer_dlist(self.peer, _descriptors(producer.caches), "DRAM")

    def start(self, blocks: Any, positions: Any, claim: Claim) -> Any:
        return self.sums.start(blocks, block_seeds(claim.identity, positions))

    def begin(self, claim: Claim, theirs: list[int], ours: list[int], request_id: str = "r") -> Any:
        """Start to pull the last blocks of a prompt; the transfer's handle."""
        positions = range(len(theirs) - len(ours), len(theirs))
        places = Pull(request_id, self.peer, claim.places[0, 0], claim, ours, positions)

        def ids(blocks: list[int]) -> list[int]:
            return [layer * BLOCKS + block for layer in range(LAYERS) for block in blocks]

        with self.agent.pulling(places):
            handle = self.agent.make_prepped_xfer(
                *("READ", self.local, ids(ours), self.remote, ids(theirs[-len(ours) :])),
                notif_msg=b"pulled",
            )
        self.agent.transfer(handle)
        return handle

    def end(self, handle: Any) -> str:
        deadline = time.monotonic() + 10
        while (state := self.look(handle)) == "PROC":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.agent.release_xfer_handle(handle)
        return state

    def look(self, handle: Any) -> str:
        self.agent.new_step()
        return self.agent.check_xfer_state(handle)

    def pull(self, claim: Claim, theirs: list[int], ours: list[int]) -> str:
        """DONE, or the kind of what is wrong."""
        if self.end(self.begin(claim, theirs, ours)) == "DONE":
            return "DONE"
        return self.agent.outcomes.failed.pop("r").kind


@dataclass
class Pair:
    producer: Producer
    consumer: Consumer


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    producer = Producer(_agent("producer"))
    yield Pair(producer, Consumer(_agent("consumer"), producer))


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

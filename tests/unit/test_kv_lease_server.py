"""Leases on the owner's side: what is leased, to whom it is refused, and how a lease ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace_kvstore.blocks.checksum import payload_sums
from headrace_kvstore.node.dram_service import open_arena
from headrace_kvstore.peers import messages
from headrace_kvstore.peers.block_tags import TAG_BYTES, BlockTags
from headrace_kvstore.peers.lease_server import MAX_LEASED_SHARE, LeaseServer
from headrace_kvstore.peers.messages import (
    Failed,
    GetTags,
    HandshakeResponse,
    Lease,
    Leased,
    LeasedBlock,
    Release,
    Tags,
)
from headrace_kvstore.protocol.wire import EntryPage, WireError, encode
from tests.support.kvnode import DIGEST, SECRET, SHAPE, Engine, content, keys, settings
from tests.support.kvsums import forge

GENERATION = "g1"


class Below:
    """The NVMe tier and the prefetcher above it: brings blocks when told to."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.asked: list[tuple[list[bytes], Future[int]]] = []

    def contains(self, digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
        return np.array([h in self.held for h in hashes], np.bool_)

    def fetch(self, digest: bytes, hashes: Sequence[bytes], priority: int) -> Future[int]:
        self.asked.append((list(hashes), Future()))
        return self.asked[-1][1]


class Owner:
    """An arena with leases, and a clock that both share."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1000.0
        given = settings(folder, nvme_folder=None)
        self.engine = Engine(given)
        self.arena = open_arena(given)
        self.arena._clock = lambda: self.now_s
        self.engine.arena._clock = lambda: self.now_s
        self.below = Below()
        below: Any = self.below
        self.tags = BlockTags(SECRET, GENERATION)
        self.lease_server = LeaseServer(
            *(self.arena, GENERATION, self.tags, self.below.contains, below),
            lambda: self.now_s,
        )

    def ask(self, *numbers: int, lease_s: float = 10.0, **fields: Any) -> Any:
        request = {
            "generation": GENERATION,
            "digest": DIGEST,
            "layers": SHAPE.layers,
            "layer_bytes": SHAPE.layer_bytes,
        }
        return self.lease_server.lease(
            Lease(**(request | fields), hashes=keys(*numbers), lease_s=lease_s)
        )

    @property
    def leased(self) -> int:
        return sum(self.arena.table["lease_until_s"] > self.now_s)

    def close(self) -> None:
        self.engine.close()
        self.arena.unlink()
        self.arena.close()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.close()


def test_what_is_there_is_lent_with_addresses_sums_and_its_place_in_the_prefix(
    owner: Owner,
) -> None:
    owner.engine.put(0, 1, 3)
    leased = owner.ask(0, 1, 2, 3)
    assert [row.index for row in leased.rows] == [0, 1, 3]
    assert [row.depth for row in leased.rows] == [0, 1, 3]
    sums = np.frombuffer(leased.sums, "<u8").reshape(3, SHAPE.layers)
    for row, number, its in zip(leased.rows, (0, 1, 3), sums, strict=True):
        offset = row.address - owner.arena.base_address
        assert (owner.arena.memory[offset : offset + SHAPE.payload_bytes] == content(number)).all()
        at = row.address + np.arange(SHAPE.layers) * SHAPE.layer_bytes
        expected = payload_sums(DIGEST, keys(number)[0], 0, at, SHAPE.layer_bytes)
        assert (its == expected).all()
    assert owner.lease_server.serving() and owner.leased == 3
    assert owner.lease_server.stats()["absent"] == 1


def test_lent_blocks_are_not_evicted_and_released_ones_are(owner: Owner) -> None:
    owner.engine.put(0, 1)
    leased = owner.ask(0, 1)
    owner.now_s += 1
    owner.engine.put(*range(100, 160))
    assert owner.engine.has(0, 1) == [True, True]
    owner.lease_server.release(leased.lease, [])
    owner.lease_server.release(leased.lease, [])
    assert owner.leased == 0 and not owner.lease_server.serving()
    owner.now_s += 1
    owner.engine.put(*range(200, 260))
    assert owner.engine.has(0, 1) == [False, False]


def test_a_lease_that_nobody_ends_runs_out(owner: Owner) -> None:
    owner.engine.put(0)
    leased = owner.ask(0, lease_s=5.0)
    owner.now_s += 5.1
    assert not owner.lease_server.serving() and owner.leased == 0
    assert owner.lease_server.stats()["ran_out"] == 1
    again = owner.ask(0, lease_s=5.0)
    owner.lease_server.release(leased.lease, [])  # late: it must not end the other one
    assert owner.leased == 1
    owner.lease_server.release(again.lease, [])


@pytest.mark.parametrize(
    ("field", "value", "count"),
    [
        ("generation", "g0", "refused_generation"),
        ("layers", 5, "refused_shape"),
        ("layer_bytes", 64, "refused_shape"),
    ],
)
def test_a_reader_that_knows_another_arena_or_shape_is_refused(
    owner: Owner, field: str, value: Any, count: str
) -> None:
    owner.engine.put(0)
    assert isinstance(owner.ask(0, **{field: value}), Failed)
    assert owner.lease_server.stats()[count] == 1 and owner.leased == 0


def test_another_namespace_has_nothing(owner: Owner) -> None:
    owner.engine.put(0)
    assert owner.ask(0, digest=b"another-digest-!") == Leased()


def test_no_more_than_a_share_of_the_arena_is_lent(owner: Owner) -> None:
    owner.engine.put(*range(40))
    room = int(MAX_LEASED_SHARE * owner.arena.geometry.size_bytes) // SHAPE.payload_bytes
    first = owner.ask(*range(40))
    assert len(first.rows) == min(room, 40)
    assert owner.ask(*range(room, 40)).rows == []
    assert owner.lease_server.stats()["refused_full"] == 2 * (40 - room)
    owner.lease_server.release(first.lease, [])
    assert len(owner.ask(0).rows) == 1


def test_what_is_on_nvme_is_brought_to_dram_before_it_is_lent(owner: Owner) -> None:
    owner.engine.put(0)
    owner.below.held = set(keys(1, 2))
    answer = owner.ask(0, 1, 2, 5)
    assert isinstance(answer, Future) and not answer.done() and owner.leased == 0
    [(asked, done)] = owner.below.asked
    assert asked == keys(1, 2)
    owner.engine.put(1)
    done.set_result(1)
    assert [row.index for row in answer.result(0).rows] == [0, 1]


def test_a_block_that_is_wrong_here_too_is_dropped_and_a_right_one_stays(owner: Owner) -> None:
    owner.engine.put(0, 1)
    leased = owner.ask(0, 1)
    [slot] = owner.arena.lookup(owner.engine.row, keys(0))
    owner.arena.view(slot)[77] ^= 4
    owner.lease_server.release(leased.lease, [0, 1, 99, -1])
    assert owner.engine.has(0, 1) == [False, True]
    stats = owner.lease_server.stats()
    assert (stats["corrupt_here"], stats["corrupt_at_reader"]) == (1, 1)


def tags_of(owner: Owner, leased: Leased) -> list[bool]:
    """Whether each row's tag is right for the block's bytes."""
    answer = owner.lease_server.tags(leased.lease)
    assert isinstance(answer, Future)
    tags = answer.result(20).tags
    assert len(tags) == TAG_BYTES * len(leased.rows)
    each = [tags[TAG_BYTES * i : TAG_BYTES * (i + 1)] for i in range(len(leased.rows))]
    return [
        owner.tags.verify(tag, row.address, SHAPE.payload_bytes)
        for tag, row in zip(each, leased.rows, strict=True)
    ]


def test_a_tag_is_of_the_bytes_that_were_stored_and_stays_when_they_change(owner: Owner) -> None:
    owner.engine.put(0, 1, 2)
    [slot] = owner.arena.lookup(owner.engine.row, keys(1))
    owner.arena.view(slot)[5] ^= 1
    leased = owner.ask(0, 1, 2)
    assert tags_of(owner, leased) == [True, False, True]
    forge(owner.arena.view(owner.arena.lookup(owner.engine.row, keys(2))[0]))
    assert tags_of(owner, leased) == [True, False, False]
    owner.lease_server.release(leased.lease, [2])
    assert owner.engine.has(0) == [True] and not owner.lease_server.stats().get("corrupt_at_reader")
    assert owner.arena.lookup(owner.engine.row, keys(2))[0] < 0


def test_a_slot_s_next_block_gets_a_tag_of_its_own(owner: Owner) -> None:
    owner.engine.put(0)
    first = owner.ask(0)
    assert tags_of(owner, first) == [True]
    owner.arena.discard(owner.engine.row, keys(0))
    owner.engine.put(1)
    second = owner.ask(1)
    assert first.rows[0].address == second.rows[0].address
    assert tags_of(owner, second) == [True]
    assert owner.lease_server.tags(99) == Failed("lease")


def test_closing_ends_all_leases(owner: Owner) -> None:
    owner.engine.put(0, 1)
    owner.ask(0)
    owner.ask(0, 1)
    owner.lease_server.close()
    assert owner.leased == 0


numbers = st.lists(st.integers(0, 7), max_size=4, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), numbers, st.sampled_from([1.0, 5.0])),
        st.tuples(st.just("release"), st.integers(0, 5), st.just(0.0)),
        st.tuples(st.just("wait"), st.just(0), st.sampled_from([0.5, 2.0])),
    ),
    max_size=25,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    owner = Owner(tmp_path_factory.mktemp("lease"))
    owner.engine.put(*range(6))
    yield owner
    owner.close()


@hypothesis_settings(max_examples=100)
@given(steps)
def test_a_block_is_held_exactly_while_some_lease_on_it_lasts(
    shared: Owner, script: list[tuple[str, Any, float]]
) -> None:
    shared.now_s += 100.0
    out: list[tuple[int, set[int], float]] = []
    for step, what, seconds in script:
        if step == "lease":
            leased = shared.ask(*what, lease_s=seconds)
            got = {what[row.index] for row in leased.rows}
            assert got == {n for n in what if n < 6}
            if got:
                out.append((leased.lease, got, shared.now_s + seconds))
        elif step == "release" and what < len(out):
            shared.lease_server.release(out.pop(what)[0], [])
        elif step == "wait":
            shared.now_s += seconds
        out = [each for each in out if each[2] > shared.now_s]
        held = set().union(*(blocks for _, blocks, _ in out))
        slots = shared.arena.lookup(shared.engine.row, keys(*range(6)))
        until_s = shared.arena.table["lease_until_s"][slots]
        # The arena ends a block's leases together, with the last one's: never too early.
        assert held <= set(np.flatnonzero(until_s > shared.now_s).tolist())
        assert shared.lease_server.serving() == bool(out)
        assert shared.lease_server.stats()["leases"] == len(out)
    shared.now_s += 100.0
    assert not shared.lease_server.serving() and shared.leased == 0


# Messages


@pytest.mark.parametrize(
    "request_",
    [
        messages.HandshakeRequest(),
        messages.PollRequest("b", 7, 9, 2**20),
        Lease("g", DIGEST, 4, 64, keys(0, 1), 3.0),
        Release(4, [1, 2]),
        GetTags(4),
    ],
)
def test_requests_come_out_as_they_went_in(request_: Any) -> None:
    assert messages.decode_request(encode(3, request_)) == (3, request_)


@pytest.mark.parametrize(
    "reply",
    [
        HandshakeResponse("g", b"\0\1"),
        messages.PollResponse("g", EntryPage("b", 1, 2, []), 3, [b"batch"], 4),
        Leased(1, [LeasedBlock(0, 2**47, 2**64 - 1, 1, 2, 0.5)], b"12345678"),
        Tags(bytes(2 * TAG_BYTES)),
        Failed("no"),
    ],
)
def test_replies_come_out_as_they_went_in(reply: Any) -> None:
    assert messages.decode_reply(encode(3, reply)) == (3, reply)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        encode(3, Lease("g", b"short", 4, 64, [], 3.0)),
        encode(3, Lease("g", DIGEST, 4, 64, [b""], 3.0)),
        encode(3, Lease("g", DIGEST, 4, 64, [], -1.0)),
        encode(3, Lease("g" * 65, DIGEST, 4, 64, [], 1.0)),
        encode(3, Lease("g", DIGEST, 4, 64, [b"h"] * (messages.MAX_BLOCKS + 1), 1.0)),
        encode(3, Release(1, [0] * (messages.MAX_BLOCKS + 1))),
        encode(3, Release(1, [-1])),
        encode(3, messages.PollRequest("b", 0, 0, messages.MAX_POLL_BYTES + 1)),
        encode(3, Failed("a reply is no request")),
    ],
)
def test_what_cannot_be_meant_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        messages.decode_request(frame)


def test_an_engine_s_requests_are_not_heard_from_peers() -> None:
    from headrace_kvstore.protocol import wire

    for request in (wire.GetStats(),):
        with pytest.raises(WireError):
            messages.decode_request(encode(1, request))

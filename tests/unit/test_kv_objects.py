"""The object tier: what an object is, what the tier finds, reads, writes, and does without."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from headrace_kvstore.node.object_work import worth_sharing
from headrace_kvstore.nvme.record import Block, Shape
from headrace_kvstore.objects.object_catalog import Bundle, Place
from headrace_kvstore.objects.object_client import ObjectError, StoreClient
from headrace_kvstore.objects.object_format import (
    MAX_BLOCKS,
    ObjectName,
    most_blocks,
    pack_headers,
    unpack_headers,
)
from headrace_kvstore.objects.object_read import plan_runs
from headrace_kvstore.objects.object_tier import ObjectTier
from headrace_kvstore.table import SLOT
from tests.support.kvnode import DIGEST, SHAPE, key, until
from tests.support.kvobjects import Blocks, FakeStore, Heard, has, tiers

Begin = Callable[..., ObjectTier]
NAME = ObjectName(SHAPE, "cluster-a", "0123456789abcdef", 3)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def begin(store: FakeStore) -> Iterator[Begin]:
    with tiers(store) as made:
        yield made


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


# What is worth an object


@pytest.mark.parametrize(
    ("field", "value", "worth"),
    [
        ("hits", 0, False),
        ("hits", 1, True),
        ("pinned", 1, True),
        ("priority", 1, True),
        ("priority", -1, False),
    ],
)
def test_a_block_is_shared_once_it_was_used_again_or_somebody_wants_to_keep_it(
    field: str, value: int, worth: bool
) -> None:
    rows = np.zeros(1, SLOT)
    rows[field] = value
    assert worth_sharing(rows).tolist() == [worth]


# Names and headers


def test_a_name_tells_namespace_shape_count_and_size() -> None:
    assert ObjectName.parse(str(NAME)) == NAME
    assert NAME.size_bytes == 3 * (SHAPE.payload_bytes + SHAPE.header_bytes)
    assert NAME.payload_offset(2) == 2 * SHAPE.payload_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "README.md",
        str(NAME).upper(),
        str(NAME) + "/x",
        str(NAME).replace(".3x", ".0x"),
        str(NAME).replace(".3x", ".03x"),
        str(NAME).replace(".3x", f".{MAX_BLOCKS + 1}x"),
        str(NAME).replace("x4x", "x99999999x"),
        str(NAME).replace(DIGEST.hex(), "00"),
        str(NAME).replace("cluster-a", "cluster/a"),
    ],
)
def test_a_name_that_nobody_here_gives_is_none(text: str) -> None:
    assert ObjectName.parse(text) is None


def test_headers_come_back_and_a_damaged_one_takes_only_its_block_with_it() -> None:
    made = [Block(key(n), sums=np.full(4, n, np.uint64)) for n in range(3)]
    data = bytearray(pack_headers(SHAPE, made))
    assert unpack_headers(NAME, bytes(data)) == made
    data[SHAPE.header_bytes + 40] ^= 1
    assert unpack_headers(NAME, bytes(data)) == [made[0], None, made[2]]
    assert unpack_headers(NAME, bytes(data[:-4096])) == [made[0], None, None]


def test_an_object_holds_at_least_one_block_and_no_more_than_its_size_asks() -> None:
    each = SHAPE.payload_bytes + SHAPE.header_bytes
    assert most_blocks(SHAPE, 1) == 1
    assert most_blocks(SHAPE, 5 * each) == 5
    assert most_blocks(SHAPE, 2**60) == MAX_BLOCKS
    assert most_blocks(Shape(DIGEST, 2_000_000, 1), 2**60) == 1


def test_neighbours_in_one_object_come_with_one_request() -> None:
    first = Bundle(ObjectName(SHAPE, "a", "0" * 16, 4), [None] * 4, 0.0)
    other = Bundle(ObjectName(SHAPE, "a", "1" * 16, 4), [None] * 4, 0.0)
    places = [Place(first, 2), Place(other, 3), Place(first, 1), Place(first, 0), Place(other, 1)]
    two = 2 * SHAPE.payload_bytes
    assert plan_runs(places, 2**30) == [[3, 2, 0], [4], [1]]
    assert plan_runs(places, two) == [[3, 2], [0], [4], [1]]
    assert plan_runs(places, 1) == [[3], [2], [0], [4], [1]]


# What the tier finds


def test_blocks_written_are_found_and_read_back(begin: Begin, blocks: Blocks) -> None:
    tier = begin()
    assert blocks.write(tier, 0, 1, 2)
    assert has(tier, 0, 1, 2, 3) == [True, True, True, False]
    assert blocks.load(tier, 2, 0, 1, 3) == [True, True, True, False]


def test_another_tier_finds_at_its_start_and_later_what_the_first_wrote(
    begin: Begin, blocks: Blocks
) -> None:
    first = begin("a")
    blocks.write(first, 0, 1)
    second = begin("b")
    assert blocks.load(second, 0, 1) == [True, True]
    blocks.write(first, 2)
    until(lambda: has(second, 2) == [True])
    assert blocks.load(second, 2) == [True]
    place = second.find(DIGEST, key(2))
    assert place is not None
    assert (place.block.depth, place.block.parent, place.block.compute_s) == (2, key(1), 0.5)


def test_what_somebody_removed_is_forgotten_and_told(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    heard = Heard()
    tier = begin(events=[heard])
    blocks.write(tier, 0, 1)
    store.objects.clear()
    until(lambda: has(tier, 0, 1) == [False, False])
    assert heard == [
        (True, key(0), "written"),
        (True, key(1), "written"),
        (False, key(0), "gone"),
        (False, key(1), "gone"),
    ]


def test_a_block_in_two_objects_is_gone_with_the_last(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    heard = Heard()
    first, second = begin("a", refresh_s=60), begin("b", refresh_s=60)
    assert blocks.write(first, 0) and blocks.write(second, 0)
    assert len(store.objects) == 2
    reader = begin("c", events=[heard])
    store.objects.popitem()
    until(lambda: reader.stats()["objects"] == 1)
    assert blocks.load(reader, 0) == [True]
    store.objects.clear()
    until(lambda: has(reader, 0) == [False])
    assert heard == [(True, key(0), "found"), (False, key(0), "gone")]


def test_what_is_here_is_not_written_again(begin: Begin, blocks: Blocks, store: FakeStore) -> None:
    tier = begin()
    blocks.write(tier, 0, 1)
    assert not blocks.write(tier, 0, 1)
    blocks.write(tier, 1, 2)
    assert sorted(name.count for name in store.names()) == [1, 2]


def test_foreign_objects_and_those_of_another_size_are_left_alone(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    store.objects["notes.txt"] = b"hello"
    store.objects[str(NAME)] = b"x"
    tier = begin()
    blocks.write(tier, 0)
    until(lambda: tier.stats()["lists"] > 2)
    assert tier.stats()["ignored"] == {"foreign": 1, "truncated": 1}
    assert not [name for name, _, _ in store.gets if name in ("notes.txt", str(NAME))]


def test_memory_that_changes_before_it_is_copied_is_not_written(
    begin: Begin, blocks: Blocks
) -> None:
    tier = begin()
    saves = blocks.saves(0, 1, 2)
    blocks.memory[0, 1, 77] ^= 1
    assert tier.write(SHAPE, saves)
    assert has(tier, 0, 1, 2) == [True, False, True]
    assert blocks.load(tier, 0, 2) == [True, True]
    assert tier.stats()["writes_overwritten"] == 1


# Room


def test_the_objects_unused_longest_make_room_and_others_objects_stay(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    each = SHAPE.payload_bytes + SHAPE.header_bytes
    heard = Heard()
    blocks.write(begin("other", refresh_s=60), 9)
    tier = begin("mine", 2 * each, events=[heard])
    assert blocks.write(tier, 0) and blocks.write(tier, 1)
    assert blocks.load(tier, 0) == [True]
    assert blocks.write(tier, 2)
    assert has(tier, 0, 1, 2, 9) == [True, False, True, True]
    assert (False, key(1), "evicted") in heard
    assert sum(n.size_bytes for n in store.names() if n.writer == "mine") == 2 * each


def test_a_pinned_block_keeps_its_object_and_what_finds_no_room_is_not_written(
    begin: Begin, blocks: Blocks
) -> None:
    each = SHAPE.payload_bytes + SHAPE.header_bytes
    tier = begin("w", each)
    assert blocks.write(tier, 0)
    assert tier.pin(DIGEST, key(0)) and not tier.pin(DIGEST, key(5))
    assert not blocks.write(tier, 1)
    assert tier.stats()["writes_full"] == 1
    tier.pin(DIGEST, key(0), False)
    assert blocks.write(tier, 1)
    assert has(tier, 0, 1) == [False, True]


def test_a_restart_with_less_room_removes_the_oldest(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    tier = begin(refresh_s=60)
    for number in range(4):
        blocks.write(tier, number)
        place = tier.find(DIGEST, key(number))
        assert place is not None
        store.modified[str(place.bundle.name)] = 1000.0 + number
    tier.close()
    each = SHAPE.payload_bytes + SHAPE.header_bytes
    again = begin("w", 2 * each)
    assert has(again, 0, 1, 2, 3) == [False, False, True, True]


def test_clear_removes_what_is_ours(begin: Begin, blocks: Blocks, store: FakeStore) -> None:
    blocks.write(begin("other", refresh_s=60), 9)
    tier = begin("mine")
    blocks.write(tier, 0, 1)
    assert tier.clear(b"another namespace"[:16]) == 0
    assert tier.clear(DIGEST) == 2
    assert has(tier, 0, 1, 9) == [False, False, True]
    assert [name.writer for name in store.names()] == ["other"]


# Damage


def test_a_flipped_bit_anywhere_is_a_miss_and_the_block_is_not_offered_again(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    heard = Heard()
    tier = begin(events=[heard])
    blocks.write(tier, 0, 1, 2)
    (name,) = store.objects
    store.flip(name, SHAPE.payload_bytes + 3 * SHAPE.layer_bytes + 11)
    assert blocks.load(tier, 0, 1, 2) == [True, False, True]
    assert heard[-1] == (False, key(1), "corrupt")
    until(lambda: tier.stats()["lists"] > 3)
    assert has(tier, 0, 1, 2) == [True, False, True]
    assert blocks.write(tier, 1)
    assert blocks.load(tier, 0, 1, 2) == [True, True, True]


def test_a_flipped_bit_in_a_header_costs_its_block(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    blocks.write(begin("a", refresh_s=60), 0, 1)
    (name,) = store.objects
    store.flip(name, 2 * SHAPE.payload_bytes + SHAPE.header_bytes + 60)
    reader = begin("b")
    assert has(reader, 0, 1) == [True, False]
    assert reader.stats()["headers_bad"] == 1


@pytest.mark.parametrize("kept", [0, 100, SHAPE.payload_bytes, 2 * SHAPE.payload_bytes + 50])
def test_an_object_cut_short_is_never_offered_at_the_start_and_missed_later(
    begin: Begin, blocks: Blocks, store: FakeStore, kept: int
) -> None:
    tier = begin(refresh_s=60)
    blocks.write(tier, 0, 1)
    (name,) = store.objects
    store.objects[name] = store.objects[name][:kept]
    whole = kept // SHAPE.payload_bytes
    assert blocks.load(tier, 1) == [whole > 1]
    assert has(begin("late"), 0, 1) == [False, False]


def test_an_object_that_is_gone_in_the_middle_is_a_miss(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    tier = begin(refresh_s=60)
    blocks.write(tier, 0, 1)
    store.objects.clear()
    assert blocks.load(tier, 0) == [False]
    assert has(tier, 0, 1) == [False, False]
    assert tier.stats()["reads_absent"] == 1
    assert tier.may_read


# Endpoints


def test_read_only_credentials_still_read(begin: Begin, blocks: Blocks, store: FakeStore) -> None:
    blocks.write(begin("a", refresh_s=60), 0)
    store.fails = {"put": "denied", "delete": "denied"}
    tier = begin("b")
    for _ in range(3):
        assert not blocks.write(tier, 1)
    assert tier.stats()["writes_denied"] == 3
    assert tier.stats()["writing"] == "off"
    assert blocks.load(tier, 0) == [True]
    assert tier.stats()["state"] == "on"


@pytest.mark.parametrize("reason", ["denied", "timeout", "unreachable", "failed"])
def test_an_endpoint_that_fails_is_left_alone_and_used_again_once_it_works(
    begin: Begin, blocks: Blocks, store: FakeStore, reason: str
) -> None:
    tier = begin()
    blocks.write(tier, 0, 1)
    store.fails = {"get": reason, "list": reason}
    until(lambda: blocks.load(tier, 0) == [False] and not tier.may_read)
    stats = tier.stats()
    assert stats["state"] == "off" and stats["last_error"] == reason
    assert has(tier, 0, 1) == [True, True]
    store.fails = {}
    until(lambda: blocks.load(tier, 0, 1) == [True, True])
    assert tier.stats()["state"] == "on"


def test_a_dead_endpoint_at_the_start_is_waited_for(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    blocks.write(begin("a", refresh_s=60), 0)
    store.fails = {"list": "unreachable"}
    tier = begin("b", wait=False)
    until(lambda: tier.stats()["breaker_opened"] > 0)
    assert has(tier, 0) == [False]
    store.fails = {}
    until(lambda: has(tier, 0) == [True])


def test_a_read_that_hangs_is_given_up_and_never_touches_the_memory_later(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    tier = begin(refresh_s=60, timeout_s=0.05)
    blocks.write(tier, 0)
    store.gate.clear()
    assert blocks.load(tier, 0) == [False]
    assert tier.stats()["reads_given_up"] == 1
    before = blocks.memory[1].copy()
    store.gate.set()
    until(lambda: len(store.gets) == 1)
    assert blocks.load(tier, 5) == [False]
    assert (blocks.memory[1] == before).all()


def test_a_tier_closes_while_a_read_hangs(begin: Begin, blocks: Blocks, store: FakeStore) -> None:
    tier = begin(refresh_s=60, timeout_s=60.0)
    blocks.write(tier, 0)
    store.gate.clear()
    place = tier.find(DIGEST, key(0))
    assert place is not None
    read = tier.read([place], blocks._addresses(1, 1))
    told = threading.Event()
    read.when_done(told.set)
    assert tier.close(0.2)
    assert told.is_set() and read.wait(0.0).tolist() == [False]
    store.gate.set()


# The client


@pytest.mark.parametrize("url", ["memory:///", "file://{folder}/store"])
def test_the_client_names_what_is_missing(url: str, tmp_path: object) -> None:
    client = StoreClient(url.format(folder=tmp_path), {}, 2.0)
    assert list(client.list()) == []
    client.put("a/b", memoryview(b"0123456789"))
    assert bytes(client.get("a/b", 8, 100)) == b"89"
    assert [(each.name, each.size_bytes) for each in client.list()] == [("a/b", 10)]
    for name, offset in (("a/c", 0), ("a/b", 20)):
        with pytest.raises(ObjectError) as raised:
            client.get(name, offset, 1)
        assert raised.value.reason == "absent"
    client.delete(["a/b", "a/c"])
    assert list(client.list()) == []


@pytest.mark.parametrize(
    ("url", "options"), [("foo://x", {}), ("bucket", {}), ("s3://b", {"colour": "red"})]
)
def test_what_the_client_does_not_know_is_said(url: str, options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=url):
        StoreClient(url, options, 1.0)

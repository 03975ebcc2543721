"""The object tier: what an object is, what the tier finds, reads, writes, and does without."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from headrace_kvstore.blocks.slot_record import PINNED, SLOT
from headrace_kvstore.node.object_service import is_worth_sharing
from headrace_kvstore.objects.object_client import Listed, ObjectError, StoreClient
from headrace_kvstore.objects.object_format import ObjectName
from headrace_kvstore.objects.object_tier import ObjectTier
from tests.support.kvnode import DIGEST, SHAPE, key, until
from tests.support.kvobjects import Blocks, FakeStore, has

Begin = Callable[..., ObjectTier]
NAME = ObjectName(SHAPE, key(3), "cluster-a", 2**64 - 1, 3, 7, 0.5)
EACH = NAME.size_bytes


# What is worth an object


@pytest.mark.parametrize(
    ("field", "value", "worth"),
    [
        ("hits", 0, False),
        ("hits", 1, True),
        ("kept_until_s", PINNED, True),
        ("kept_until_s", 1e9, False),
    ],
)
def test_a_block_is_shared_once_it_was_used_again_or_somebody_wants_to_keep_it(
    field: str, value: int, worth: bool
) -> None:
    rows = np.zeros(1, SLOT)
    rows[field] = value
    assert is_worth_sharing(rows).tolist() == [worth]


# Names and bytes


def test_a_name_tells_all_of_a_block_but_its_bytes() -> None:
    assert ObjectName.parse(str(NAME)) == NAME
    assert NAME.size_bytes == SHAPE.payload_bytes + 8 * SHAPE.layers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "README.md",
        str(NAME).upper(),
        str(NAME) + "/x",
        str(NAME).replace(".cluster", "00.cluster"),
        str(NAME).replace(DIGEST.hex(), "00"),
        str(NAME).replace("cluster-a", "cluster/a"),
        str(NAME).replace("cluster-a", "a" * 65),
        str(replace(NAME, compute_s=math.nan)),
        str(replace(NAME, compute_s=math.inf)),
        str(replace(NAME, compute_s=-1.0)),
        str(NAME).replace(".04000000", ".00000000"),
        str(NAME).replace(".04000000", ".ffffffff"),
    ],
)
def test_a_name_that_nobody_here_gives_is_none(text: str) -> None:
    assert ObjectName.parse(text) is None


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
    held = second.find(DIGEST, key(2))
    assert held is not None
    parent = int.from_bytes(key(1)[:8], "little")
    assert (held.name.depth, held.name.parent, held.name.compute_s) == (2, parent, 0.5)


def test_what_somebody_removed_is_forgotten(begin: Begin, blocks: Blocks, store: FakeStore) -> None:
    tier = begin()
    blocks.write(tier, 0, 1)
    store.objects.clear()
    until(lambda: has(tier, 0, 1) == [False, False])


def test_what_was_removed_while_the_store_was_listed_stays_forgotten(
    begin: Begin, blocks: Blocks, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = begin(size_bytes=2 * EACH, refresh_s=60.0)
    assert blocks.write(tier, 0, 1)
    listed = list(store.list())

    def slow_list(after: str = "") -> Iterator[Listed]:
        assert blocks.write(tier, 2)
        yield from listed

    monkeypatch.setattr(store, "list", slow_list)
    assert tier.refresh()
    assert has(tier, 0, 1, 2) == [False, True, True]


def test_a_block_in_two_objects_is_gone_with_the_last(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    first, second = begin("a", refresh_s=60), begin("b", refresh_s=60)
    assert blocks.write(first, 0) and blocks.write(second, 0)
    assert len(store.objects) == 2
    reader = begin("c")
    store.objects.popitem()
    until(lambda: reader.stats()["objects"] == 1)
    assert blocks.load(reader, 0) == [True]
    store.objects.clear()
    until(lambda: has(reader, 0) == [False])


def test_what_is_here_is_not_written_again(begin: Begin, blocks: Blocks, store: FakeStore) -> None:
    tier = begin()
    blocks.write(tier, 0, 1)
    assert not blocks.write(tier, 0, 1)
    blocks.write(tier, 1, 2)
    assert store.puts == len(store.objects) == 3


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
    assert tier.put(tier.pack(SHAPE, saves)) == 2
    assert has(tier, 0, 1, 2) == [True, False, True]
    assert blocks.load(tier, 0, 2) == [True, True]
    assert tier.stats()["writes_overwritten"] == 1


# Room


def test_the_objects_unused_longest_make_room_and_others_objects_stay(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    blocks.write(begin("other", refresh_s=60), 9)
    tier = begin("mine", 2 * EACH)
    assert blocks.write(tier, 0) and blocks.write(tier, 1)
    assert blocks.load(tier, 0) == [True]
    assert blocks.write(tier, 2)
    assert has(tier, 0, 1, 2, 9) == [True, False, True, True]
    assert sum(n.size_bytes for n in store.names() if n.writer == "mine") == 2 * EACH


def test_what_finds_no_room_is_not_written_and_nothing_is_removed_for_it(
    begin: Begin, blocks: Blocks
) -> None:
    tier = begin("w", EACH)
    assert blocks.write(tier, 0)
    assert not blocks.write(tier, 1, 2)
    assert tier.stats()["writes_full"] == 2
    assert has(tier, 0, 1, 2) == [True, False, False]


def test_a_restart_with_less_room_removes_the_oldest(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    tier = begin(refresh_s=60)
    for number in range(4):
        blocks.write(tier, number)
        held = tier.find(DIGEST, key(number))
        assert held is not None
        store.modified[held.text] = 1000.0 + number
    tier.close()
    again = begin("w", 2 * EACH)
    assert has(again, 0, 1, 2, 3) == [False, False, True, True]


# Damage


def name_of(store: FakeStore, number: int) -> str:
    """The only object that holds a block."""
    (name,) = (str(each) for each in store.names() if each.hash == key(number))
    return name


@pytest.mark.parametrize("at", [3, 8 * SHAPE.layers + 3 * SHAPE.layer_bytes + 11, EACH - 1])
def test_a_flipped_bit_anywhere_is_a_miss_and_the_block_is_not_offered_until_written_anew(
    begin: Begin, blocks: Blocks, store: FakeStore, at: int
) -> None:
    tier = begin()
    blocks.write(tier, 0, 1, 2)
    store.flip(name_of(store, 1), at)
    assert blocks.load(tier, 0, 1, 2) == [True, False, True]
    assert tier.stats()["reads_corrupt"] == 1
    lists = tier.stats()["lists"]
    store.modified[name_of(store, 1)] = 5.0
    until(lambda: tier.stats()["lists"] > lists + 2)
    assert has(tier, 0, 1, 2) == [True, False, True]
    assert blocks.write(tier, 1)
    assert blocks.load(tier, 0, 1, 2) == [True, True, True]


def test_a_block_that_somebody_else_wrote_anew_is_offered_again(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    tier = begin()
    blocks.write(tier, 0)
    name = name_of(store, 0)
    whole, store.modified[name] = store.objects[name], 5.0
    store.flip(name, 100)
    assert blocks.load(tier, 0) == [False]
    lists = tier.stats()["lists"]
    until(lambda: tier.stats()["lists"] > lists + 2)
    assert tier.stats()["ignored"] == {"corrupt": 1}
    store.objects[name], store.modified[name] = whole, 6.0
    until(lambda: has(tier, 0) == [True])
    assert blocks.load(tier, 0) == [True]


@pytest.mark.parametrize("kept", [0, 100, EACH - 1])
def test_an_object_cut_short_is_never_offered_at_the_start_and_missed_later(
    begin: Begin, blocks: Blocks, store: FakeStore, kept: int
) -> None:
    tier = begin(refresh_s=60)
    blocks.write(tier, 0, 1)
    name = name_of(store, 1)
    store.objects[name] = store.objects[name][:kept]
    assert blocks.load(tier, 0, 1) == [True, False]
    assert has(tier, 0, 1) == [True, False]
    assert has(begin("late"), 0, 1) == [True, False]


def test_an_object_that_is_gone_in_the_middle_is_a_miss(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    tier = begin(refresh_s=60)
    blocks.write(tier, 0, 1)
    store.objects.clear()
    assert blocks.load(tier, 0) == [False]
    assert has(tier, 0, 1) == [False, True]
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
    before = blocks.memory[1].copy()
    store.gate.set()
    until(lambda: len(store.gets) == 1)
    assert blocks.load(tier, 5) == [False]
    assert (blocks.memory[1] == before).all()


def test_a_tier_closes_while_a_read_hangs(begin: Begin, blocks: Blocks, store: FakeStore) -> None:
    tier = begin(refresh_s=60, timeout_s=60.0)
    blocks.write(tier, 0)
    store.gate.clear()
    held = tier.find(DIGEST, key(0))
    assert held is not None
    read = tier.read([held], blocks._addresses(1, 1), blocks.sums(1))
    waiting = threading.Thread(target=read.wait)
    waiting.start()
    read.abort()
    waiting.join(20)
    assert not waiting.is_alive() and read.wait().tolist() == [False]
    tier.close(0.2)
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
    client.put("ab/c", memoryview(b"1"))
    assert [each.name for each in client.list(prefix="a")] == ["a/b"]
    client.delete(["a/b", "a/c", "ab/c"])
    assert list(client.list()) == []
    client.delete(["a/c"])


@pytest.mark.parametrize(
    ("url", "options"), [("foo://x", {}), ("bucket", {}), ("s3://b", {"colour": "red"})]
)
def test_what_the_client_does_not_know_is_said(url: str, options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=url):
        StoreClient(url, options, 1.0)

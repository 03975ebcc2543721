"""The object tier with more objects in the store than it knows at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from headrace_kvstore.objects import object_tier
from headrace_kvstore.objects.object_client import Listed, ObjectError
from headrace_kvstore.objects.object_format import ObjectName
from headrace_kvstore.objects.object_tier import ObjectTier
from headrace_kvstore.objects.object_walk import AGE_S
from tests.support.kvnode import SHAPE, key, until
from tests.support.kvobjects import Blocks, FakeStore, has

Begin = Callable[..., ObjectTier]
EACH = ObjectName(SHAPE, key(0), "w").size_bytes


@pytest.fixture
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three objects are known at once, and two names are looked at in one batch."""
    monkeypatch.setattr(object_tier, "INDEX_BLOCKS", 3)
    monkeypatch.setattr(object_tier, "BATCH_OBJECTS", 2)
    monkeypatch.setattr(object_tier, "LIST_OBJECTS", 4)


def filled(store: FakeStore, count: int, writer: str = "w") -> dict[int, str]:
    """Objects of blocks, the one of block 0 the oldest; names by block."""
    names = {n: str(ObjectName(SHAPE, key(n), writer)) for n in range(count)}
    for number, name in names.items():
        store.objects[name] = bytes(EACH)
        store.modified[name] = time.time() - AGE_S * 10 * (count - number)
    return names


def own_bytes(store: FakeStore, writer: str = "w") -> int:
    return sum(name.size_bytes for name in store.names() if name.writer == writer)


@pytest.mark.usefixtures("small_index")
def test_the_limit_holds_though_most_own_objects_are_not_known(
    begin: Begin, store: FakeStore
) -> None:
    filled(store, 40)
    tier = begin("w", 20 * EACH, refresh_s=0.01)
    until(lambda: own_bytes(store) <= 20 * EACH)
    assert own_bytes(store) >= 19 * EACH, "more was removed than had to be"
    left = {name.hash for name in store.names()}
    assert left == {key(n) for n in range(40 - len(left), 40)}, "others than the oldest went"
    until(lambda: tier.stats()["bytes"] == own_bytes(store))
    assert tier.stats()["objects"] == len(left)
    assert has(tier, 39, 38, 37, 36) == [True, True, True, False]


@pytest.mark.usefixtures("small_index")
def test_what_is_written_counts_against_the_limit_with_what_is_not_known(
    begin: Begin, blocks: Blocks, store: FakeStore
) -> None:
    filled(store, 16)
    tier = begin("w", 20 * EACH, refresh_s=0.01)
    for number in range(100, 140):
        blocks.write(tier, number)
        assert own_bytes(store) <= 20 * EACH
    until(lambda: bool(blocks.write(tier, 200)))
    assert has(tier, 200) == [True] and own_bytes(store) <= 20 * EACH


@pytest.mark.usefixtures("small_index")
def test_what_was_not_listed_yet_is_not_forgotten(begin: Begin, store: FakeStore) -> None:
    filled(store, 40)
    tier = begin("w", 100 * EACH, refresh_s=3600)
    known = {text for text in tier.catalog.objects}
    for _ in range(20):  # two walks, four names at a time
        assert tier.refresh()
        assert set(tier.catalog.objects) == known
    assert "writes_full" not in tier.stats() and own_bytes(store) == 40 * EACH


@pytest.mark.usefixtures("small_index")
def test_one_refresh_looks_at_so_many_names_and_a_whole_walk_finds_what_is_gone(
    begin: Begin, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = filled(store, 40)
    tier = begin("reader", refresh_s=3600)
    looked: list[str] = []
    listing = store.list

    def counted(after: str = "") -> Iterator[Listed]:
        for each in listing(after):
            looked.append(each.name)
            yield each

    monkeypatch.setattr(store, "list", counted)
    del store.objects[names[39]]
    turns = 0
    while has(tier, 39) == [True]:
        assert tier.refresh()
        turns += 1
        assert len(looked) <= 4 * turns
    assert turns == 10 and len(looked) == len(set(looked)) == 39
    assert has(tier, 38, 37) == [True, True]


@pytest.mark.usefixtures("small_index")
def test_a_listing_that_fails_goes_on_where_it_stopped(
    begin: Begin, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(store, 40)
    tier = begin("reader", refresh_s=3600)
    starts: list[str] = []
    listing = store.list

    def cut(after: str = "") -> Iterator[Listed]:
        starts.append(after)
        for count, each in enumerate(listing(after)):
            if count == 3:
                raise ObjectError("timeout")
            yield each

    monkeypatch.setattr(store, "list", cut)
    tier.refresh()
    until(lambda: tier.refresh() and tier._listing is None)
    assert starts == sorted(starts) and len(set(starts)) >= 10, "it began from the start again"


@pytest.mark.usefixtures("small_index")
def test_with_read_only_credentials_nothing_is_hurried(begin: Begin, store: FakeStore) -> None:
    filled(store, 40)
    store.fails = {"delete": "denied"}
    tier = begin("w", 20 * EACH, refresh_s=3600)
    until(lambda: tier.stats().get("deletes_denied", 0) > 0)
    time.sleep(0.1)
    lists = tier.stats()["lists"]
    time.sleep(0.2)
    assert tier.stats()["lists"] == lists and own_bytes(store) == 40 * EACH


@pytest.mark.usefixtures("small_index")
def test_the_objects_used_stay_known(begin: Begin, blocks: Blocks, store: FakeStore) -> None:
    writer = begin("other", refresh_s=3600)
    assert blocks.write(writer, 0, 1, 2)
    for held in list(writer.catalog.objects.values()):
        store.modified[held.text] = time.time() - 1e6
    tier = begin("w", refresh_s=3600)
    assert blocks.load(tier, 1) == [True]
    assert blocks.write(tier, 5) and blocks.write(tier, 6)
    assert has(tier, 0, 1, 2, 5, 6) == [False, True, False, True, True]

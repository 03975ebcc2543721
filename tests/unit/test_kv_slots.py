"""Several nodes with one folder, as pods of one machine have: who owns which slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.nvme import slots
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.nvme_tier import FolderBusy, NvmeTier
from headrace_kvstore.nvme.slots import open_slot
from tests.support.kvnode import DIGEST, Engine, keys, settings, until

SIZE_BYTES, SEGMENT_BYTES = 2**22, 2**20
Open = Callable[..., NvmeTier]


@pytest.fixture
def opened(tmp_path: Path, file_io: FileIo) -> Iterator[Open]:
    """Opens a slot as the node of an app does."""
    tiers: list[NvmeTier] = []

    def make(app: str) -> NvmeTier:
        def one(folder: Path) -> NvmeTier:
            return NvmeTier.open(folder, SIZE_BYTES, SEGMENT_BYTES, file_io, owner=app)

        tiers.append(open_slot(tmp_path / "kv", app, one))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def names(*tiers: NvmeTier) -> list[str]:
    return [tier.folder.name for tier in tiers]


def test_each_node_of_an_app_gets_a_slot_of_its_own(opened: Open) -> None:
    assert names(opened("a"), opened("a"), opened("a")) == ["kv", "1", "2"]


def test_a_node_that_comes_back_gets_the_slot_that_is_free(opened: Open) -> None:
    first, second, third = opened("a"), opened("a"), opened("a")
    second.close()
    assert names(opened("a")) == names(second)
    first.close()
    third.close()
    assert names(opened("a"), opened("a")) == names(first, third)


def test_a_new_app_waits_for_the_slots_of_the_old_one_and_makes_none(opened: Open) -> None:
    old = [opened("old"), opened("old")]
    with pytest.raises(FolderBusy):
        opened("new")
    old[1].close()
    taken = opened("new")
    assert names(taken) == ["1"]
    with pytest.raises(FolderBusy):
        opened("new")
    old[0].close()
    assert names(opened("new"), opened("new")) == ["kv", "2"]


def test_an_owner_without_a_name_is_waited_for(
    opened: Open, tmp_path: Path, file_io: FileIo
) -> None:
    other = NvmeTier.open(tmp_path / "kv", SIZE_BYTES, SEGMENT_BYTES, file_io)
    with pytest.raises(FolderBusy):
        opened("a")
    other.close()
    assert names(opened("a")) == ["kv"]


def test_slots_are_bounded(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_SLOTS", 2)
    opened("a")
    opened("a")
    with pytest.raises(FolderBusy, match="2 nodes of this app"):
        opened("a")


def test_two_nodes_of_one_app_keep_blocks_in_one_folder_and_find_them_again(
    tmp_path: Path, file_io: FileIo
) -> None:
    """The pods of a machine have arenas of their own, and the disk's folder in common."""

    def node(pod: str) -> tuple[StoreNode, Engine]:
        (tmp_path / pod).mkdir(exist_ok=True)
        given = settings(tmp_path / pod, nvme_folder=tmp_path / "disk")
        started = StoreNode(given, file_io=file_io).start()
        until(lambda: started.operations.stats()["tiers"]["nvme"]["state"] == "on")
        return started, Engine(given)

    def on_disk(node: StoreNode) -> set[int]:
        tier = node.tiers.nvme
        assert tier is not None
        return {n for n in (0, 1) if tier.contains(DIGEST, keys(n)).all()}

    pods = [node("first"), node("second")]
    for number, (started, engine) in enumerate(pods):
        engine.put(number)
        until(lambda started=started, number=number: on_disk(started) == {number})
    for started, engine in pods:
        engine.close()
        assert started.close()
    again = [node("first"), node("second")]
    assert [on_disk(started) for started, _ in again] == [{0}, {1}]
    for started, engine in again:
        engine.close()
        assert started.close()

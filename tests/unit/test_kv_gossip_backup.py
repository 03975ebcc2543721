"""The gossip log's backup: what comes back, what is not taken, and what a failure costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_kvstore.node import gossip_backup
from headrace_kvstore.node.gossip_backup import (
    BackupStorage,
    DamagedError,
    FolderBackup,
    GossipBackup,
    ObjectBackup,
    pack,
    unpack,
)
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.objects.object_client import ObjectError
from headrace_kvstore.objects.object_format import BACKUP_NAME
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.gossip_log import (
    ENTRY_COST_BYTES,
    GossipEntry,
    GossipLog,
    SavedEntry,
)
from tests.support.kvnode import settings, until
from tests.support.kvobjects import FakeStore

KIB = 1024
GOSSIP_BYTES = 64 * KIB


def entry(
    last: int, writer: bytes = b"a", stream: bytes = b"s", data: bytes = b"x" * KIB
) -> GossipEntry:
    return GossipEntry(writer, stream, last, data)


def entries(log: GossipLog, **how: Any) -> list[GossipEntry]:
    return log.read(0, 1 << 30, generation=log.generation, **how).entries


def saved(log: GossipLog, place: BackupStorage) -> None:
    """Load, save and end."""
    backup = GossipBackup(log, place).start()
    backup.close(10.0)
    assert backup.stats()["state"] == "on"


@pytest.fixture(params=["folder", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> BackupStorage:
    return FolderBackup(tmp_path / "kv") if request.param == "folder" else ObjectBackup(FakeStore())


class TestRestored:
    def test_a_new_log_has_what_the_old_one_had(self, place: BackupStorage) -> None:
        old, new = GossipLog(GOSSIP_BYTES, "old"), GossipLog(GOSSIP_BYTES, "new")
        for last, stream in ((1, b"s"), (2, b"t"), (3, b"s")):
            old.append(entry(last, stream=stream))
        saved(old, place)
        saved(new, place)
        assert entries(new) == entries(old)

    def test_loading_twice_changes_nothing(self, place: BackupStorage) -> None:
        log = GossipLog(GOSSIP_BYTES, "g")
        log.append(entry(1))
        saved(log, place)
        saved(log, place)
        assert len(entries(log)) == 1

    def test_a_smaller_log_keeps_the_newest(self) -> None:
        kept = [SavedEntry(entry(last), True) for last in range(10)]
        log = GossipLog(3 * (KIB + ENTRY_COST_BYTES), "g")
        assert log.restore(kept) == 10
        assert [each.last for each in entries(log)] == [7, 8, 9]

    def test_a_writer_that_posts_again_replaces_its_restored_notes(self) -> None:
        log = GossipLog(GOSSIP_BYTES, "g")
        restored = [entry(1), entry(1, stream=b"t"), entry(2), entry(1, writer=b"dead")]
        log.restore([SavedEntry(each, True) for each in restored])
        again = entry(3)
        assert log.append(again)
        assert entries(log) == [entry(1, writer=b"dead"), again]
        assert log.append(entry(4, writer=b"dead"))
        assert log.stats()["bytes"] == 2 * (KIB + ENTRY_COST_BYTES)

    def test_what_was_posted_before_an_entry_was_restored_is_no_news_when_that_has_gone(
        self,
    ) -> None:
        log = GossipLog(GOSSIP_BYTES, "g")
        assert log.append(entry(1))
        assert log.restore([SavedEntry(entry(2), True)]) == 1
        assert log.append(entry(1, stream=b"t"))  # restored entries of its writer go
        assert entries(log) == [entry(1), entry(1, stream=b"t")]
        assert not log.append(entry(1)) and log.append(entry(2))

    @pytest.mark.parametrize(("kind", "own"), [("folder", 1), ("objects", 0)])
    def test_peers_get_what_only_this_machine_has(
        self, kind: str, own: int, tmp_path: Path
    ) -> None:
        place = FolderBackup(tmp_path) if kind == "folder" else ObjectBackup(FakeStore())
        old, new = GossipLog(GOSSIP_BYTES, "old"), GossipLog(GOSSIP_BYTES, "new")
        old.append(entry(1))
        old.append(entry(1, writer=b"elsewhere"), own=False)
        saved(old, place)
        saved(new, place)
        assert len(entries(new, own=True)) == own


class TestDamaged:
    def test_what_is_torn_or_flipped_anywhere_is_refused_whole(self) -> None:
        data = pack([SavedEntry(entry(1, data=b"abc"), True)])
        assert unpack(data, GOSSIP_BYTES) == [SavedEntry(entry(1, data=b"abc"), True)]
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1
            for wrong in (bytes(flipped), data[:at]):
                with pytest.raises(DamagedError):
                    unpack(wrong, GOSSIP_BYTES)

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"another program's file", "begins with b'another ', not b'HRGOSSIP1'"),
            (
                pack([SavedEntry(entry(1, data=bytes(GOSSIP_BYTES)), True)]) + b"\0" * 64,
                "store.node",
            ),
            (pack([["no entry"]]), "does not parse"),  # type: ignore[list-item]
            (pack([SavedEntry(entry(1, writer=b"w" * 65), True)]), "does not parse"),
        ],
        ids=["foreign", "large", "no entry", "out of bounds"],
    )
    def test_what_is_no_backup_is_named(self, data: bytes, said: str) -> None:
        with pytest.raises(DamagedError, match=said):
            unpack(data, GOSSIP_BYTES)

    def test_a_full_logs_backup_may_be_loaded(self) -> None:
        log = GossipLog(GOSSIP_BYTES, "g")
        for last in range(200):
            log.append(GossipEntry(b"w" * 64, b"s" * 64, 2**61 + last, b""))
        assert len(unpack(pack(log.snapshot()), GOSSIP_BYTES)) == GOSSIP_BYTES // ENTRY_COST_BYTES

    def test_a_damaged_backup_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / BACKUP_NAME).write_bytes(b"torn")
        log = GossipLog(GOSSIP_BYTES, "g")
        log.append(entry(1))
        saved(log, FolderBackup(tmp_path))
        assert unpack((tmp_path / BACKUP_NAME).read_bytes(), GOSSIP_BYTES) == [
            SavedEntry(entry(1), True)
        ]


class TestFaults:
    def test_nothing_is_saved_before_the_load_has_succeeded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gossip_backup, "RETRY_S", 0.01)
        store = FakeStore()
        saved_before = GossipLog(GOSSIP_BYTES, "old")
        saved_before.append(entry(1, writer=b"before"))
        saved(saved_before, ObjectBackup(store))
        store.fails["get"] = "unreachable"
        log = GossipLog(GOSSIP_BYTES, "g")
        log.append(entry(1))
        backup = GossipBackup(log, ObjectBackup(store)).start()
        until(lambda: backup.stats()["failures"] > 2)
        assert (store.puts, backup.stats()["state"]) == (1, "unreachable")
        del store.fails["get"]
        until(lambda: backup.stats()["saves"] == 1)
        backup.close(10.0)
        assert len(entries(log)) == 2

    def test_a_write_that_fails_is_tried_again_and_leaves_the_last_one(
        self, tmp_path: Path
    ) -> None:
        class Full(FolderBackup):
            full = True

            def write(self, data: bytes) -> None:
                if self.full:
                    raise OSError(28, "No space left on device")
                super().write(data)

        place = Full(tmp_path)
        log = GossipLog(GOSSIP_BYTES, "g")
        log.append(entry(1))
        backup = GossipBackup(log, place, save_s=0.01).start()
        until(lambda: "No space" in backup.stats()["state"])
        place.full = False
        until(lambda: backup.stats()["saves"] == 1)
        backup.close(10.0)
        assert [each.name for each in tmp_path.iterdir()] == [BACKUP_NAME]
        assert (tmp_path / BACKUP_NAME).stat().st_mode & 0o777 == 0o600

    def test_an_unchanged_log_is_not_saved_again(self, tmp_path: Path) -> None:
        log = GossipLog(GOSSIP_BYTES, "g")
        log.append(entry(1))
        saved(log, FolderBackup(tmp_path))
        again = GossipLog(GOSSIP_BYTES, "h")
        backup = GossipBackup(again, FolderBackup(tmp_path)).start()
        backup.close(10.0)
        assert backup.stats()["saves"] == 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., StoreNode]]:
    nodes: list[StoreNode] = []

    def make(**values: Any) -> StoreNode:
        nodes.append(StoreNode(settings(tmp_path, save_gossip=True, **values)).start())
        return nodes[-1]

    yield make
    for each in nodes:
        each.close()


@pytest.mark.parametrize("objects", [False, True], ids=["folder", "objects"])
def test_a_nodes_gossip_log_outlives_it(
    start: Callable[..., StoreNode], tmp_path: Path, objects: bool
) -> None:
    more = {"object_url": f"file://{tmp_path}/objects"} if objects else {}
    node = start(**more)
    log = node.operations.gossip_log
    node.operations.answer(wire.AppendEntry(log.generation, entry(1)))
    node.close()
    if objects:
        assert (tmp_path / "objects" / BACKUP_NAME).exists()
    after = start(**more)
    until(lambda: entries(after.operations.gossip_log) == [entry(1)])
    if objects:
        tier = after.tiers.objects
        assert tier is not None
        until(tier.refreshed.is_set)
        assert tier.stats()["ignored"] == {}, "the backup is no foreign object"


def test_a_backup_without_a_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nvme_folder or object_url"):
        settings(tmp_path, save_gossip=True, nvme_folder=None)


def test_the_objects_name_is_none_of_a_block(tmp_path: Path) -> None:
    store = FakeStore()
    with pytest.raises(ObjectError, match="absent"):
        store.get(BACKUP_NAME, 0, 1)
    assert ObjectBackup(store).read(1) is None

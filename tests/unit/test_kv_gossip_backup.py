"""The board's backup: what comes back, what is not taken, and what a failure costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_kvstore.node import gossip_backup as board_backup
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
BOARD_BYTES = 64 * KIB


def note(
    last: int, writer: bytes = b"a", stream: bytes = b"s", data: bytes = b"x" * KIB
) -> GossipEntry:
    return GossipEntry(writer, stream, last, data)


def notes(board: GossipLog, **how: Any) -> list[GossipEntry]:
    return board.read(0, 1 << 30, generation=board.generation, **how).entries


def saved(board: GossipLog, place: BackupStorage) -> None:
    """Load, save and end."""
    backup = GossipBackup(board, place).start()
    backup.close(10.0)
    assert backup.stats()["state"] == "on"


@pytest.fixture(params=["folder", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> BackupStorage:
    return FolderBackup(tmp_path / "kv") if request.param == "folder" else ObjectBackup(FakeStore())


class TestRestored:
    def test_a_new_board_has_what_the_old_one_had(self, place: BackupStorage) -> None:
        old, new = GossipLog(BOARD_BYTES, "old"), GossipLog(BOARD_BYTES, "new")
        for last, stream in ((1, b"s"), (2, b"t"), (3, b"s")):
            old.append(note(last, stream=stream))
        saved(old, place)
        saved(new, place)
        assert notes(new) == notes(old)

    def test_loading_twice_changes_nothing(self, place: BackupStorage) -> None:
        board = GossipLog(BOARD_BYTES, "g")
        board.append(note(1))
        saved(board, place)
        saved(board, place)
        assert len(notes(board)) == 1

    def test_a_smaller_board_keeps_the_newest(self) -> None:
        kept = [SavedEntry(note(last), True) for last in range(10)]
        board = GossipLog(3 * (KIB + ENTRY_COST_BYTES), "g")
        assert board.restore(kept) == 10
        assert [each.last for each in notes(board)] == [7, 8, 9]

    def test_a_writer_that_posts_again_replaces_its_restored_notes(self) -> None:
        board = GossipLog(BOARD_BYTES, "g")
        restored = [note(1), note(1, stream=b"t"), note(2), note(1, writer=b"dead")]
        board.restore([SavedEntry(each, True) for each in restored])
        again = note(3)
        assert board.append(again)
        assert notes(board) == [note(1, writer=b"dead"), again]
        assert board.append(note(4, writer=b"dead"))
        assert board.stats()["bytes"] == 2 * (KIB + ENTRY_COST_BYTES)

    def test_what_was_posted_before_a_note_was_restored_is_no_news_when_that_has_gone(self) -> None:
        board = GossipLog(BOARD_BYTES, "g")
        assert board.append(note(1))
        assert board.restore([SavedEntry(note(2), True)]) == 1
        assert board.append(note(1, stream=b"t"))  # restored notes of its writer go
        assert notes(board) == [note(1), note(1, stream=b"t")]
        assert not board.append(note(1)) and board.append(note(2))

    @pytest.mark.parametrize(("kind", "own"), [("folder", 1), ("objects", 0)])
    def test_peers_get_what_only_this_machine_has(
        self, kind: str, own: int, tmp_path: Path
    ) -> None:
        place = FolderBackup(tmp_path) if kind == "folder" else ObjectBackup(FakeStore())
        old, new = GossipLog(BOARD_BYTES, "old"), GossipLog(BOARD_BYTES, "new")
        old.append(note(1))
        old.append(note(1, writer=b"elsewhere"), own=False)
        saved(old, place)
        saved(new, place)
        assert len(notes(new, own=True)) == own


class TestDamaged:
    def test_what_is_torn_or_flipped_anywhere_is_refused_whole(self) -> None:
        data = pack([SavedEntry(note(1, data=b"abc"), True)])
        assert unpack(data, BOARD_BYTES) == [SavedEntry(note(1, data=b"abc"), True)]
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1
            for wrong in (bytes(flipped), data[:at]):
                with pytest.raises(DamagedError):
                    unpack(wrong, BOARD_BYTES)

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"another program's file", "begins with b'another ', not b'HRBOARD1'"),
            (pack([SavedEntry(note(1, data=bytes(BOARD_BYTES)), True)]) + b"\0" * 64, "store.node"),
            (pack([["no note"]]), "does not parse"),  # type: ignore[list-item]
            (pack([SavedEntry(note(1, writer=b"w" * 65), True)]), "does not parse"),
        ],
        ids=["foreign", "large", "no note", "out of bounds"],
    )
    def test_what_is_no_backup_is_named(self, data: bytes, said: str) -> None:
        with pytest.raises(DamagedError, match=said):
            unpack(data, BOARD_BYTES)

    def test_a_full_boards_backup_may_be_loaded(self) -> None:
        board = GossipLog(BOARD_BYTES, "g")
        for last in range(200):
            board.append(GossipEntry(b"w" * 64, b"s" * 64, 2**61 + last, b""))
        assert len(unpack(pack(board.snapshot()), BOARD_BYTES)) == BOARD_BYTES // ENTRY_COST_BYTES

    def test_a_damaged_backup_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "board").write_bytes(b"torn")
        board = GossipLog(BOARD_BYTES, "g")
        board.append(note(1))
        saved(board, FolderBackup(tmp_path))
        assert unpack((tmp_path / "board").read_bytes(), BOARD_BYTES) == [SavedEntry(note(1), True)]


class TestFaults:
    def test_nothing_is_saved_before_the_load_has_succeeded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(board_backup, "RETRY_S", 0.01)
        store = FakeStore()
        saved_before = GossipLog(BOARD_BYTES, "old")
        saved_before.append(note(1, writer=b"before"))
        saved(saved_before, ObjectBackup(store))
        store.fails["get"] = "unreachable"
        board = GossipLog(BOARD_BYTES, "g")
        board.append(note(1))
        backup = GossipBackup(board, ObjectBackup(store)).start()
        until(lambda: backup.stats()["failures"] > 2)
        assert (store.puts, backup.stats()["state"]) == (1, "unreachable")
        del store.fails["get"]
        until(lambda: backup.stats()["saves"] == 1)
        backup.close(10.0)
        assert len(notes(board)) == 2

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
        board = GossipLog(BOARD_BYTES, "g")
        board.append(note(1))
        backup = GossipBackup(board, place, save_s=0.01).start()
        until(lambda: "No space" in backup.stats()["state"])
        place.full = False
        until(lambda: backup.stats()["saves"] == 1)
        backup.close(10.0)
        assert [each.name for each in tmp_path.iterdir()] == ["board"]
        assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600

    def test_an_unchanged_board_is_not_saved_again(self, tmp_path: Path) -> None:
        board = GossipLog(BOARD_BYTES, "g")
        board.append(note(1))
        saved(board, FolderBackup(tmp_path))
        again = GossipLog(BOARD_BYTES, "h")
        backup = GossipBackup(again, FolderBackup(tmp_path)).start()
        backup.close(10.0)
        assert backup.stats()["saves"] == 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., StoreNode]]:
    nodes: list[StoreNode] = []

    def make(**values: Any) -> StoreNode:
        nodes.append(StoreNode(settings(tmp_path, save_board=True, **values)).start())
        return nodes[-1]

    yield make
    for each in nodes:
        each.close()


@pytest.mark.parametrize("objects", [False, True], ids=["folder", "objects"])
def test_a_nodes_board_outlives_it(
    start: Callable[..., StoreNode], tmp_path: Path, objects: bool
) -> None:
    more = {"object_url": f"file://{tmp_path}/objects"} if objects else {}
    node = start(**more)
    board = node.operations.gossip_log
    node.operations.answer(wire.AppendEntry(board.generation, note(1)))
    node.close()
    if objects:
        assert (tmp_path / "objects" / "board").exists()
    after = start(**more)
    until(lambda: notes(after.operations.gossip_log) == [note(1)])
    if objects:
        tier = after.tiers.objects
        assert tier is not None
        until(tier.refreshed.is_set)
        assert tier.stats()["ignored"] == {}, "the backup is no foreign object"


def test_a_backup_without_a_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nvme_folder or object_url"):
        settings(tmp_path, save_board=True, nvme_folder=None)


def test_the_objects_name_is_none_of_a_block(tmp_path: Path) -> None:
    store = FakeStore()
    with pytest.raises(ObjectError, match="absent"):
        store.get("board", 0, 1)
    assert ObjectBackup(store).read(1) is None

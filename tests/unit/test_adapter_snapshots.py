"""LoRA adapters: their names, where they are read from, and the copies by content."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from headrace_engine.adapters.settings import why_bad_name
from headrace_engine.adapters.snapshots import (
    UNFINISHED_S,
    Snapshots,
    snapshot_digest,
    snapshot_root,
)
from headrace_engine.adapters.sources import (
    CONFIG,
    WEIGHTS,
    AdapterError,
    AdapterUnreachableError,
    file_facts,
    list_subfolders,
)
from tests.support.adapter_files import write_adapter


class TestNames:
    @pytest.mark.parametrize("name", ["sql", "base:sql", "org/adapter", "a" * 128, "übung"])
    def test_plain_names_are_taken(self, name: str) -> None:
        assert why_bad_name(name, "base") is None

    @pytest.mark.parametrize("name", ["", " sql", "sql ", "a\nb", "a\0b", "a" * 129, "base"])
    def test_others_are_not(self, name: str) -> None:
        assert why_bad_name(name, "base")


class TestSources:
    @pytest.mark.parametrize("form", ["{}", "file://{}", "pyarrow-file://{}"])
    def test_a_folder_is_read_in_each_form(self, tmp_path: Path, form: str) -> None:
        write_adapter(tmp_path / "sql")
        (tmp_path / "file").touch()
        assert list_subfolders(form.format(tmp_path)) == ["sql"]
        names = [each.name for each in file_facts(form.format(tmp_path / "sql"))]
        assert names == [CONFIG, WEIGHTS]

    def test_weights_that_can_run_code_are_not_read(self, tmp_path: Path) -> None:
        folder = write_adapter(tmp_path / "sql")
        (folder / WEIGHTS).rename(folder / "adapter_model.bin")
        with pytest.raises(AdapterError, match=f"has no {WEIGHTS}"):
            file_facts(str(folder))

    def test_a_configuration_that_is_too_large_is_not_read(self, tmp_path: Path) -> None:
        folder = write_adapter(tmp_path / "sql")
        os.truncate(folder / CONFIG, 2**20 + 1)
        with pytest.raises(AdapterError, match="more than 1048576 bytes"):
            file_facts(str(folder))

    @pytest.mark.parametrize("source", ["/none/such", "s4://bucket/a", "file:///none/such"])
    def test_a_source_that_cannot_be_read_says_so(self, source: str) -> None:
        with pytest.raises(AdapterUnreachableError, match="cannot be read"):
            file_facts(source)


class TestSnapshots:
    def test_equal_content_has_one_snapshot(self, tmp_path: Path) -> None:
        snapshots = Snapshots(tmp_path / "s")
        one, other = (write_adapter(tmp_path / name) for name in ("a", "b"))
        assert snapshots.take(str(one)) == snapshots.take(str(other))
        assert len([each for each in (tmp_path / "s").iterdir() if each.is_dir()]) == 1

    @pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
    def test_each_file_is_part_of_the_content(self, tmp_path: Path, file: str) -> None:
        snapshots, folder = Snapshots(tmp_path / "s"), write_adapter(tmp_path / "a")
        before = snapshots.take(str(folder))
        (folder / file).write_text('{"r": 8}')
        assert snapshots.take(str(folder)) != before

    def test_a_snapshot_stays_when_its_source_changes(self, tmp_path: Path) -> None:
        snapshots, folder = Snapshots(tmp_path / "s"), write_adapter(tmp_path / "a")
        digest = snapshots.take(str(folder))
        write_adapter(folder, b"others")
        path = snapshots.open(digest)
        assert path is not None and (path / WEIGHTS).read_bytes() == b"weights"

    def test_a_damaged_snapshot_is_not_opened_and_is_taken_again(self, tmp_path: Path) -> None:
        folder = write_adapter(tmp_path / "a")
        digest = Snapshots(tmp_path / "s").take(str(folder))
        (tmp_path / "s" / digest / WEIGHTS).write_bytes(b"flipped")
        later = Snapshots(tmp_path / "s")
        assert later.open(digest) is None
        assert later.take(str(folder)) == digest
        assert (tmp_path / "s" / digest / WEIGHTS).read_bytes() == b"weights"

    def test_only_snapshots_that_no_replica_uses_are_removed(self, tmp_path: Path) -> None:
        user, cleaner = Snapshots(tmp_path / "s"), Snapshots(tmp_path / "s")
        digest = user.take(str(write_adapter(tmp_path / "a")))
        assert cleaner.remove_unused() == 0
        user.close()
        assert cleaner.remove_unused() == 1
        assert not (tmp_path / "s" / digest).exists()

    def test_old_unfinished_copies_are_removed(self, tmp_path: Path) -> None:
        for name, age_s in (("old", UNFINISHED_S + 60), ("young", 0.0)):
            folder = tmp_path / "s" / f".new-{name}"
            folder.mkdir(parents=True)
            os.utime(folder, (time.time() - age_s,) * 2)
        Snapshots(tmp_path / "s").remove_unused()
        assert [each.name for each in (tmp_path / "s").iterdir()] == [".new-young"]

    def test_a_source_that_changes_meanwhile_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from headrace_engine.adapters import snapshots as module

        folder, count = write_adapter(tmp_path / "a"), iter(range(10))
        monkeypatch.setattr(module, "file_facts", lambda source: next(count))
        with pytest.raises(AdapterError, match="is being changed"):
            Snapshots(tmp_path / "s").take(str(folder))
        assert not [each for each in (tmp_path / "s").iterdir() if each.is_dir()]

    def test_only_the_path_of_a_snapshot_names_its_content(self) -> None:
        digest = "0123456789abcdef" * 2
        assert snapshot_digest(str(snapshot_root() / digest)) == digest
        for path in (f"/elsewhere/{digest}", str(snapshot_root() / "sql"), digest, "org/name"):
            assert snapshot_digest(path) is None

    def test_locks_are_not_inherited(self, tmp_path: Path) -> None:
        snapshots = Snapshots(tmp_path / "s")
        digest = snapshots.take(str(write_adapter(tmp_path / "a")))
        [number] = [snapshots._locks[digest]]
        assert fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC

"""What files and objects are known by, and that each file is read once a machine."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.connector.identity import weights
from headrace_engine.connector.identity.weights import (
    CONFIG_SUFFIXES,
    Unidentified,
    file_digest,
    folder_fingerprint,
    objects_fingerprint,
)
from headrace_kvstore.objects.object_client import StoreClient


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests of files are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return folder


class TestFolders:
    def test_a_copy_elsewhere_is_the_same_model(self, folder: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(folder, tmp_path / "copy")
        assert folder_fingerprint(folder) == folder_fingerprint(copy)

    @pytest.mark.parametrize("place", [0, 4095, 12345, 2**20 - 1])
    def test_other_weights_are_another_model(self, folder: Path, place: int) -> None:
        before = folder_fingerprint(folder)
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[place] ^= 1
        (folder / "model.safetensors").write_bytes(content)
        assert folder_fingerprint(folder) != before

    def test_another_name_is_another_model(self, folder: Path) -> None:
        before = folder_fingerprint(folder)
        (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
        assert folder_fingerprint(folder) != before

    def test_what_is_not_the_model_does_not_count(self, folder: Path) -> None:
        before = folder_fingerprint(folder)
        for name in ("README.md", ".venv/lib/x.py", "checkpoint-1/model.safetensors"):
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_text("hello")
        assert folder_fingerprint(folder) == before

    def test_weights_are_not_read_for_the_configuration(self, folder: Path) -> None:
        before = folder_fingerprint(folder, CONFIG_SUFFIXES)
        (folder / "model.safetensors").chmod(0)
        assert folder_fingerprint(folder, CONFIG_SUFFIXES) == before


class TestOnce:
    def test_a_file_is_read_once(self, folder: Path, cache: Path) -> None:
        before = folder_fingerprint(folder)
        kept = [path for path in (cache / "headrace" / "fingerprints").iterdir() if not path.suffix]
        assert len(kept) == 2
        kept[0].write_text("0" * 32)
        assert folder_fingerprint(folder) != before, "what is kept is believed"
        kept[0].write_text("half a dig")
        assert folder_fingerprint(folder) == before, "what is no digest is not"

    def test_processes_that_start_at_once_read_it_once(self, folder: Path, tmp_path: Path) -> None:
        """As the ranks of an engine do."""
        count, ready = tmp_path / "reads", multiprocessing.get_context("fork").Barrier(6)

        def rank() -> None:
            read = hashlib.file_digest

            def counted(*args: Any) -> Any:
                with count.open("a") as file:
                    file.write("x")
                time.sleep(0.1)
                return read(*args)

            weights.hashlib.file_digest = counted  # type: ignore[attr-defined]
            ready.wait()
            file_digest(folder / "model.safetensors")

        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=rank) for _ in range(6)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(30)
        assert [each.exitcode for each in ranks] == [0] * 6
        assert count.read_text() == "x"

    def test_so_do_threads(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read, reads = hashlib.file_digest, []

        def counted(*args: Any) -> Any:
            reads.append(args)
            time.sleep(0.1)
            return read(*args)

        monkeypatch.setattr(weights.hashlib, "file_digest", counted)
        threads = [
            threading.Thread(target=file_digest, args=[folder / "config.json"]) for _ in range(6)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(reads) == 1

    def test_without_a_folder_for_the_cache_files_are_read_each_time(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = folder_fingerprint(folder)
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert folder_fingerprint(folder) == before

    def test_a_reader_that_died_holds_up_nobody(self, folder: Path, cache: Path) -> None:
        """Its lock went with it; what it left behind is no digest."""
        file = folder / "config.json"
        before = file_digest(file)
        for kept in (cache / "headrace" / "fingerprints").iterdir():
            kept.unlink() if not kept.suffix else os.utime(kept, (0, 0))
        assert file_digest(file) == before


class TestObjects:
    @pytest.fixture
    def url(self, tmp_path: Path) -> Iterator[str]:
        url = f"file://{tmp_path / 'bucket'}"
        self.put(url, "model-1.safetensors", b"weights")
        self.put(url, "config.json", b"{}")
        yield url

    @staticmethod
    def put(url: str, name: str, data: bytes) -> None:
        StoreClient(url, {}, 5.0).put(name, memoryview(data))

    def test_the_same_objects_are_the_same_model(self, url: str) -> None:
        before = objects_fingerprint(url)
        self.put(url, "README.md", b"hello")
        assert objects_fingerprint(url) == before

    def test_an_object_that_is_written_again_makes_another(self, url: str) -> None:
        before = objects_fingerprint(url)
        self.put(url, "model-1.safetensors", b"others!")
        once = objects_fingerprint(url)
        self.put(url, "model-2.safetensors", b"more")
        assert len({before, once, objects_fingerprint(url)}) == 3

    def test_objects_elsewhere_are_another(self, url: str, tmp_path: Path) -> None:
        shutil.copytree(tmp_path / "bucket", tmp_path / "mirror", copy_function=os.link)
        assert objects_fingerprint(f"file://{tmp_path / 'mirror'}") != objects_fingerprint(url)

    @pytest.mark.parametrize("which", ["none there", "unreachable", "no tags", "no such scheme"])
    def test_what_has_no_versions_is_not_identified(
        self, which: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wrong = {
            "none there": f"file://{tmp_path / 'empty'}",
            "unreachable": "s3://none-such/model",
            "no such scheme": "nowhere://model",
        }
        if which == "no tags":
            each = StoreClient.list
            monkeypatch.setattr(
                StoreClient, "list", lambda self: (one._replace(tag="") for one in each(self))
            )
        monkeypatch.setattr(weights, "OBJECTS_TIMEOUT_S", 1.0)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        with pytest.raises(Unidentified, match=r"versions|listed"):
            objects_fingerprint(wrong.get(which, url))

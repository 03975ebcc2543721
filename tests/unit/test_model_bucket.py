"""Copying a model out of an S3 server of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import models
from headrace.cli.console import CliError
from headrace.model import ModelError, bucket
from headrace.model.bucket import copy_bucket
from headrace.model.room import MODEL_ROOM
from headrace_kvstore.objects.object_client import ObjectError, StoreClient
from tests.support.kvobjects import BUCKET, s3_options, s3_server

URL = f"s3://{BUCKET}/models/tiny"
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 300,
    "tokenizer/vocab.txt": b"a\nb\n",
    "empty": b"",
}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreClient]:
    """A bucket with a model, and the variables by which it is found."""
    with s3_server() as port:
        options = s3_options(port)
        for name in ("endpoint_url", "access_key_id", "secret_access_key", "region"):
            value = options["endpoint" if name == "endpoint_url" else name]
            monkeypatch.setenv(f"AWS_{name.upper()}", value)
        made = StoreClient(URL, options, 10.0)
        for name, data in FILES.items():
            made.put(name, memoryview(data))
        yield made


def files_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_all_files_are_copied_in_pieces(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "CHUNK_BYTES", 1000)
    seen: list[tuple[int, int]] = []
    copy_bucket(URL, tmp_path / "m", lambda stage, done, total: seen.append((done, total)))
    assert files_in(tmp_path / "m") == FILES
    whole = sum(map(len, FILES.values()))
    assert seen[-1] == (whole, whole)


def test_a_copy_that_broke_continues_with_what_is_missing(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = StoreClient.get, list[str]()

    def get(self: StoreClient, name: str, offset: int, length: int) -> memoryview:
        asked.append(name)
        if name == "model.safetensors" and asked.count(name) == 1:
            raise ObjectError("timeout")
        return real(self, name, offset, length)

    monkeypatch.setattr(StoreClient, "get", get)
    monkeypatch.setattr(bucket, "FILES_AT_ONCE", 1)
    with pytest.raises(ModelError, match=r"s3://bucket/models/tiny: timeout"):
        copy_bucket(URL, tmp_path)
    assert "model.safetensors" not in files_in(tmp_path)
    copy_bucket(URL, tmp_path)
    assert files_in(tmp_path).items() >= FILES.items()
    assert asked.count("config.json") == 1


def test_the_part_of_a_file_that_a_dead_pod_left_is_removed(
    client: StoreClient, tmp_path: Path
) -> None:
    """One of a pod that may still write stays."""
    old, young = tmp_path / ".a.pod-1.part", tmp_path / ".b.pod-2.part"
    for part in (old, young):
        part.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    copy_bucket(URL, tmp_path)
    assert files_in(tmp_path) == {**FILES, ".b.pod-2.part": b"half"}


def test_a_model_that_does_not_fit_is_not_begun(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod would be evicted. What is there needs no room."""
    whole = sum(map(len, FILES.values()))
    monkeypatch.setenv(MODEL_ROOM, str(whole - 1))
    with pytest.raises(ModelError, match=f"room for {whole - 1} bytes"):
        copy_bucket(URL, tmp_path)
    assert files_in(tmp_path) == {}
    monkeypatch.setenv(MODEL_ROOM, str(whole))
    copy_bucket(URL, tmp_path)
    monkeypatch.setenv(MODEL_ROOM, "0")
    copy_bucket(URL, tmp_path)
    assert files_in(tmp_path) == FILES


def test_a_file_that_is_replaced_during_the_copy_is_an_error_and_copied_by_the_next_one(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, other = StoreClient.get, b"x" * len(FILES["model.safetensors"])

    def get(self: StoreClient, name: str, offset: int, length: int) -> memoryview:
        data = real(self, name, offset, length)
        if name == "model.safetensors" and not offset:
            time.sleep(1.1)  # the server tells times in seconds
            client.put(name, memoryview(other))
        return data

    monkeypatch.setattr(bucket, "CHUNK_BYTES", 1000)
    with monkeypatch.context() as patched:
        patched.setattr(StoreClient, "get", get)
        with pytest.raises(ModelError, match=r"model\.safetensors has changed during the copy"):
            copy_bucket(URL, tmp_path)
    monkeypatch.setattr(bucket, "CLOSE_S", 0.5)
    copy_bucket(URL, tmp_path)
    assert files_in(tmp_path) == FILES | {"model.safetensors": other}


def test_a_file_that_was_replaced_by_one_of_its_size_is_copied_again(
    client: StoreClient, tmp_path: Path
) -> None:
    copy_bucket(URL, tmp_path)
    aged = tmp_path / "config.json"
    modified_s = aged.stat().st_mtime
    aged.write_bytes(b"[]")
    os.utime(aged, (modified_s - 3600,) * 2)  # as if the object were an hour younger
    copy_bucket(URL, tmp_path)
    assert files_in(tmp_path) == FILES
    assert aged.stat().st_mtime == pytest.approx(modified_s, abs=1)


def test_a_folder_without_a_model_is_refused(client: StoreClient, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"s3://bucket/models has no config\.json"):
        copy_bucket(f"s3://{BUCKET}/models", tmp_path)
    assert files_in(tmp_path) == {}


def test_a_name_that_leads_out_of_the_folder_is_refused(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace_kvstore.objects.object_client import Listed

    names = [Listed("config.json", 2, 0.0), Listed("../../etc/x", 2, 0.0)]
    monkeypatch.setattr(StoreClient, "list", lambda self: iter(names))
    with pytest.raises(ModelError, match="is no path of a model's file"):
        copy_bucket(URL, tmp_path / "m")


def test_the_command_takes_addresses_of_object_stores_alone(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="must begin with s3://, gs://, az://"):
        models.copy("file:///etc", tmp_path)

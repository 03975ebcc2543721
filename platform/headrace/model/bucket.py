"""Copies a model out of an object store into a folder.

A file gets its name when it is whole, and the time at which its object was written. So a copy that
broke continues with the files that are missing, a file whose object was replaced is copied again,
and several machines may copy into one folder at once.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.model.progress import Progress, silent
from headrace.model.registry import ModelError
from headrace.model.room import room_bytes
from headrace_kvstore.objects.object_client import Listed, ObjectError, StoreClient

SCHEMES = ("s3://", "gs://", "az://")
CHUNK_BYTES = 16 << 20
FILES_AT_ONCE = 8
TIMEOUT_S = 120.0
CLOSE_S = 2.0
"""File systems round the time of a file by so much at most."""
LEFT_S = 3600.0
"""Age after which a part of a file is taken for one that a dead process has left."""


def copy_bucket(url: str, folder: Path, report: Progress = silent) -> Path:
    """Copy all objects below a URL into a folder, and return the folder.

    Credentials and the region come from the environment, as the clouds' own tools read them.

    Raises:
        ModelError: the store cannot be read, or what lies there is no model.
    """
    try:
        client = StoreClient(url, _options(url, os.environ), TIMEOUT_S)
        files = [each for each in client.list() if not each.name.endswith("/")]
    except (ImportError, ValueError) as error:
        raise ModelError(str(error)) from None
    except ObjectError as error:
        raise ModelError(f"{url}: {error}") from None
    if "config.json" not in {each.name for each in files}:
        raise ModelError(f"{url} has no config.json: name the folder with the model's files")
    for each in files:
        if {"", ".", ".."} & set(each.name.split("/")):
            raise ModelError(f"{url}: the name {each.name!r} is no path of a model's file")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_left(folder)
    missing = sum(each.size_bytes for each in files if not _is_there(each, folder))
    room = room_bytes(folder)
    if room is not None and missing > room:
        raise ModelError(f"{folder} has room for {room} bytes, and {url} has {missing} more")
    work = _Copy(client, folder, sum(each.size_bytes for each in files), report)
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        try:
            copied = list(pool.map(work.copy, files))
            if any(copied):
                _check_unchanged(files, client)
        except ObjectError as error:
            pool.shutdown(cancel_futures=True)
            raise ModelError(f"{url}: {error}") from None
        except OSError as error:
            pool.shutdown(cancel_futures=True)
            raise ModelError(f"{folder}: {error}") from None
    return folder


class _Copy:
    """One copy into a folder, by several threads."""

    def __init__(
        self, client: StoreClient, folder: Path, total_bytes: int, report: Progress
    ) -> None:
        self._client, self._folder, self._report = client, folder, report
        self._total_bytes, self._done_bytes = total_bytes, 0
        self._lock = threading.Lock()

    def copy(self, file: Listed) -> bool:
        """Copy a file, unless it is there; return whether it was copied."""
        target = self._folder / file.name
        if _is_there(file, self._folder):
            self._count(file.size_bytes)
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{socket.gethostname()}.part")
        with part.open("wb") as out:
            for offset in range(0, file.size_bytes, CHUNK_BYTES):
                wanted = min(CHUNK_BYTES, file.size_bytes - offset)
                data = self._client.get(file.name, offset, wanted)
                if len(data) != wanted:
                    raise _changed(file.name)
                out.write(data)
                self._count(wanted)
        os.utime(part, (file.modified_s, file.modified_s))
        part.replace(target)
        return True

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            self._report("copying the model", self._done_bytes, self._total_bytes)


def _check_unchanged(files: list[Listed], client: StoreClient) -> None:
    """Raise ObjectError if an object was replaced since it was listed: its copy may have pieces of
    both versions. The copy has the older one's time, so the next run copies it again."""
    now = {each.name: each for each in client.list()}
    for file in files:
        if now.get(file.name) != file:
            raise _changed(file.name)


def _changed(name: str) -> ObjectError:
    return ObjectError("failed", f"{name} has changed during the copy; copy again")


def _is_there(file: Listed, folder: Path) -> bool:
    path = folder / file.name
    if not path.is_file():
        return False
    found = path.stat()
    return found.st_size == file.size_bytes and abs(found.st_mtime - file.modified_s) <= CLOSE_S


def _remove_left(folder: Path) -> None:
    for part in folder.rglob(".*.part"):
        if time.time() - part.stat().st_mtime > LEFT_S:
            part.unlink(missing_ok=True)


def _options(url: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the client's options: the endpoint of an S3 server of one's own, HTTP included."""
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
    return {"endpoint": endpoint} if endpoint and url.startswith("s3://") else {}

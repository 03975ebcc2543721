"""Reads adapters from where they are kept: a folder, an object store, or a model hub.

A source is a folder's path or a URI that pyarrow reads: `file://`, `s3://`, `gs://`, `abfss://`,
`hf://` (a repository of the Hugging Face hub). Ray's prefix `pyarrow-` is accepted. Only the two
files of PEFT's format are read, and of the weights only the safetensors form, since others can run
code when they are loaded. All functions block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_BYTES = {CONFIG: 2**20, WEIGHTS: 8 * 2**30}
PIECE_BYTES = 2**20
PYARROW = "pyarrow-"
"""Ray's prefix of a URI that pyarrow reads."""


class AdapterError(Exception):
    """An adapter cannot be used; the text says why."""


class AdapterUnreachableError(AdapterError):
    """An adapter's source cannot be read now."""


class FileFacts(NamedTuple):
    """Facts of a file that differ if it was replaced.

    Attributes:
        changed_ns: time of its last change; None if the source does not tell it.
    """

    name: str
    size: int
    changed_ns: int | None


def list_subfolders(path: str) -> list[str]:
    """Return the names of the adapters in a folder of adapters, sorted.

    Raises:
        AdapterUnreachableError: the folder cannot be listed.
    """
    return sorted(_base(each) for each in _entries(path) if _is_folder(each))


def file_facts(source: str) -> tuple[FileFacts, ...]:
    """Return the facts of an adapter's files.

    Raises:
        AdapterUnreachableError: the source cannot be read.
        AdapterError: it lacks a file, or one is too large.
    """
    found = {
        _base(each): FileFacts(_base(each), int(each.size or 0), _changed_ns(source, each))
        for each in _entries(source)
        if _base(each) in MAX_BYTES and not _is_folder(each)
    }
    for name, most in MAX_BYTES.items():
        if name not in found:
            raise AdapterError(f"{source} has no {name}")
        if found[name].size > most:
            raise AdapterError(f"{source}: {name} has more than {most} bytes")
    return tuple(found[name] for name in MAX_BYTES)


def read_pieces(source: str, name: str) -> Iterator[bytes]:
    """Yield the bytes of one of an adapter's files.

    Raises:
        AdapterUnreachableError: the file cannot be read.
        AdapterError: it is too large.
    """
    size = 0
    try:
        system, path = _open(source)
        with system.open_input_stream(f"{path}/{name}") as file:
            while piece := file.read(PIECE_BYTES):
                size += len(piece)
                if size > MAX_BYTES[name]:
                    raise AdapterError(f"{source}: {name} has more than {MAX_BYTES[name]} bytes")
                yield piece
    except (OSError, ValueError) as error:
        raise AdapterUnreachableError(f"{source} cannot be read: {_line(error)}") from None


def join(path: str, name: str) -> str:
    """Return the source of an adapter in a folder of adapters."""
    return f"{path.rstrip('/')}/{name}"


def _entries(source: str) -> list[Any]:
    from pyarrow import fs

    try:
        system, path = _open(source)
        return list(system.get_file_info(fs.FileSelector(path)))
    except (OSError, ValueError) as error:
        raise AdapterUnreachableError(f"{source} cannot be read: {_line(error)}") from None


def _open(source: str) -> tuple[Any, str]:
    from pyarrow import fs

    source = source.removeprefix(PYARROW)
    if "://" not in source:
        return fs.LocalFileSystem(), str(Path(source).expanduser().absolute())
    system, path = fs.FileSystem.from_uri(source)
    return system, path.rstrip("/")


def _changed_ns(source: str, entry: Any) -> int | None:
    if "://" not in source.removeprefix("file://").removeprefix(f"{PYARROW}file://"):
        with suppress(OSError):
            return os.stat(entry.path).st_ctime_ns  # a copy may keep the time of modification
    return entry.mtime_ns


def _is_folder(entry: Any) -> bool:
    from pyarrow import fs

    return bool(entry.type == fs.FileType.Directory)


def _base(entry: Any) -> str:
    return str(entry.base_name)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

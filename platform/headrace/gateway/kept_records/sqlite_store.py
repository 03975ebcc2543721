"""Records in one SQLite file: the default, for the gateways of one machine.

Gateways of one machine share the file (write-ahead log). A write is one transaction, so a process
that is killed leaves each turn whole or not at all. A power failure may lose the last writes, never
older ones (`synchronous=NORMAL`). A file that SQLite finds damaged is set aside and a new one is
begun.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from headrace.gateway.kept_records.record_store import RECORD_BYTES, StoreError, ThreadFullError

logger = logging.getLogger("headrace.gateway")

FILE = "conversations-1.sqlite"
"""Name of the file; the number is that of its tables' version."""
BUSY_S = 2.0
"""Seconds for which a statement waits while another process writes."""
WAL_BYTES = 64 << 20
"""Size to which the write-ahead log is cut after its content is in the file."""
EXPIRED_AT_ONCE = 200
"""Threads that a sweep removes, so that requests wait for a short time only."""
NAMES_AT_ONCE = 500
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLES = """
CREATE TABLE IF NOT EXISTS tenants(
    tag TEXT PRIMARY KEY, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS threads(
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL,
    used_s REAL NOT NULL, bytes INTEGER NOT NULL, UNIQUE(tenant, name)
);
CREATE INDEX IF NOT EXISTS threads_by_age ON threads(used_s);
CREATE INDEX IF NOT EXISTS threads_of_tenant ON threads(tenant, used_s);
CREATE TABLE IF NOT EXISTS records(
    thread INTEGER NOT NULL REFERENCES threads ON DELETE CASCADE,
    name TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY(thread, name)
);
"""
Result = TypeVar("Result")


class SqliteStore:
    """The store of records in a file. Use it from one thread at a time.

    Args:
        folder: the file's folder, on a local disk; it is made if it does not exist.
        ttl_s: seconds for which a thread lives after its last write.
        max_tenant_bytes: limit of a tenant's records.
        name: the file's name.

    Raises:
        StoreError: the file can neither be opened nor made.
    """

    def __init__(self, folder: Path, ttl_s: float, max_tenant_bytes: int, name: str = FILE) -> None:
        self._file, self._ttl_s, self._max_tenant_bytes = folder / name, ttl_s, max_tenant_bytes
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._guarded(lambda connection: None)

    def read(
        self, tenant: str, thread: str, names: Sequence[str], now_s: float
    ) -> dict[str, bytes]:
        """Return records; see `RecordStore`."""

        def run(connection: sqlite3.Connection) -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            for start in range(0, len(names), NAMES_AT_ONCE):
                some = names[start : start + NAMES_AT_ONCE]
                rows = connection.execute(
                    "SELECT r.name, r.data FROM threads t JOIN records r ON r.thread = t.id "
                    "WHERE t.tenant = ? AND t.name = ? AND t.used_s > ? "
                    f"AND r.name IN ({','.join('?' * len(some))})",
                    (tenant, thread, now_s - self._ttl_s, *some),
                )
                found.update(rows)
            return found

        return self._guarded(run)

    def sizes(self, tenant: str, thread: str, now_s: float) -> dict[str, int]:
        """Return the sizes of a thread's records; see `RecordStore`."""

        def run(connection: sqlite3.Connection) -> dict[str, int]:
            return dict(
                connection.execute(
                    "SELECT r.name, length(r.data) FROM threads t JOIN records r ON r.thread = t.id"
                    " WHERE t.tenant = ? AND t.name = ? AND t.used_s > ?",
                    (tenant, thread, now_s - self._ttl_s),
                )
            )

        return self._guarded(run)

    def write(self, tenant: str, thread: str, records: Mapping[str, bytes], now_s: float) -> None:
        """Write records in one transaction; see `RecordStore`."""
        self._write(tenant, thread, records, now_s, replace=True)

    def create(
        self, tenant: str, thread: str, records: Mapping[str, bytes], now_s: float
    ) -> frozenset[str]:
        """Write records that do not exist in one transaction; see `RecordStore`."""
        return self._write(tenant, thread, records, now_s, replace=False)

    def _write(
        self,
        tenant: str,
        thread: str,
        records: Mapping[str, bytes],
        now_s: float,
        *,
        replace: bool,
    ) -> frozenset[str]:
        """Write records; return the names of those that were written."""

        def run(connection: sqlite3.Connection) -> frozenset[str]:
            written: list[str] = []
            with _transaction(connection):
                found = connection.execute(
                    "SELECT id, bytes, used_s FROM threads WHERE tenant = ? AND name = ?",
                    (tenant, thread),
                ).fetchone()
                if found is not None and found[2] <= now_s - self._ttl_s:
                    _remove_thread(connection, tenant, found[0], found[1])
                    found = None
                if found is None:
                    row = connection.execute(
                        "INSERT INTO threads(tenant, name, used_s, bytes) VALUES (?, ?, ?, 0)",
                        (tenant, thread, now_s),
                    ).lastrowid
                    had = 0
                else:
                    row, had = found[0], found[1]
                more = 0
                for name, data in records.items():
                    key = (row, name)
                    old = connection.execute(
                        "SELECT length(data) FROM records WHERE thread = ? AND name = ?", key
                    ).fetchone()
                    if old and not replace:
                        continue
                    written.append(name)
                    more += len(data) - old[0] if old else len(data) + RECORD_BYTES
                    connection.execute("REPLACE INTO records VALUES (?, ?, ?)", (*key, data))
                if had + more > self._max_tenant_bytes:
                    raise ThreadFullError(f"a thread of {had + more} bytes")
                connection.execute(
                    "UPDATE threads SET bytes = ?, used_s = ? WHERE id = ?",
                    (had + more, now_s, row),
                )
                self._make_room(connection, tenant, _count(connection, tenant, more), row)
            return frozenset(written)

        return self._guarded(run)

    def _make_room(
        self, connection: sqlite3.Connection, tenant: str, total: int, keep: int | None
    ) -> None:
        """Remove a tenant's oldest threads until its records fit. `keep`: the thread that stays."""
        while total > self._max_tenant_bytes:
            oldest = connection.execute(
                "SELECT id, bytes FROM threads WHERE tenant = ? AND id != ? ORDER BY used_s "
                "LIMIT 1",
                (tenant, keep),
            ).fetchone()
            if oldest is None:
                return
            total = _remove_thread(connection, tenant, *oldest)

    def remove(self, tenant: str, thread: str, names: Sequence[str]) -> None:
        """Remove records in one transaction; see `RecordStore`."""

        def run(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                found = connection.execute(
                    "SELECT id, bytes FROM threads WHERE tenant = ? AND name = ?", (tenant, thread)
                ).fetchone()
                if found is None:
                    return
                row, had = found
                freed = 0
                for name in names:
                    old = connection.execute(
                        "DELETE FROM records WHERE thread = ? AND name = ? RETURNING length(data)",
                        (row, name),
                    ).fetchone()
                    freed += old[0] + RECORD_BYTES if old else 0
                if freed >= had:
                    _remove_thread(connection, tenant, row, had)
                else:
                    connection.execute(
                        "UPDATE threads SET bytes = bytes - ? WHERE id = ?", (freed, row)
                    )
                    _count(connection, tenant, -freed)

        self._guarded(run)

    def sweep(self, now_s: float) -> bool:
        """Remove some threads that expired; see `RecordStore`. The limits hold at each write."""

        def run(connection: sqlite3.Connection) -> bool:
            with _transaction(connection):
                expired = connection.execute(
                    "SELECT tenant, id, bytes FROM threads WHERE used_s <= ? LIMIT ?",
                    (now_s - self._ttl_s, EXPIRED_AT_ONCE),
                ).fetchall()
                for each in expired:
                    _remove_thread(connection, *each)
            return len(expired) == EXPIRED_AT_ONCE

        return self._guarded(run)

    def close(self) -> None:
        """Close the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _guarded(self, run: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run statements, with the file opened before and set aside if it is damaged.

        Raises:
            StoreError: they failed.
        """
        for last_try in (False, True):
            try:
                if self._connection is None:
                    self._open()
                assert self._connection is not None
                return run(self._connection)
            except OSError as error:
                raise StoreError(f"{self._file}: {error}") from error
            except sqlite3.Error as error:
                if last_try or error.sqlite_errorcode & 0xFF not in _DAMAGED:
                    raise StoreError(f"{self._file}: {error}") from error
                self._set_aside(error)
        raise AssertionError

    def _open(self) -> None:
        """Open the file, or make it, readable by its owner only."""
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600))
        self._inode = self._file.stat().st_ino
        connection = sqlite3.connect(
            self._file, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode=WAL").fetchone()
            for pragma in ("synchronous=NORMAL", "foreign_keys=ON", "temp_store=MEMORY"):
                connection.execute(f"PRAGMA {pragma}")
            connection.execute(f"PRAGMA journal_size_limit={WAL_BYTES}").fetchone()
            connection.executescript(_TABLES)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _set_aside(self, error: Exception) -> None:
        """Rename a damaged file, unless another gateway did so and began a new one."""
        logger.error("%s is damaged and set aside: %s", self._file, error)
        with contextlib.suppress(sqlite3.Error):
            self.close()
        self._connection = None
        with contextlib.suppress(FileNotFoundError):
            if self._file.stat().st_ino == self._inode:
                self._file.replace(self._file.with_suffix(".damaged"))
                for suffix in ("-wal", "-shm"):
                    self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _count(connection: sqlite3.Connection, tenant: str, more: int) -> int:
    """Add to the bytes of a tenant; return its new total."""
    row = connection.execute(
        "INSERT INTO tenants VALUES (?, ?) ON CONFLICT(tag) DO UPDATE SET bytes = bytes + "
        "excluded.bytes RETURNING bytes",
        (tenant, more),
    ).fetchone()
    return int(row[0])


def _remove_thread(connection: sqlite3.Connection, tenant: str, row: int, size: int) -> int:
    """Remove a thread with its records; return the bytes that its tenant has left."""
    connection.execute("DELETE FROM threads WHERE id = ?", (row,))
    left = _count(connection, tenant, -size)
    if left <= 0:
        connection.execute("DELETE FROM tenants WHERE tag = ?", (tenant,))
    return left

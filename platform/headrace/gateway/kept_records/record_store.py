"""The interface of the stores of records, and their errors.

Records lie by tenant, thread and name. The store sees sealed bytes only. A thread lives for a time
after its last write. A tenant's threads together have a limit of bytes: the thread whose last write
is oldest goes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

RECORD_BYTES = 256
"""Bytes that a record counts beyond its own, so that many tiny records reach the limit, too."""


class StoreError(Exception):
    """The error of a store that cannot be read or written now. The text says why, for the log."""


class ThreadFullError(StoreError):
    """The error of a thread that would alone exceed its tenant's limit."""


class RecordStore(Protocol):
    """A store of records. All methods block."""

    def read(
        self, tenant: str, thread: str, names: Sequence[str], now_s: float
    ) -> dict[str, bytes]:
        """Return the records with these names; those that do not exist or expired are left out.

        Args:
            tenant: the tenant's tag.
            now_s: Unix seconds.

        Raises:
            StoreError: the store cannot be read.
        """

    def sizes(self, tenant: str, thread: str, now_s: float) -> dict[str, int]:
        """Return the size of each record of a thread in bytes, by name; none if it expired.

        Raises:
            StoreError: the store cannot be read.
        """

    def write(self, tenant: str, thread: str, records: Mapping[str, bytes], now_s: float) -> None:
        """Write records of a thread, in the place of those with the same names.

        Raises:
            ThreadFullError: the thread would exceed the tenant's limit.
            StoreError: they cannot be written.
        """

    def create(
        self, tenant: str, thread: str, records: Mapping[str, bytes], now_s: float
    ) -> frozenset[str]:
        """Write those records of a thread whose names do not exist; the others stay as they are.

        Of several gateways that create a name at once, one writes it.

        Returns:
            The names that were written.

        Raises:
            ThreadFullError, StoreError: as `write`.
        """

    def remove(self, tenant: str, thread: str, names: Sequence[str]) -> None:
        """Remove records; those that do not exist are no error.

        Raises:
            StoreError: they cannot be removed.
        """

    def sweep(self, now_s: float) -> bool:
        """Remove threads that expired, and those beyond the limits.

        Returns:
            Whether there are more, which the next call removes.

        Raises:
            StoreError: they cannot be removed.
        """

    def close(self) -> None:
        """End the use of the store."""

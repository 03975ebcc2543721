"""The sealed records of one tenant: read, created, written and removed.

All methods block; `state_runner.StateRunner` runs them in its threads. A record of another tenant
is not found, since its place follows from the tenant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.gateway.kept_records.record_cipher import DamagedRecordError, RecordCipher
from headrace.gateway.kept_records.record_store import RecordStore

Record = TypeVar("Record", bound=msgspec.Struct)


def encode(record: msgspec.Struct) -> bytes:
    """Return a record as bytes."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[Record]) -> Record:
    """Return a record from its bytes.

    Raises:
        ValueError: these are no bytes of such a record.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


class TenantRecords:
    """The records of a tenant.

    Args:
        store: the records.
        cipher: seals and opens them.
        tenant: the tenant; None if no keys are configured.
        clock: Unix seconds.
    """

    def __init__(
        self,
        store: RecordStore,
        cipher: RecordCipher,
        tenant: str | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._cipher, self._tenant, self._clock = store, cipher, tenant, clock
        self._tag = cipher.tag(tenant)

    def _read(self, thread: str, names: Sequence[str], kind: type[Record]) -> dict[str, Record]:
        """Return those of the records that exist.

        Raises:
            DamagedRecordError: one does not open, or is of another kind.
        """
        return self._read_kinds(thread, dict.fromkeys(names, kind))

    def _read_kinds(self, thread: str, kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
        """Run `_read` for records of several kinds.

        Args:
            kinds: the kind of each record, by name.
        """
        sealed = self._store.read(self._tag, thread, list(kinds), self._clock())
        found: dict[str, Any] = {}
        for name, data in sealed.items():
            try:
                opened = self._cipher.open(self._tenant, thread, name, data)
                found[name] = decode(opened, kinds[name])
            except ValueError:
                raise DamagedRecordError(thread, name) from None
        return found

    def _one(self, thread: str, name: str, kind: type[Record]) -> Record | None:
        return self._read(thread, [name], kind).get(name)

    def _sizes(self, thread: str) -> dict[str, int]:
        """Return the size of each sealed record of a thread, by name."""
        return self._store.sizes(self._tag, thread, self._clock())

    def _write(self, thread: str, records: Mapping[str, msgspec.Struct]) -> None:
        self._store.write(self._tag, thread, self._sealed(thread, records), self._clock())

    def _create(self, thread: str, records: Mapping[str, msgspec.Struct]) -> frozenset[str]:
        """Write those records that do not exist; return their names."""
        sealed = self._sealed(thread, records)
        return self._store.create(self._tag, thread, sealed, self._clock())

    def _remove(self, thread: str, names: Sequence[str]) -> None:
        self._store.remove(self._tag, thread, names)

    def _sealed(self, thread: str, records: Mapping[str, msgspec.Struct]) -> dict[str, bytes]:
        return {
            name: self._cipher.seal(self._tenant, thread, name, encode(record))
            for name, record in records.items()
        }

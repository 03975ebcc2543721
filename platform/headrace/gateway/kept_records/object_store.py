"""Records in an object store, for gateways on several machines.

An object is a record: `TENANT/THREAD/NAME` below the URL. Each write of a thread renews it, since
its age is that of its newest object. Limits hold from sweep to sweep, because no gateway knows what
others write. Gateways sweep independently; removing an object twice does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace.gateway.kept_records.record_store import RECORD_BYTES, StoreError
from headrace_kvstore.objects.object_client import Listed, ObjectError, StoreClient

TIMEOUT_S = 5.0
"""Time limit of one request."""
THREADS = 8
"""Threads that use the store at once."""
OBJECTS_AT_ONCE = 16
"""Objects of a thread that are read or created at once."""
MAX_OBJECT_BYTES = 1 << 30
DELETED_AT_ONCE = 500
_NAME = re.compile(r"([0-9a-f]{32})/([0-9a-f]{16})/([a-z0-9-]{1,64})")


class ObjectRecordStore:
    """The store of records in an object store. Thread-safe.

    Args:
        url: such as `s3://bucket/prefix`; it is used for nothing else.
        options: options of the object store's client.
        ttl_s: seconds for which a thread lives after its last write.
        max_tenant_bytes: limit of a tenant's records.

    Raises:
        StoreError: the client refuses the URL or an option, or is not installed.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any], ttl_s: float, max_tenant_bytes: int
    ) -> None:
        self._ttl_s, self._max_tenant_bytes = ttl_s, max_tenant_bytes
        try:
            self._client = StoreClient(url, options, TIMEOUT_S)
        except (ImportError, OSError, ValueError) as error:
            raise StoreError(str(error)) from error
        self._workers = ThreadPoolExecutor(OBJECTS_AT_ONCE, "record-objects")

    def read(
        self, tenant: str, thread: str, names: Sequence[str], now_s: float
    ) -> dict[str, bytes]:
        """Return records, read at once; see `RecordStore`."""
        known = self.sizes(tenant, thread, now_s)
        wanted = [name for name in names if name in known]
        found = self._workers.map(lambda name: self._get(f"{tenant}/{thread}/{name}"), wanted)
        return {name: data for name, data in zip(wanted, found, strict=True) if data is not None}

    def sizes(self, tenant: str, thread: str, now_s: float) -> dict[str, int]:
        """Return the sizes of a thread's records; see `RecordStore`."""
        prefix = f"{tenant}/{thread}"
        try:
            listed = list(self._client.list(prefix=prefix))
        except ObjectError as error:
            raise StoreError(str(error)) from error
        if max((each.modified_s for each in listed), default=0.0) <= now_s - self._ttl_s:
            return {}
        return {each.name[len(prefix) + 1 :]: each.size_bytes for each in listed}

    def write(self, tenant: str, thread: str, records: Mapping[str, bytes], now_s: float) -> None:
        """Write records one after another; see `RecordStore`.

        A response's items come before the response, so that a response that is found is whole.
        """
        try:
            for name, data in records.items():
                self._client.put(f"{tenant}/{thread}/{name}", memoryview(data))
        except ObjectError as error:
            raise StoreError(str(error)) from error

    def create(
        self, tenant: str, thread: str, records: Mapping[str, bytes], now_s: float
    ) -> frozenset[str]:
        """Write records that do not exist, several at once; see `RecordStore`."""

        def put(record: tuple[str, bytes]) -> bool:
            return self._client.create(f"{tenant}/{thread}/{record[0]}", memoryview(record[1]))

        try:
            written = list(self._workers.map(put, records.items()))
        except ObjectError as error:
            raise StoreError(str(error)) from error
        return frozenset(name for name, is_new in zip(records, written, strict=True) if is_new)

    def remove(self, tenant: str, thread: str, names: Sequence[str]) -> None:
        """Remove records; see `RecordStore`."""
        self._delete([f"{tenant}/{thread}/{name}" for name in names])

    def sweep(self, now_s: float) -> bool:
        """Remove expired threads, and a tenant's oldest threads while it has too many bytes."""
        tenants: dict[str, dict[str, ListedThread]] = {}
        try:
            for each in self._client.list():
                place = _NAME.fullmatch(each.name)
                if place is not None:
                    threads = tenants.setdefault(place[1], {})
                    threads.setdefault(place[2], ListedThread()).add(each)
        except ObjectError as error:
            raise StoreError(str(error)) from error
        for threads in tenants.values():
            self._delete(surplus(threads.values(), now_s - self._ttl_s, self._max_tenant_bytes))
        return False

    def close(self) -> None:
        """End the threads that read and create."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _get(self, name: str) -> bytes | None:
        try:
            return bytes(self._client.get(name, 0, MAX_OBJECT_BYTES))
        except ObjectError as error:
            if error.reason == "absent":
                return None
            raise StoreError(str(error)) from error

    def _delete(self, names: Sequence[str]) -> None:
        try:
            for start in range(0, len(names), DELETED_AT_ONCE):
                self._client.delete(names[start : start + DELETED_AT_ONCE])
        except ObjectError as error:
            raise StoreError(str(error)) from error


@dataclass(slots=True)
class ListedThread:
    """A thread as it is listed.

    Attributes:
        used_s: Unix seconds of its last write.
        size_bytes: bytes of its records.
        names: its objects.
    """

    used_s: float = 0.0
    size_bytes: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, listed: Listed) -> None:
        """Add an object."""
        self.used_s = max(self.used_s, listed.modified_s)
        self.size_bytes += listed.size_bytes + RECORD_BYTES
        self.names.append(listed.name)


def surplus(threads: Iterable[ListedThread], before_s: float, max_bytes: int) -> list[str]:
    """Return the objects of a tenant that must go.

    Args:
        threads: the tenant's threads.
        before_s: the time of a thread's last write from which it is expired.
        max_bytes: maximum bytes of all threads; the newest one stays in any case.
    """
    gone: list[str] = []
    total = 0
    for number, thread in enumerate(sorted(threads, key=lambda each: -each.used_s)):
        total += thread.size_bytes
        if thread.used_s <= before_s or (number and total > max_bytes):
            gone += thread.names
    return gone

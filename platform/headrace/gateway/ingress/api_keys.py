"""API keys: the tenant and the role that a key proves, and its limits.

The keys come from the configuration and from a key file (`headrace.config.key_file`). The file is
read again when it changes, in a thread of its own, since a large one takes longer than a stream may
wait. If the file cannot be used, the keys stay as they were, the log and a metric report this, and
the file is tried again. A typing error therefore neither opens the endpoint nor locks all clients
out.

Entries are found by a key's hash, so the time of a look-up reveals nothing about any key.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config.file_stamp import ReloadSchedule, stamp_of
from headrace.config.key_file import KeyEntry, Role, hash_of, read_entries
from headrace.gateway import errors
from headrace.gateway.ingress.allowed_hosts import is_loopback
from headrace.gateway.ingress.rate_limit import RateLimit

logger = logging.getLogger("headrace.gateway")

ADMIN = "admin"
"""Name and tenant of the key whose hash the configuration holds."""
OPERATOR = "operator"
"""Name and tenant of the key that `headrace up` makes for its own commands."""
FORWARDING = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"})
"""Headers by which a proxy says that it forwards another client's request."""
CHECK_INTERVAL_S = 1.0
"""Time between two checks whether the file has changed."""


@dataclass(slots=True, eq=False)
class Caller:
    """A key in use: its tenant, its role and its rate limit.

    Attributes:
        tenant: the key's tenant; None if no keys are configured: then there is one trust domain,
            divided by cache salts only.
        slo: SLO class of requests that name none.
        slo_classes: SLO classes that requests may name; None for all.
        models: names of models that requests may use; None for all.
        max_retention_s: maximum seconds for which requests may have KV retained; None for the
            gateway's setting.
        rate_limit: the key's limits and its present usage.
        key_hash: hash of the key; empty if no keys are configured.
    """

    name: str = ""
    tenant: str | None = None
    role: Role = "admin"
    slo: str | None = None
    slo_classes: frozenset[str] | None = None
    models: frozenset[str] | None = None
    max_retention_s: int | None = None
    rate_limit: RateLimit = field(default_factory=RateLimit)
    key_hash: str = ""
    _packed: bytes = field(default=b"", repr=False)

    def apply(self, packed: bytes) -> None:
        """Apply the key's entry; the count of its running requests stays."""
        if packed is self._packed:
            return
        self._packed, entry = packed, KeyEntry.model_validate_json(packed)
        self.name, self.tenant, self.role = entry.name, entry.tenant, entry.role
        self.key_hash = entry.hash
        self.rate_limit.name = entry.name
        self.rate_limit.max_concurrent = entry.max_concurrent
        self.rate_limit.requests_per_minute = entry.requests_per_minute
        self.slo = entry.slo
        allowed = entry.slo_classes
        self.slo_classes = None if allowed is None else frozenset(allowed)
        self.models = None if entry.models is None else frozenset(entry.models)
        self.max_retention_s = entry.max_retention_s


ANONYMOUS = Caller()
"""The caller of all requests if no keys are configured."""


def may_administer(
    caller: Caller, client: Sequence[Any] | None, headers: Mapping[bytes, bytes]
) -> bool:
    """Return whether a request may administer the app: change its behaviour, or read its state.

    With keys, the request needs a key with the role admin. Without keys, the client must be on this
    machine, with no proxy between: a proxy is on this machine even if its client is not.

    Args:
        client: address and port of the client, as in ASGI; None if unknown.
        headers: the request's headers.
    """
    if caller is not ANONYMOUS:
        return caller.role == "admin"
    if client is None or any(name in headers for name in FORWARDING):
        return False
    if not is_loopback(headers.get(b"host")):
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


class ApiKeys:
    """The accepted keys; empty if none are configured. Use it from one event loop.

    Args:
        plain: keys from the configuration itself. Each is a tenant of its own, with the role user.
        file: a key file, or None.
        admin_hashes: hashes of keys with the role admin, by the key's name.
        now_s: a monotonic clock.
        classes: names of the SLO classes; None if they are not checked, because they are not used.

    Raises:
        ValueError: the file cannot be used. A wrong path therefore never opens the endpoint.
    """

    def __init__(
        self,
        plain: Iterable[str] = (),
        file: str | None = None,
        admin_hashes: Mapping[str, str] | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
        classes: Container[str] | None = None,
    ) -> None:
        self._classes = classes
        self._file = None if file is None else Path(file)
        self._configured = [_plain_entry(key) for key in plain]
        for name, hashed in (admin_hashes or {}).items():
            self._configured.append(KeyEntry(name=name, hash=hashed, tenant=name, role="admin"))
        self._callers: dict[str, Caller] = {}
        self._watching: asyncio.Task[None] | None = None
        stamp = None if self._file is None else stamp_of(self._file)
        self._reload = ReloadSchedule(stamp, now_s)
        self._entries = self._read()

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def are_stale(self) -> bool:
        """Whether the file has changed and cannot be read, so that older keys stay accepted."""
        return self._reload.is_stale

    def caller(self, authorization: bytes | None, api_key: bytes | None = None) -> Caller:
        """Return the caller that a request's key proves; `ANONYMOUS` if no keys are configured.

        Args:
            authorization: the header `Authorization`, which OpenAI's clients send.
            api_key: the header `x-api-key`, which Anthropic's clients send.

        Raises:
            ApiError: 401, the key is missing or unknown.
        """
        if not self:
            return ANONYMOUS
        scheme, _, key = (authorization or b"").partition(b" ")
        if authorization is None:
            scheme, key = b"bearer", api_key or b""
        hashed = hash_of(key.strip())
        caller = self.caller_of_hash(hashed)
        if caller is None or scheme.lower() != b"bearer":
            raise errors.invalid_api_key()
        return caller

    def caller_of_hash(self, key_hash: str) -> Caller | None:
        """Return the caller of a key that was proved before; None if it is no longer accepted.

        Args:
            key_hash: the key's hash; empty for a time when no keys were configured.
        """
        if not self:
            return ANONYMOUS if not key_hash else None
        entry = self._entries.get(key_hash)
        if entry is None:
            return None
        caller = self._callers.setdefault(key_hash, Caller())
        caller.apply(entry)
        return caller

    def start(self) -> None:
        """Start to watch the file, on the running event loop."""
        if self._file is not None:
            self._watching = asyncio.create_task(self._watch(), name="api-keys")

    async def aclose(self) -> None:
        """Stop watching the file."""
        if self._watching is not None:
            watching, self._watching = self._watching, None
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self.refresh()
            except Exception:
                logger.exception("cannot check the key file")

    async def refresh(self) -> None:
        """Read the file again if it has changed."""
        if self._file is None:
            return
        stamp = await asyncio.to_thread(stamp_of, self._file)
        if not self._reload.is_due(stamp):
            return
        try:
            entries = await asyncio.to_thread(self._read)
        except ValueError as error:
            self._reload.record_failure(stamp)
            logger.error("the API keys stay as they were: %s", error)
            return
        self._reload.record_success(stamp)
        self._entries = entries
        self._callers = {k: caller for k, caller in self._callers.items() if k in entries}
        logger.info("read %s: %d API keys are accepted", self._file, len(entries))

    def _read(self) -> dict[str, bytes]:
        """Return all entries by hash, with those of the file's present content. Blocks.

        Raises:
            ValueError: the file cannot be used, or names an SLO class that does not exist.
        """
        found = {entry.hash: packed(entry) for entry in self._configured}
        for entry in () if self._file is None else read_entries(self._file):
            if self._classes is not None:
                for name in [*([entry.slo] if entry.slo else []), *(entry.slo_classes or ())]:
                    if name not in self._classes:
                        raise ValueError(
                            f"{self._file}: the key '{entry.name}' has the SLO class '{name}', "
                            "which gateway.admission.classes does not have"
                        )
            found[entry.hash] = packed(entry)
        return found


def packed(entry: KeyEntry) -> bytes:
    """Return an entry as JSON: one object, which the garbage collector does not visit."""
    return entry.model_dump_json(exclude_none=True).encode()


def _plain_entry(key: str) -> KeyEntry:
    hashed = hash_of(key.encode())
    name = f"key-{hashed[7:19]}"
    return KeyEntry(name=name, hash=hashed, tenant=name)

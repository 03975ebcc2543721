"""Who asks: the tenant and the role that an API key stands for, and what that key may use.

The keys come from the configuration and from a key file (`headrace.config.keyfile`). The file is
read again when it changes. A file that has become useless changes nothing: the keys stay as they
were, and the log says why. So a slip of the pen neither opens the door nor locks everybody out.

A key's hash finds its entry, so the time of a look-up tells nothing about any key.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config.filestamp import stamp_of
from headrace.config.keyfile import KeyEntry, Role, hash_of, read_keys
from headrace.gateway import errors

logger = logging.getLogger("headrace.gateway")

OPERATOR = "operator"
"""Name and tenant of the key that `headrace up` makes for its own commands."""
FORWARDING = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"})
"""Headers by which a proxy says that it forwards for somebody else."""
LOOK_EVERY_S = 1.0
"""Time between looks whether the file has changed."""


@dataclass(slots=True, eq=False)
class Caller:
    """A key that was shown, and what its requests use now.

    Attributes:
        tenant: None where no keys are configured: one trust domain, divided by cache salts only.
        slo: SLO class of requests that name none. slo_classes: those that they may name; None for
            all.
    """

    name: str = ""
    tenant: str | None = None
    role: Role = "admin"
    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    slo: str | None = None
    slo_classes: frozenset[str] | None = None
    running: int = 0
    _allowance: float = field(default=0.0, repr=False)
    _since_s: float = field(default=0.0, repr=False)

    @contextmanager
    def request(self, now_s: float) -> Iterator[None]:
        """Hold one request of this key.

        Raises:
            ApiError: 429, with the time after which it may be tried again.
        """
        if self.max_concurrent is not None and self.running >= self.max_concurrent:
            raise errors.key_is_busy(self.name, self.max_concurrent)
        self._spend(now_s)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _spend(self, now_s: float) -> None:
        """Take one request from the allowance, which fills evenly and holds a minute's worth."""
        most = self.requests_per_minute
        if most is None:
            return
        filled = most if not self._since_s else (now_s - self._since_s) * most / 60.0
        self._allowance = min(float(most), self._allowance + filled)
        self._since_s = now_s
        if self._allowance < 1.0:
            raise errors.key_is_too_fast(self.name, most, (1.0 - self._allowance) * 60.0 / most)
        self._allowance -= 1.0


ANYONE = Caller()
"""Everybody, where no keys are configured."""


def may_administer(caller: Caller, client: Sequence[Any] | None, seen: Container[bytes]) -> bool:
    """Whether a request may change how the app works, or look into it.

    With keys that takes one whose role is admin. Without keys it takes a client on this machine,
    and no proxy in between: a proxy is on this machine whoever its client is.

    Args:
        client: address and port, as ASGI has them; None if nobody knows.
        seen: the names of the request's headers.
    """
    if caller is not ANYONE:
        return caller.role == "admin"
    if client is None or any(name in seen for name in FORWARDING):
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


class Keys:
    """The keys that are accepted; empty if none are configured. Used from one event loop.

    Args:
        plain: keys from the configuration itself. Each is a tenant of its own, with the role user.
        file: a key file, or None.
        admin_hash: hash of a key with the role admin, which the command line uses.
        now_s: a monotonic clock.
        classes: names of the SLO classes; None where classes are not checked, as nothing uses them.

    Raises:
        ValueError: the file cannot be used, so that a wrong path never leaves the door open.
    """

    def __init__(
        self,
        plain: Iterable[str] = (),
        file: str | None = None,
        admin_hash: str | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
        classes: Container[str] | None = None,
    ) -> None:
        self._now_s, self._classes = now_s, classes
        self._file = None if file is None else Path(file)
        self._plain = [_plain_entry(key) for key in plain]
        if admin_hash is not None:
            self._plain.append(
                KeyEntry(name=OPERATOR, hash=admin_hash, tenant=OPERATOR, role="admin")
            )
        self._callers: dict[str, Caller] = {}
        self._stamp: tuple[int, ...] | None = None
        self._next_look_s = now_s() + LOOK_EVERY_S
        entries = list(self._plain)
        if self._file is not None:
            self._stamp = stamp_of(self._file)
            entries += self._read(self._file)
        self._take(entries)

    def __bool__(self) -> bool:
        return bool(self._callers) or self._file is not None

    def caller(self, authorization: bytes | None, api_key: bytes | None = None) -> Caller:
        """The caller that a request's key proves; anyone where no keys are configured.

        Args:
            authorization: the header `Authorization`, which OpenAI's clients send.
            api_key: the header `x-api-key`, which Anthropic's clients send.

        Raises:
            ApiError: 401.
        """
        if not self:
            return ANYONE
        self._look()
        scheme, _, key = (authorization or b"").partition(b" ")
        if authorization is None:
            scheme, key = b"bearer", api_key or b""
        found = self._callers.get(hash_of(key.strip()))
        if found is None or scheme.lower() != b"bearer":
            raise errors.invalid_api_key()
        return found

    def _look(self) -> None:
        """Read the file again if it has changed, at most once a second."""
        now_s = self._now_s()
        if self._file is None or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        stamp = stamp_of(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            entries = self._read(self._file)
        except ValueError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self._take([*self._plain, *entries])
        logger.info("read %d API keys from %s", len(entries), self._file)

    def _read(self, file: Path) -> list[KeyEntry]:
        """The file's keys.

        Raises:
            ValueError: it cannot be used, or names an SLO class that there is not.
        """
        entries = read_keys(file).keys
        if self._classes is not None:
            for entry in entries:
                named = [*([entry.slo] if entry.slo else []), *(entry.slo_classes or ())]
                for name in named:
                    if name not in self._classes:
                        raise ValueError(
                            f"{file}: the key '{entry.name}' has the SLO class '{name}', which "
                            "gateway.admission.classes does not have"
                        )
        return entries

    def _take(self, entries: Iterable[KeyEntry]) -> None:
        """Accept these keys from now on; what a key's requests use is kept."""
        before, self._callers = self._callers, {}
        for entry in entries:
            caller = before.get(entry.hash) or Caller()
            caller.name, caller.tenant, caller.role = entry.name, entry.tenant, entry.role
            caller.max_concurrent = entry.max_concurrent
            caller.requests_per_minute = entry.requests_per_minute
            caller.slo = entry.slo
            allowed = entry.slo_classes
            caller.slo_classes = None if allowed is None else frozenset(allowed)
            self._callers[entry.hash] = caller


def _plain_entry(key: str) -> KeyEntry:
    hashed = hash_of(key.encode())
    name = f"key-{hashed[7:19]}"
    return KeyEntry(name=name, hash=hashed, tenant=name)

"""Who asks: which tenant and role an API key stands for, and what that key may use.

A key file is YAML, written by `headrace keys` or by hand:

    keys:
    - name: checkout-service            # what logs and `headrace keys list` call the key
      hash: sha256:5e88...              # SHA-256 of the key, in hexadecimal; not the key itself
      tenant: shop                      # keys of one tenant share KV and drafts; others never do
      role: user                        # user, or admin: may also change how the app works
      max_concurrent: 16                # requests under way at once; left out: no limit
      requests_per_minute: 600          # left out: no limit

Keys are random and long, so that a plain SHA-256 cannot be searched. The hash finds the entry; how
long a look-up takes tells nothing about a key.

The file is read again when it changes. A file that cannot be used any more changes nothing: the
keys stay as they were, and the log says why. So a slip of the pen neither opens the door nor locks
everybody out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace.gateway import errors

logger = logging.getLogger("headrace.gateway")

LOOK_EVERY_S = 1.0
"""Time between looks whether the file has changed."""
MAX_FILE_BYTES = 16 * 2**20
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")

Role = Literal["user", "admin"]
Name = Annotated[str, Field(pattern=NAME)]


class KeyEntry(BaseModel):
    """One key of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    hash: Annotated[str, Field(pattern=_HASH.pattern)]
    tenant: Name
    role: Role = "user"
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None


class KeyFile(BaseModel):
    """The whole file. No two entries have the same name or the same key."""

    model_config = ConfigDict(extra="forbid")

    keys: list[KeyEntry]

    @model_validator(mode="after")
    def _are_unique(self) -> KeyFile:
        for field_name in ("name", "hash"):
            seen: set[str] = set()
            for entry in self.keys:
                value = getattr(entry, field_name)
                if value in seen:
                    raise ValueError(f"two keys have the {field_name} {value!r}")
                seen.add(value)
        return self


@dataclass(slots=True)
class Caller:
    """A key that was shown, and what its requests use now.

    Attributes:
        tenant: None where no keys are configured: one trust domain, divided by cache salts only.
    """

    name: str = ""
    tenant: str | None = None
    role: Role = "admin"
    max_concurrent: int | None = None
    requests_per_minute: int | None = None
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


class Keys:
    """The keys that are accepted; empty if none are configured. Used from one event loop.

    Args:
        plain: keys from the configuration itself. Each is a tenant of its own, with the role user.
        file: a key file, or None.
        now_s: a monotonic clock.

    Raises:
        ValueError: the file cannot be used, so that a wrong path never leaves the door open.
    """

    def __init__(
        self,
        plain: Iterable[str] = (),
        file: str | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now_s = now_s
        self._file = None if file is None else Path(file)
        self._plain = [_plain_entry(key) for key in plain]
        self._callers: dict[str, Caller] = {}
        self._stamp: tuple[int, ...] | None = None
        self._next_look_s = now_s() + LOOK_EVERY_S
        entries = list(self._plain)
        if self._file is not None:
            self._stamp = _stamp(self._file)
            entries += read_keys(self._file).keys
        self._take(entries)

    def __bool__(self) -> bool:
        return bool(self._callers) or self._file is not None

    def caller(self, authorization: bytes | None) -> Caller:
        """The caller that an `Authorization: Bearer KEY` header proves; anyone without keys.

        Raises:
            ApiError: 401.
        """
        if not self:
            return ANYONE
        self._look()
        scheme, _, key = (authorization or b"").partition(b" ")
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
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            entries = read_keys(self._file).keys
        except ValueError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self._take([*self._plain, *entries])
        logger.info("read %d API keys from %s", len(entries), self._file)

    def _take(self, entries: Iterable[KeyEntry]) -> None:
        """Accept these keys from now on; what a key's requests use is kept."""
        before, self._callers = self._callers, {}
        for entry in entries:
            caller = before.get(entry.hash) or Caller()
            caller.name, caller.tenant, caller.role = entry.name, entry.tenant, entry.role
            caller.max_concurrent = entry.max_concurrent
            caller.requests_per_minute = entry.requests_per_minute
            self._callers[entry.hash] = caller


def hash_of(key: bytes) -> str:
    """The `hash` of a key."""
    return "sha256:" + hashlib.sha256(key).hexdigest()


def read_keys(file: Path) -> KeyFile:
    """A key file.

    Raises:
        ValueError: it cannot be read, or is no key file; with the path to the wrong field.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{file}: is larger than {MAX_FILE_BYTES} bytes")
        data = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file}: is no key file; `headrace keys add` writes one")
    try:
        found = KeyFile.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{file}: {_first_fault(error)}") from None
    if not found.keys:
        raise ValueError(f"{file}: holds no key; `headrace keys add` adds one")
    return found


def write_keys(file: Path, keys: KeyFile) -> None:
    """Replace a key file at once; only its owner may read it."""
    values = [entry.model_dump(exclude_none=True) for entry in keys.keys]
    draft = file.with_name(f"{file.name}.{os.getpid()}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            yaml.safe_dump({"keys": values}, out, sort_keys=False)
            out.flush()
            os.fsync(out.fileno())
        os.replace(draft, file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _plain_entry(key: str) -> KeyEntry:
    hashed = hash_of(key.encode())
    name = f"key-{hashed[7:19]}"
    return KeyEntry(name=name, hash=hashed, tenant=name)


def _stamp(file: Path) -> tuple[int, ...] | None:
    """What changes when the file does; None if it is gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _first_fault(error: ValidationError) -> str:
    fault: dict[str, Any] = dict(error.errors(include_url=False, include_input=False)[0])
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in fault["loc"]).lstrip(".")
    return f"{where}: {fault['msg']}" if where else str(fault["msg"])

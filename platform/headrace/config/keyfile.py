"""The key file: which API keys there are, by hash, and what each stands for.

The file is YAML, written by `headrace keys` or by hand:

    keys:
    - name: checkout-service            # what logs and `headrace keys list` call the key
      hash: sha256:5e88...              # SHA-256 of the key, in hexadecimal; not the key itself
      tenant: shop                      # keys of one tenant share KV and drafts; others never do
      role: user                        # user, or admin: may also change how the app works
      max_concurrent: 16                # requests under way at once; left out: no limit
      requests_per_minute: 600          # left out: no limit
      slo: interactive                  # SLO class of requests that name none
      slo_classes: [interactive, batch] # those that requests may name; left out: all

Keys are random and long, so a plain SHA-256 cannot be searched.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_FILE_BYTES = 16 * 2**20
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
HASH = r"^sha256:[0-9a-f]{64}$"
KEY_BYTES = 32

Role = Literal["user", "admin"]
Name = Annotated[str, Field(pattern=NAME)]


class KeyEntry(BaseModel):
    """One key of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    hash: Annotated[str, Field(pattern=HASH)]
    tenant: Name
    role: Role = "user"
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    slo: Name | None = None
    slo_classes: Annotated[list[Name], Field(min_length=1, max_length=64)] | None = None

    @model_validator(mode="after")
    def _may_have_its_own_class(self) -> KeyEntry:
        if self.slo and self.slo_classes is not None and self.slo not in self.slo_classes:
            raise ValueError(f"slo: {self.slo!r} is not one of slo_classes")
        return self


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


def new_key() -> str:
    """A key that nobody can guess."""
    return "hr-" + secrets.token_urlsafe(KEY_BYTES)


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


def _first_fault(error: ValidationError) -> str:
    fault: dict[str, Any] = dict(error.errors(include_url=False, include_input=False)[0])
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in fault["loc"]).lstrip(".")
    return f"{where}: {fault['msg']}" if where else str(fault["msg"])

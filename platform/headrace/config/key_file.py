"""The key file: the hashes of the API keys, and the tenant, role and limits of each.

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
      models: [small, chat]             # models and aliases that requests may name; left out: all
      max_retention_s: 86400            # seconds that requests may have KV retained in DRAM; left
                                        # out: gateway.max_retention_s

Keys are random and long, so a plain SHA-256 cannot be searched.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_FILE_BYTES = 16 * 2**20
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
HASH = r"^sha256:[0-9a-f]{64}$"
KEY_BYTES = 32
MAX_DEPTH = 8

Role = Literal["user", "admin"]
Name = Annotated[str, Field(pattern=NAME)]
RetentionSeconds = Annotated[int, Field(ge=0, le=86_400)]
"""The maximum seconds for which a request may have KV retained: 0 for none, at most a day."""
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
"""The name of a model, or of an alias, in a request."""


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

    models: Annotated[list[ModelName], Field(min_length=1, max_length=256)] | None = None
    max_retention_s: RetentionSeconds | None = None

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
        for _ in _unique(self.keys):
            pass
        return self


def _unique(entries: Iterable[KeyEntry]) -> Iterator[KeyEntry]:
    """Pass entries on.

    Raises:
        ValueError: two have the same name or the same key.
    """
    names: set[str] = set()
    hashes: set[str] = set()
    for entry in entries:
        for field, value, seen in (("name", entry.name, names), ("hash", entry.hash, hashes)):
            if value in seen:
                raise ValueError(f"two keys have the {field} {value!r}")
            seen.add(value)
        yield entry


def new_key() -> str:
    """Return a new key that cannot be guessed."""
    return "hr-" + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: bytes) -> str:
    """Return the `hash` of a key."""
    return "sha256:" + hashlib.sha256(key).hexdigest()


def read_keys(file: Path) -> KeyFile:
    """Return a key file's contents.

    Raises:
        ValueError: it cannot be read, or is no key file; with the path to the wrong field.
    """
    return KeyFile.model_construct(keys=list(read_entries(file)))


def read_entries(file: Path) -> Iterator[KeyEntry]:
    """Read a key file entry by entry.

    Nothing of an entry is kept here: a list of 10,000 of them, or PyYAML's tree of their nodes, is
    so many objects that one garbage collection takes 0.1 to 0.23 s, in which no stream of the
    process moves.

    Raises:
        ValueError: it cannot be read, or is no key file; with the path to the wrong field.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{file}: is larger than {MAX_FILE_BYTES} bytes")
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    count = 0
    try:
        for count, entry in enumerate(_unique(_entries(text)), 1):  # noqa: B007
            yield entry
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: is no YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if not count:
        raise ValueError(f"{file}: holds no key; `headrace keys add` adds one")


def write_keys(file: Path, keys: KeyFile) -> None:
    """Replace a key file in one step; its owner, group and mode stay.

    A new file is readable by its owner only. Where the file is a symbolic link, the file that it
    leads to is replaced.

    Raises:
        OSError: it cannot be written, or the owner cannot be kept: then it stays as it was.
    """
    file = file.resolve()
    values = [entry.model_dump(exclude_none=True) for entry in keys.keys]
    draft = file.with_name(f"{file.name}.{os.getpid()}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            _keep_owner(file, out.fileno())
            yaml.dump({"keys": values}, out, yaml.CSafeDumper, sort_keys=False)
            out.flush()
            os.fsync(out.fileno())
        os.replace(draft, file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _keep_owner(file: Path, draft: int) -> None:
    """Give the draft the owner, group and mode of the file that it will replace, if there is one.

    A gateway that runs as another user than the command could not read it otherwise.
    """
    try:
        before = file.stat()
    except FileNotFoundError:
        return
    mine = os.fstat(draft)
    if (before.st_uid, before.st_gid) != (mine.st_uid, mine.st_gid):
        try:
            os.fchown(draft, before.st_uid, before.st_gid)
        except PermissionError:
            raise PermissionError(
                errno.EPERM,
                f"it belongs to user {before.st_uid} and group {before.st_gid}, which only root or "
                "that user can keep; run the command as that user",
            ) from None
    os.fchmod(draft, before.st_mode & 0o777)


def _entries(text: str) -> Iterator[KeyEntry]:
    """Parse the entries of a key file, straight from libyaml's events.

    Raises:
        yaml.YAMLError: it is no YAML.
        ValueError: it is no key file; with the path to the wrong field.
    """
    loader = yaml.CSafeLoader(text)
    try:
        loader.get_event()  # the stream's begin
        if not loader.check_event(yaml.StreamEndEvent):
            loader.get_event()  # the document's begin
        if not loader.check_event(yaml.MappingStartEvent):
            raise ValueError("is no key file; `headrace keys add` writes one")
        loader.get_event()
        count = 0
        while not loader.check_event(yaml.MappingEndEvent):
            name = _value(loader)
            if name != "keys" or count:
                raise ValueError(f"{name}: is there twice, or unknown; the one field is keys")
            if not isinstance(loader.get_event(), yaml.SequenceStartEvent):
                raise ValueError("keys: must be a list")
            while not loader.check_event(yaml.SequenceEndEvent):
                try:
                    yield KeyEntry.model_validate(_value(loader))
                except ValidationError as error:
                    raise ValueError(_first_fault(error, f"keys[{count}]")) from None
                count += 1
            loader.get_event()
        loader.get_event()  # the mapping's end
        loader.get_event()  # the document's end
        if not loader.check_event(yaml.StreamEndEvent):
            raise ValueError("has a second document; one is allowed")
    finally:
        loader.dispose()


def _value(loader: yaml.CSafeLoader, depth: int = 0) -> Any:
    event: Any = loader.get_event()
    if depth > MAX_DEPTH:
        raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not loader.check_event(yaml.SequenceEndEvent):
            items.append(_value(loader, depth + 1))
        loader.get_event()
        return items
    if isinstance(event, yaml.MappingStartEvent):
        fields: dict[Any, Any] = {}
        while not loader.check_event(yaml.MappingEndEvent):
            first: Any = loader.peek_event()
            name = _value(loader, depth + 1)
            if not isinstance(name, str) or name in fields:
                raise yaml.MarkedYAMLError(
                    problem=f"{name!r} is there twice, or is no name", problem_mark=first.start_mark
                )
            fields[name] = _value(loader, depth + 1)
        loader.get_event()
        return fields
    if isinstance(event, yaml.ScalarEvent):
        tag = event.tag or loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        begin: Any = event.start_mark
        node = yaml.ScalarNode(tag, event.value, begin, begin, event.style)
        construct = loader.yaml_constructors.get(tag)
        if construct is None:
            raise yaml.MarkedYAMLError(problem=f"the tag {tag}", problem_mark=begin)
        return construct(loader, node)  # `construct_object` keeps every node until the end
    raise yaml.MarkedYAMLError(problem="an alias", problem_mark=event.start_mark)


def _first_fault(error: ValidationError, path: str) -> str:
    fault: dict[str, Any] = dict(error.errors(include_url=False, include_input=False)[0])
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in fault["loc"])
    return f"{path}{where}: {fault['msg']}"

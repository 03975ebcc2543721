"""`headrace keys`: makes, lists and revokes the API keys of a key file.

A key is shown once, when it is made; the file keeps its hash. Gateways that use the file read it
again within a second or two, so nothing has to be restarted.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError
from rich.table import Table

from headrace.cli.console import CliError, stderr, stdout
from headrace.config.key_file import (
    KeyEntry,
    KeyFile,
    Role,
    hash_of,
    new_key,
    read_keys,
    write_keys,
)


def add(
    file: Path,
    *,
    name: str,
    tenant: str | None,
    role: Role,
    max_concurrent: int | None,
    requests_per_minute: int | None,
    models: list[str] | None = None,
    max_retention_s: int | None = None,
    as_json: bool = False,
) -> None:
    """Make a key, add it to the file, and print it on stdout.

    Raises:
        CliError: the name is taken or impossible, or the file cannot be used.
    """
    key = new_key()
    try:
        entry = KeyEntry(
            name=name,
            hash=hash_of(key.encode()),
            tenant=tenant or name,
            role=role,
            max_concurrent=max_concurrent,
            requests_per_minute=requests_per_minute,
            models=models or None,
            max_retention_s=max_retention_s,
        )
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise CliError(
            f'"{wrong["input"]}" cannot be the {wrong["loc"][0]} of a key; use 1 to 64 letters, '
            'digits, ".", "_" and "-", a letter or digit first',
            2,
        ) from None
    with _locked(file):
        before = _read(file).keys if file.exists() else []
        if any(each.name == name for each in before):
            raise CliError(f"{file} has a key named {name}; revoke it first, or take another name")
        write_keys(file, KeyFile(keys=[*before, entry]))
    stderr().print(
        f"added {name} for tenant {entry.tenant} to {file}; the key is shown only now:",
        markup=False,
    )
    if as_json:
        print(json.dumps({"key": key, **entry.model_dump(exclude={"hash"})}))
    else:
        print(key)


def show_list(file: Path, *, as_json: bool) -> None:
    """Print the keys of a file, without their hashes.

    Raises:
        CliError: the file cannot be used.
    """
    keys = _read(file).keys
    if as_json:
        print(json.dumps([each.model_dump(exclude={"hash"}) for each in keys], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "tenant", "role"):
        table.add_column(column, no_wrap=True)
    for column in ("concurrent", "a minute"):
        table.add_column(column, justify="right")
    if some_limited := any(each.models for each in keys):
        table.add_column("models", overflow="fold")
    for each in keys:
        limits = (each.max_concurrent, each.requests_per_minute)
        shown = ("-" if limit is None else str(limit) for limit in limits)
        models = [", ".join(each.models or ["all"])] if some_limited else []
        table.add_row(each.name, each.tenant, each.role, *shown, *models)
    stdout().print(table)


def revoke(file: Path, name: str) -> None:
    """Remove a key from the file.

    Raises:
        CliError: there is no such key, it is the last one, or the file cannot be used.
    """
    with _locked(file):
        before = _read(file).keys
        kept = [each for each in before if each.name != name]
        if len(kept) == len(before):
            raise CliError(f"{file} has no key named {name}; see `headrace keys list`")
        if not kept:
            raise CliError(
                f"{name} is the last key of {file}, and a file without keys is refused; "
                "add another one first"
            )
        write_keys(file, KeyFile(keys=kept))
    stdout().print(f"revoked {name}; gateways that use {file} refuse it within seconds")


def _read(file: Path) -> KeyFile:
    try:
        return read_keys(file)
    except ValueError as error:
        raise CliError(str(error)) from None


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Keep two commands from losing each other's change."""
    lock = file.with_name(f".{file.name}.lock")
    try:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror or error}") from error

"""`headrace model`: download, list, locate and verify models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from headrace import model as models
from headrace.cli.console import CliError, human_bytes, stdout
from headrace.model.bucket import SCHEMES, copy_bucket

T = TypeVar("T")


def fetch(name: str) -> None:
    """Download a model, with a progress bar on stderr, and print its folder."""
    print(_call(lambda: models.fetch(name)))


def copy(url: str, folder: Path) -> None:
    """Copy a model out of an object store, with a progress bar on stderr, and print its folder."""
    if not url.startswith(SCHEMES):
        raise CliError(f"{url}: must begin with {', '.join(SCHEMES)}")
    with models.terminal() as report:
        print(_call(lambda: copy_bucket(url, folder, report)))


def show_list(*, as_json: bool) -> None:
    """Print the models that Headrace knows by name."""
    found = models.list_models()
    if as_json:
        listed = [
            {
                "name": each.name,
                "size_bytes": each.size_bytes,
                "license": each.license,
                "description": each.summary,
                "folder": str(each.path) if each.cached else None,
            }
            for each in found
        ]
        print(json.dumps(listed, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "license", "description"):
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for each in found:
        table.add_row(each.name, human_bytes(each.size_bytes), each.license, each.summary)
    stdout().print(table)
    for each in found:
        where = f"in {each.path}" if each.cached else "not downloaded"
        stdout().print(f"{each.name}: {where}", markup=False)


def path(name: str) -> None:
    """Print the folder of a model. Raises CliError if it is not on this machine."""
    cached = _cached(name)
    if cached is None and name in models.REGISTRY:
        raise CliError(f"{name} is not downloaded; download it with: headrace model fetch {name}")
    print(cached or _call(lambda: models.resolve(name)))


def verify(name: str) -> None:
    """Compare a cached model with its checksums."""
    folder = _cached(name)
    if folder is None:
        known = ", ".join(sorted(models.REGISTRY))
        raise CliError(f"{name} is not in the cache; the models with checksums are: {known}")
    _call(lambda: models.verify(folder))
    print(f"{folder}: all checksums match")


def _cached(name: str) -> str | None:
    found = [str(m.path) for m in models.list_models() if m.name == name and m.cached]
    return found[0] if found else None


def _call(work: Callable[[], T]) -> T:
    try:
        return work()
    except models.ModelError as error:
        raise CliError(str(error)) from None

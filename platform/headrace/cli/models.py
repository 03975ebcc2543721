"""`headrace model`: download, list, locate and verify models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rich.table import Table

from headrace import model as models
from headrace.cli.console import CliError, human_bytes, stdout

T = TypeVar("T")


def fetch(name: str) -> None:
    """Download a model, with a progress bar on stderr, and print its folder."""
    print(_call(lambda: models.fetch(name)))


def show_list() -> None:
    """Print the models that Headrace knows by name."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "license", "description", "folder"):
        table.add_column(column, overflow="fold")
    for entry in models.list_models():
        folder = str(entry.path) if entry.cached else "not downloaded"
        size = human_bytes(entry.size_bytes)
        table.add_row(entry.name, size, entry.license, entry.summary, folder)
    stdout().print(table)


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

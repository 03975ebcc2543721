"""Which files import a package when they are imported, found without importing them.

Importing vLLM takes ten seconds of a core: tests that need it share a process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("platform", "prefill", "decode", "engine", "kvstore", "lab", ".")
IMPORT = r"(?:import ([\w.]+)|from ([\w.]+) import (\([^)]*\)|.*)|.*importorskip\(\"(\w+))"
AT_IMPORT = re.compile(f"^{IMPORT}", re.MULTILINE)
EVER = re.compile(f"^ *{IMPORT}", re.MULTILINE)
FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:    .*\n)+", re.MULTILINE)


def imports(test: Path, package: str) -> bool:
    """Whether a file of tests imports the package, in a test at the latest; itself, by a module's
    name in a string, or because it imports a file of this repository that begins with importing it.
    """
    if re.search(rf'"{package}[."]', test.read_text("utf-8")):
        return True
    seen, todo = {test}, list(_found(test, EVER))
    while todo:
        name = todo.pop()
        if name.partition(".")[0] == package:
            return True
        if (file := _file(name)) is not None and file not in seen:
            seen.add(file)
            todo += _names(file)
    return False


@cache
def _names(file: Path) -> tuple[str, ...]:
    return tuple(_found(file, AT_IMPORT))


def _found(file: Path, statement: re.Pattern[str]) -> Iterator[str]:
    """Modules that a file may import, and packages that these are in."""
    source = FOR_TYPES.sub("", file.read_text("utf-8"))
    for plain, module, names, skipping in statement.findall(source):
        if module:
            yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))
        parts = (plain or module or skipping).split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


@cache
def _file(module: str) -> Path | None:
    path = module.replace(".", "/")
    for folder in FOLDERS:
        for file in (ROOT / folder / f"{path}.py", ROOT / folder / path / "__init__.py"):
            if file.exists():
                return file
    return None

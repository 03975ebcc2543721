"""Where the tests' compiled functions are kept: a folder for each state of what is compiled.

numba keeps a function's code until that function's own file changes, with all that was compiled
into it from other files. Here the folder's name is a digest of every file that can be part of
compiled code, so code is compiled once for each state of the sources, and never stale.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "numba"
ROOTS = [ROOT / part for part in ("platform", "prefill", "decode", "kvstore", "engine", "lab")]
KEEP_S = 7 * 24 * 3600.0


def keep_compiled() -> Path:
    """Have this process and its children keep compiled code in the folder of these sources. Before
    numba is imported. Folders that were not used for a week are removed."""
    chosen = FOLDER / digest()
    chosen.mkdir(parents=True, exist_ok=True)
    os.utime(chosen)
    for old in FOLDER.iterdir():
        if time.time() - old.stat().st_mtime > KEEP_S:
            shutil.rmtree(old, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(chosen)
    return chosen


def digest(roots: list[Path] | None = None) -> str:
    """Of the files that compile functions, of all that those import, and of numba's version."""
    modules = {_name(file, root): file for root in roots or ROOTS for file in root.rglob("*.py")}
    sources = {name: file.read_text("utf-8") for name, file in modules.items()}
    reached: set[str] = set()
    todo = [name for name, source in sources.items() if "jit" in source]
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo += [found for found in _imports(sources[name]) if found in sources]
    sum_ = hashlib.sha256(f"{sys.version} {importlib.metadata.version('numba')}".encode())
    for name in sorted(reached):
        sum_.update(f"{name}\n{sources[name]}\n".encode())
    return sum_.hexdigest()[:16]


def _name(file: Path, root: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imports(source: str) -> Iterator[str]:
    """Modules that a file may import; this code imports by absolute names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

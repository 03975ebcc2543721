"""Compiled code, also where no folder can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_kvstore import numba_jit as compiled


def test_without_a_writable_folder_code_is_compiled_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    njit = compiled.njit

    def nowhere(**options: bool) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(compiled, "njit", nowhere)
    assert compiled.jit(nogil=True)(lambda x: x + 1)(1) == 2


def test_everything_imports_where_neither_home_nor_package_can_be_written(tmp_path: Path) -> None:
    """Numba finds no folder for what it compiles: all of its locators are taken away."""
    program = (
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "import headrace_kvstore.arena.kernels, headrace_kvstore.blocks.checksum as checksum\n"
        "import headrace_kvstore.policy, headrace_kvstore.codec\n"
        "assert checksum.checksum_of(b'x', 1) != checksum.checksum_of(b'y', 1)\n"
    )
    without = {k: v for k, v in os.environ.items() if k not in ("HOME", "NUMBA_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=without, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

"""Mooncake's wheel for CPUs, in a folder of its own outside this project's environment."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

from benchmarks import packages
from benchmarks.kvstore.timing import CannotRun

PACKAGE, VERSION = "mooncake-transfer-engine-non-cuda", "0.3.13.post1"


def install() -> Path:
    """Return the folder that holds the package `mooncake`.

    Raises:
        CannotRun: it cannot be installed.
    """
    folder = packages.install("mooncake", PACKAGE, VERSION, "mooncake/mooncake_master")
    for name in ("mooncake_master", "mooncake_client"):
        (folder / "mooncake" / name).chmod(0o755)
    return folder


def library_path() -> str:
    """LD_LIBRARY_PATH for Mooncake's programs, which want libibverbs even where they use TCP.

    Where the system has none, the one inside NIXL's wheel does.

    Raises:
        CannotRun: there is neither.
    """
    given = os.environ.get("LD_LIBRARY_PATH", "")
    try:
        ctypes.CDLL("libibverbs.so.1")
        return given
    except OSError:
        pass
    for package in ("nixl_cu12", "nixl_cu13"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        bundled = Path(spec.origin).parents[1] / f"{package}.libs"
        for library in bundled.glob("libibverbs-*.so*"):
            links = packages.FOLDER / "lib"
            links.mkdir(parents=True, exist_ok=True)
            link = links / "libibverbs.so.1"
            link.unlink(missing_ok=True)
            link.symlink_to(library)
            return ":".join(filter(None, (str(links), str(bundled), given)))
    raise CannotRun("Mooncake needs libibverbs.so.1, which is not here")

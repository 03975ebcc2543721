"""Mooncake's wheel for CPUs, in a folder of its own outside this project's environment."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.kvstore.timing import CannotRun

PACKAGE, VERSION = "mooncake-transfer-engine-non-cuda", "0.3.13.post1"
FOLDER = Path("~/.cache/headrace/bench").expanduser() / f"mooncake-{VERSION}"
DOWNLOAD_S = 300.0


def install() -> Path:
    """Return the folder that holds the package `mooncake`, filled from PyPI the first time.

    Raises:
        CannotRun: it cannot be had, or does not load here.
    """
    if not (FOLDER / "mooncake" / "mooncake_master").exists():
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"]
        command += ["--target", str(FOLDER), f"{PACKAGE}=={VERSION}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotRun(f"{PACKAGE} was not installed: {error}") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise CannotRun(f"{PACKAGE} was not installed: {last}")
    for name in ("mooncake_master", "mooncake_client"):
        (FOLDER / "mooncake" / name).chmod(0o755)
    return FOLDER


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
            links = FOLDER / "lib"
            links.mkdir(parents=True, exist_ok=True)
            link = links / "libibverbs.so.1"
            link.unlink(missing_ok=True)
            link.symlink_to(library)
            return ":".join(filter(None, (str(links), str(bundled), given)))
    raise CannotRun("Mooncake needs libibverbs.so.1, which is not here")

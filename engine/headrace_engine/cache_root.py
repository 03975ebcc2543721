"""The folder for files that are worth keeping between starts: models and step times."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_root(env: Mapping[str, str] = os.environ) -> Path:
    """Return $HEADRACE_CACHE, else headrace/ in $XDG_CACHE_HOME, else in ~/.cache."""
    if env.get("HEADRACE_CACHE"):
        return Path(env["HEADRACE_CACHE"]).expanduser().absolute()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"

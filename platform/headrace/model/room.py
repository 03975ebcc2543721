"""Tells how much room there is for a model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

MODEL_ROOM = "HEADRACE_MODEL_ROOM_BYTES"
"""Environment variable that the chart sets: the limit of the volume with the models."""


def room_bytes(folder: Path, env: Mapping[str, str] = os.environ) -> int | None:
    """Return how large a folder may grow: the free space of its disk, and no more than MODEL_ROOM,
    beyond which the pod is evicted; None if neither is known."""
    limit = env.get(MODEL_ROOM, "")
    known = [int(limit)] if limit.isdigit() else []
    if folder.is_dir():
        known.append(shutil.disk_usage(folder).free)
    return min(known, default=None)

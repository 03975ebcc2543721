"""The step times of earlier rehearsals, kept in the cache folder.

An engine that starts again with the same model and options on the same machine learns its step
times from the file of the last rehearsal, and only warms up (`rehearsal`). A file counts for
`MAX_AGE_S`. A file that is missing, old or damaged costs a rehearsal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace_engine.cache_root import cache_root
from headrace_engine.meter import Step

logger = logging.getLogger("headrace.engine")

FORMAT = 1
MAX_AGE_S = 7 * 86400.0
"""A machine's speed changes when its driver, kernel or neighbours do."""
MAX_BYTES = 64 * 1024
MAX_STEPS = 256
MAX_FILES = 64


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    steps: list[Step]


def machine_facts() -> dict[str, Any]:
    """Return the machine's part of a file's key: the processor, and the cores of this process."""
    model = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    binding = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
    return {"cpu": model, "cores": sorted(os.sched_getaffinity(0)), **binding}


def steps_file(facts: Mapping[str, Any]) -> Path:
    """Return the file of the engines that these facts describe.

    Args:
        facts: everything on which step times depend, JSON values.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return cache_root() / "step_times" / f"{digest[:32]}.json"


def read_steps(path: Path, now_s: float | None = None) -> list[Step]:
    """Return the steps in a file; none if it is missing, older than `MAX_AGE_S` or damaged.

    Args:
        now_s: time as `time.time` gives it.
    """
    try:
        with path.open("rb") as file:
            age_s = (time.time() if now_s is None else now_s) - os.fstat(file.fileno()).st_mtime
            content = file.read(MAX_BYTES + 1)
        found = msgspec.json.decode(content, type=_File)
    except (OSError, msgspec.MsgspecError):
        return []
    usable = found.format == FORMAT and age_s <= MAX_AGE_S and len(content) <= MAX_BYTES
    return found.steps if usable and all(map(_is_plausible, found.steps)) else []


def write_steps(path: Path, steps: Sequence[Step]) -> None:
    """Write a file whole, and remove the oldest of more than `MAX_FILES`. Failures are logged."""
    content = msgspec.json.encode(_File(FORMAT, list(steps[:MAX_STEPS])))
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
        files = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in files[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.info("step times are not kept for the next start: %s", error)


def _is_plausible(step: Step) -> bool:
    counts = step.prompt, step.rows, step.draft, step.context, step.pairs
    return all(math.isfinite(n) and n >= 0 for n in counts) and 0.0 < step.seconds < 3600.0

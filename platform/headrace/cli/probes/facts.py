"""Describes the facts that must be equal on the machines of both roles.

Values of the environment travel as digests; variables whose name speaks of a secret do not travel.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.cli.probes.gpu import driver_version, torch_cuda
from headrace.cli.probes.machine import package_versions, python_version

PREFIXES = ("VLLM_", "UCX_", "NIXL_")
SINGLE = ("PYTHONHASHSEED",)
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
# These name the pod or its own files, so they differ and may.
PERSONAL = ("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")


def describe(role_env: Mapping[str, str], model: Path | None) -> dict[str, Any]:
    """Return this machine's facts: versions, processor, KV-relevant environment and model.

    Args:
        role_env: variables that the configuration gives to engines, over this container's own.
        model: the model's folder, if it is here.
    """
    env = {k: v for k, v in {**os.environ, **role_env}.items() if _matters(k)}
    major, minor = python_version()
    return {
        "versions": {
            "python": f"{major}.{minor}",
            "headrace": __version__,
            **package_versions(),
            "cuda build": torch_cuda(),
            "machine": platform.machine(),
        },
        "driver": driver_version(),
        "env": {k: digest(v.encode()) for k, v in sorted(env.items())},
        "model": model_digest(model) if model is not None else None,
    }


def _matters(name: str) -> bool:
    if name in PERSONAL or any(word in name for word in SECRET):
        return False
    return name.startswith(PREFIXES) or name in SINGLE


def digest(data: bytes) -> str:
    """Return the beginning of a SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def model_digest(folder: Path) -> str:
    """Return a digest of small files' bytes and weights' names and sizes. Reads no weights."""
    parts = []
    for file in sorted(folder.iterdir()):
        with suppress(OSError):
            if file.suffix in (".safetensors", ".bin", ".gguf"):
                parts.append(f"{file.name} {file.stat().st_size}")
            elif file.name in ("config.json", "tokenizer.json", "chat_template.jinja"):
                parts.append(f"{file.name} {digest(file.read_bytes())}")
    return digest("\n".join(parts).encode())

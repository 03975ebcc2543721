"""Files of LoRA adapters that are never loaded."""

from __future__ import annotations

from pathlib import Path

from headrace_engine.adapters.sources import CONFIG, WEIGHTS


def write_adapter(folder: Path, weights: bytes = b"weights") -> Path:
    """Write an adapter's files into a folder; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_bytes(weights)
    return folder

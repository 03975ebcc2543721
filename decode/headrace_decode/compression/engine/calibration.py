"""The file of `headrace lab calibrate compression`: a model's predictor, and the error at each
keep ratio.

A `calibration_file` with the five tensors of `ImportancePredictor`, float32. Its JSON has the
model, the pages, and the mean KL of a token by keep ratio, over contexts that the predictor did not
learn from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from headrace_decode.attention import calibration_file as files
from headrace_decode.attention.calibration_file import (
    CalibrationError,
    CalibrationResult,
    ModelShape,
    Shapes,
)
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_decode.compression.importance_predictor import ImportancePredictor

COMMAND = "headrace lab calibrate compression MODEL --texts FOLDER --out FILE"
KIND = files.CalibrationKind(
    "headrace_compression_calibration", 1, "headrace lab calibrate compression", COMMAND
)
MAX_WIDTH = 1024


def write(path: Path, calibration: CalibrationResult, predictor: ImportancePredictor) -> None:
    """Write a file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {
        f.name: getattr(predictor, f.name).contiguous().numpy() for f in fields(ImportancePredictor)
    }
    files.write(path, KIND, calibration, tensors)


def read(path: Path) -> CalibrationResult:
    """Read a file's measurements, without its predictor.

    Raises:
        CalibrationError: the file cannot be read, or is of another kind.
    """
    return files.read(path, KIND, _parse)[0]


def read_predictor(path: Path, shape: ModelShape, page_tokens: int) -> ImportancePredictor:
    """Read a file's predictor.

    Args:
        shape, page_tokens: model's shape and page of the engine that it is for.

    Raises:
        CalibrationError: as for `read`; or the file is for another model or page.
    """

    def check(found: CalibrationResult, shapes: Shapes) -> None:
        found.check(shape, page_tokens)
        width, size = [0, *shapes.get("shift", ())][-1], 2 * shape.head_dim
        heads = [shape.layers, shape.kv_heads]
        wanted = {
            "into": [*heads, size, width],
            "shift": [*heads, width],
            "out": [*heads, width],
            "straight": [*heads, size],
            "level": heads,
        }
        files.check_shapes(shapes, wanted)
        if not 1 <= width <= MAX_WIDTH:
            raise CalibrationError(f"it is damaged: its width is {width}")

    _, tensors = files.read(path, KIND, _parse, check)
    return ImportancePredictor(**{name: torch.from_numpy(one) for name, one in tensors.items()})


def required_predictor(
    settings: CompressionSettings, shape: ModelShape, page_tokens: int
) -> ImportancePredictor | None:
    """Read the predictor that settings name; None if they name none.

    Args:
        shape, page_tokens: as for `read_predictor`.

    Raises:
        RuntimeError: the file cannot be used. The scheduler relies on the predictor, so the engine
            cannot run without it.
    """
    file = settings.calibration
    if file is None:
        return None
    try:
        return read_predictor(Path(file), shape, page_tokens)
    except CalibrationError as error:
        raise RuntimeError(
            f"techniques.compression.calibration: {file} cannot be used: {error}"
        ) from None


def digest(path: Path) -> bytes:
    """Return a digest that distinguishes a file's predictor from others.

    Raises:
        OSError: the file cannot be read.
    """
    return sha256(path.read_bytes()).digest()


def _parse(content: Mapping[str, Any]) -> CalibrationResult:
    found = CalibrationResult.parse(content)
    if not found.kl or not all(
        0 < keep_ratio <= 1 and kl > 0 for keep_ratio, kl in found.kl.items()
    ):
        raise CalibrationError(f"it is damaged: its keep ratios are {dict(found.kl)}")
    return found

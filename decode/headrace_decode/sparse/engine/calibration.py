"""The file of `headrace lab calibrate sparse`: a model's bases, and the error at each keep ratio.

A `calibration_file` with three tensors, float32, for all layers,

    origin  [layers, kv_heads, head_dim]
    into    [layers, kv_heads, head_dim, rank]
    back    [layers, kv_heads, rank, head_dim]

Its JSON has the model, the pages, KL by keep ratio, the target KL, and the ratio that meets it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace_decode.attention import calibration_file as files
from headrace_decode.attention.calibration_file import (
    CalibrationError,
    CalibrationResult,
    ModelShape,
    Shapes,
)
from headrace_decode.sparse.basis import Basis

logger = logging.getLogger("headrace.sparse")

COMMAND = "headrace lab calibrate sparse MODEL --texts FOLDER --out FILE"
KIND = files.CalibrationKind(
    "headrace_sparse_calibration", 3, "headrace lab calibrate sparse", COMMAND
)

_TENSORS = ("origin", "into", "back")


@dataclass(frozen=True)
class Calibration(CalibrationResult):
    """Measurements of a model's bases.

    Attributes:
        target_kl: maximum KL that was allowed.
        keep_ratio: minimum keep ratio that keeps to it.
    """

    target_kl: float
    keep_ratio: float


def write(path: Path, calibration: Calibration, bases: Sequence[Basis]) -> None:
    """Write a file atomically.

    Args:
        bases: basis of each layer, all of one rank.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {name: np.stack([getattr(one, name) for one in bases]) for name in _TENSORS}
    files.write(path, KIND, calibration, tensors)


def read(path: Path) -> Calibration:
    """Read a file's measurements, without its bases.

    Raises:
        CalibrationError: the file cannot be read, or is of another kind.
    """
    return files.read(path, KIND, _parse)[0]


def read_bases(path: Path, shape: ModelShape, page_tokens: int) -> list[Basis]:
    """Read the basis of each layer.

    Args:
        shape, page_tokens: model's shape and page of the engine that they are for.

    Raises:
        CalibrationError: as for `read`; or the file is for another model or page.
    """

    def check(found: Calibration, shapes: Shapes) -> None:
        found.check(shape, page_tokens)
        rank = [0, *shapes.get("into", ())][-1]
        heads = [shape.layers, shape.kv_heads]
        wanted = {
            "origin": [*heads, shape.head_dim],
            "into": [*heads, shape.head_dim, rank],
            "back": [*heads, rank, shape.head_dim],
        }
        files.check_shapes(shapes, wanted)
        if rank % 2 or not 2 <= rank <= shape.head_dim:
            raise CalibrationError(f"it is damaged: it has {rank} coordinates")

    _, tensors = files.read(path, KIND, _parse, check)
    return [Basis(*(tensors[name][layer] for name in _TENSORS)) for layer in range(shape.layers)]


def bases_for(file: Path, config: Mapping[str, Any], page_tokens: int) -> list[Basis] | None:
    """Read the bases of a calibration; None, with the reason in the log, if it cannot be used.

    Args:
        config: configuration of the engine's model, as `ModelShape.of` takes it.
    """
    try:
        return read_bases(file, ModelShape.of(config), page_tokens)
    except CalibrationError as error:
        logger.warning(
            "techniques.sparse.calibration: %s cannot be used: %s. This engine attends without a "
            "basis, and errs more than was calibrated. `%s` makes such a file",
            file,
            error,
            COMMAND,
        )
        return None


def _parse(content: Mapping[str, Any]) -> Calibration:
    found = Calibration(
        **vars(CalibrationResult.parse(content)),
        target_kl=float(content["target_kl"]),
        keep_ratio=float(content["keep_ratio"]),
    )
    if not 0 < found.keep_ratio <= 1 or not math.isfinite(found.target_kl):
        raise CalibrationError(f"it is damaged: its keep ratio is {found.keep_ratio}")
    return found

"""The file of `headrace lab calibrate bounded`: a model's gate, and the error at each share.

A `calibration_file` with the five tensors of `Gate`, float32. Its JSON has the model, the units,
and the mean KL of a token by share, over contexts that the gate did not learn from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from headrace_decode.compression.gate import Gate
from headrace_decode.sparse import calibration_file as files
from headrace_decode.sparse.calibration_file import CalibrationError, Measured, Shape, Shapes

COMMAND = "headrace lab calibrate bounded MODEL --texts FOLDER --out FILE"
KIND = files.Kind("headrace_bounded_calibration", 1, "headrace lab calibrate bounded", COMMAND)
MAX_WIDTH = 1024


def write(path: Path, calibration: Measured, gate: Gate) -> None:
    """Write a file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {f.name: getattr(gate, f.name).contiguous().numpy() for f in fields(Gate)}
    files.write(path, KIND, calibration, tensors)


def read(path: Path) -> Measured:
    """Read a file's measurements, without its gate.

    Raises:
        CalibrationError: the file cannot be read, or is of another kind.
    """
    return files.read(path, KIND, _told)[0]


def read_gate(path: Path, shape: Shape, unit_tokens: int) -> Gate:
    """Read a file's gate.

    Args:
        shape, unit_tokens: model's shape and unit of the engine that it is for.

    Raises:
        CalibrationError: as for `read`; or the file is for another model or unit.
    """

    def check(found: Measured, shapes: Shapes) -> None:
        found.check(shape, unit_tokens)
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

    _, tensors = files.read(path, KIND, _told, check)
    return Gate(**{name: torch.from_numpy(one) for name, one in tensors.items()})


def digest(path: Path) -> bytes:
    """Return a digest that distinguishes a file's gate from others.

    Raises:
        OSError: the file cannot be read.
    """
    return sha256(path.read_bytes()).digest()


def _told(told: Mapping[str, Any]) -> Measured:
    found = Measured.told(told)
    if not found.kl or not all(0 < share <= 1 and kl > 0 for share, kl in found.kl.items()):
        raise CalibrationError(f"it is damaged: its shares are {dict(found.kl)}")
    return found

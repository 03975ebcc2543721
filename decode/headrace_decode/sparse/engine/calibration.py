"""The file that `headrace calibrate sparse` writes: a model's bases, and what a share costs.

A safetensors file of three tensors, float32, for all layers,

    origin  [layers, kv_heads, head_dim]
    into    [layers, kv_heads, head_dim, rank]
    back    [layers, kv_heads, rank, head_dim]

with JSON in its metadata under `KEY`: version, model, KL by share, the target and its share. It is
read as any input: sizes are compared with the model that it names before a tensor is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from headrace_decode.sparse.basis import Basis

KEY = "headrace_sparse_calibration"
VERSION = 2
MOST_BYTES, MOST_HEADER_BYTES = 256 * 2**20, 2**16
MOST_SHARES = 100
FARTHEST = 1e6
"""Of a number in a basis; those of models are below 100."""
COMMAND = "headrace calibrate sparse MODEL --texts FOLDER --out FILE"

_TENSORS = ("origin", "into", "back")
_ROPE = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow"),
)


class CalibrationError(ValueError):
    """The file cannot be used; the text says why, without its name."""


@dataclass(frozen=True)
class Shape:
    """What of a model decides which keys and queries there are, but for its weights.

    Attributes:
        hidden_size, layers, heads, kv_heads, head_dim: of the model.
        rope: kind and numbers of its rotary embedding.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: str

    @staticmethod
    def of(config: Mapping[str, Any]) -> Shape:
        """From a model's `config.json`, or the same from `transformers`.

        Raises:
            CalibrationError: a field is missing.
        """
        try:
            heads = int(config["num_attention_heads"])
            rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
            theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
            numbers = {name: float(rope[name]) for name in _ROPE if rope.get(name) is not None}
            if numbers.get("partial_rotary_factor") == 1.0:
                del numbers["partial_rotary_factor"]
            kind = str(rope.get("rope_type", rope.get("type", "default")))
            return Shape(
                int(config["hidden_size"]),
                int(config["num_hidden_layers"]),
                heads,
                int(config.get("num_key_value_heads") or heads),
                int(config.get("head_dim") or config["hidden_size"] // heads),
                " ".join(
                    [kind, f"theta={float(theta):g}", *(f"{k}={numbers[k]:g}" for k in numbers)]
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CalibrationError(f"the model's configuration is not known: {error!r}") from None

    def differences(self, other: Shape) -> str:
        """In words, with our values first; empty if there are none."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return ", ".join(
            f"{name} {mine} instead of {its}" for name, mine, its in pairs if mine != its
        )


@dataclass(frozen=True)
class Calibration:
    """What was learned of a model, and measured.

    Attributes:
        model: its name, for messages.
        shape: of the model.
        unit_tokens: that shares were measured at and deviations taken from.
        kl: mean KL(exact || sparse) of a token in nats, by share.
        target_kl: that was allowed.
        share: the least one that keeps to it.
    """

    model: str
    shape: Shape
    unit_tokens: int
    kl: Mapping[float, float]
    target_kl: float
    share: float

    def check(self, shape: Shape, unit_tokens: int) -> None:
        """Raises CalibrationError unless it is of such a model and unit."""
        if other := self.shape.differences(shape):
            raise CalibrationError(f"it is of another model, {self.model}: {other}")
        if self.unit_tokens != unit_tokens:
            raise CalibrationError(
                f"it is for units of {self.unit_tokens} tokens instead of {unit_tokens}"
            )


def write(path: Path, calibration: Calibration, bases: Sequence[Basis]) -> None:
    """Write a file, whole or not at all.

    Args:
        bases: of each layer, of one rank.

    Raises:
        OSError: it cannot be written.
    """
    told = asdict(calibration) | {"kl": [[*each] for each in calibration.kl.items()]}
    tensors = {name: np.stack([getattr(one, name) for one in bases]) for name in _TENSORS}
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_bytes(save(tensors, {KEY: json.dumps({"version": VERSION} | told)}))
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def read(path: Path) -> Calibration:
    """What a file says, without its bases.

    Raises:
        CalibrationError: it cannot be read, or is no such file.
    """
    return _read(path)[0]


def read_bases(path: Path, shape: Shape, unit_tokens: int) -> list[Basis]:
    """The bases of each layer.

    Args:
        shape, unit_tokens: of the engine that they are for.

    Raises:
        CalibrationError: as `read`; or the file is of another model or unit.
    """
    _, tensors = _read(path, shape, unit_tokens)
    return [Basis(*(tensors[name][layer] for name in _TENSORS)) for layer in range(shape.layers)]


def _read(
    path: Path, shape: Shape | None = None, unit_tokens: int = 0
) -> tuple[Calibration, dict[str, NDArray[np.float32]]]:
    """The tensors only where a shape is given."""
    try:
        with path.open("rb") as raw:
            size, header = path.stat().st_size, int.from_bytes(raw.read(8), "little")
        if size > MOST_BYTES or not 0 < header <= min(MOST_HEADER_BYTES, size):
            raise CalibrationError("it is not of `headrace calibrate sparse`, or is damaged")
        with safe_open(path, "np") as file:
            calibration = _told((file.metadata() or {}).get(KEY, ""))
            if shape is None:
                return calibration, {}
            calibration.check(shape, unit_tokens)
            _check_tensors(file, shape)
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
    except OSError as error:
        raise CalibrationError(f"it cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CalibrationError(f"it is damaged: {error}") from None
    for name, one in tensors.items():
        if not np.abs(one).max() <= FARTHEST:  # NaN is none, either
            raise CalibrationError(f"it is damaged: {name} has numbers that no basis has")
    return calibration, tensors


def _check_tensors(file: Any, shape: Shape) -> None:
    if sorted(file.keys()) != sorted(_TENSORS):
        raise CalibrationError("it is damaged: it has other tensors")
    parts = {name: file.get_slice(name) for name in _TENSORS}
    heads = shape.layers, shape.kv_heads
    rank = [0, *parts["into"].get_shape()][-1]
    wanted = {
        "origin": [*heads, shape.head_dim],
        "into": [*heads, shape.head_dim, rank],
        "back": [*heads, rank, shape.head_dim],
    }
    for name, part in parts.items():
        if part.get_shape() != wanted[name] or part.get_dtype() != "F32":
            raise CalibrationError(f"it is damaged: {name} is {part.get_shape()}")
    if rank % 2 or not 2 <= rank <= shape.head_dim:
        raise CalibrationError(f"it is damaged: it has {rank} coordinates")


def _told(text: str) -> Calibration:
    try:
        told = json.loads(text)
        if told["version"] != VERSION:
            raise CalibrationError(
                f"its version is {told['version']!r} instead of {VERSION}; make it again: {COMMAND}"
            )
        model, shape = told["model"], told["shape"]
        kl = {float(share): float(kl) for share, kl in told["kl"][:MOST_SHARES]}
        found = Calibration(
            str(model)[:200],
            Shape(**{f.name: shape[f.name] for f in fields(Shape)}),
            int(told["unit_tokens"]),
            kl,
            float(told["target_kl"]),
            float(told["share"]),
        )
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError("it is not of `headrace calibrate sparse`, or is damaged") from None
    if not 0 < found.share <= 1 or not math.isfinite(found.target_kl):
        raise CalibrationError(f"it is damaged: its share is {found.share}")
    return found

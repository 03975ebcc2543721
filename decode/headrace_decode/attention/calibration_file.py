"""Calibration files of a model: learned tensors in float32, and measurements made with them.

Each is a safetensors file with JSON in its metadata, under a key of its kind. It is checked like
any input: version, model and the shapes of all tensors before a tensor is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

MAX_BYTES, MAX_HEADER_BYTES = 256 * 2**20, 2**16
MAX_SHARES = 100
MAX_MAGNITUDE = 1e6
"""Maximum magnitude of a number in a tensor; numbers of models are below 100."""

_ROPE = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow"),
)

Shapes = Mapping[str, list[int]]
T = TypeVar("T")


class CalibrationError(ValueError):
    """The file cannot be used; the text says why, without its name."""


@dataclass(frozen=True)
class CalibrationKind:
    """Kind of calibration file.

    Attributes:
        key: key of the JSON in the metadata. version: version that is read and written.
        name, command: program that makes such a file, and its command line, for messages.
    """

    key: str
    version: int
    name: str
    command: str

    @property
    def invalid(self) -> CalibrationError:
        return CalibrationError(f"it is not of `{self.name}`, or is damaged")


@dataclass(frozen=True)
class ModelShape:
    """Properties of a model, apart from its weights, that its keys and queries depend on.

    Attributes:
        hidden_size, layers, heads, kv_heads, head_dim: sizes of the model.
        rope: kind and numbers of its rotary embedding.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: str

    @staticmethod
    def of(config: Mapping[str, Any]) -> ModelShape:
        """Read the shape from a model's `config.json`, or its equivalent in `transformers`.

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
            return ModelShape(
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

    def differences(self, other: ModelShape) -> str:
        """Describe the differences in words, our values first; empty if there are none."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return ", ".join(
            f"{name} {mine} instead of {its}" for name, mine, its in pairs if mine != its
        )


@dataclass(frozen=True)
class CalibrationResult:
    """Measurements that every calibration has.

    Attributes:
        model: the model's name, for messages.
        shape: the model's shape.
        page_tokens: tokens of the pages that shares were measured with.
        kl: mean KL of a token to the exact model, nats, by keep ratio.
    """

    model: str
    shape: ModelShape
    page_tokens: int
    kl: Mapping[float, float]

    def check(self, shape: ModelShape, page_tokens: int) -> None:
        """Check that it is for such a model and page.

        Raises:
            CalibrationError: it is not.
        """
        if other := self.shape.differences(shape):
            raise CalibrationError(f"it is of another model, {self.model}: {other}")
        if self.page_tokens != page_tokens:
            raise CalibrationError(
                f"it is for pages of {self.page_tokens} tokens instead of {page_tokens}"
            )

    @staticmethod
    def parse(content: Mapping[str, Any]) -> CalibrationResult:
        """Parse the JSON that `write` made. Older files have `unit_tokens` for `page_tokens`.

        Raises:
            KeyError, TypeError, ValueError: it is not valid.
        """
        shape, kl = content["shape"], content["kl"][:MAX_SHARES]
        page_tokens = content["page_tokens"] if "page_tokens" in content else content["unit_tokens"]
        return CalibrationResult(
            str(content["model"])[:200],
            ModelShape(**{f.name: shape[f.name] for f in fields(ModelShape)}),
            int(page_tokens),
            {float(keep_ratio): float(one) for keep_ratio, one in kl},
        )


def write(
    path: Path,
    kind: CalibrationKind,
    measured: CalibrationResult,
    tensors: Mapping[str, NDArray[np.float32]],
) -> None:
    """Write a file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    content = asdict(measured) | {"kl": [[*each] for each in measured.kl.items()]}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps({"version": kind.version, **content})
    try:
        partial.write_bytes(save(dict(tensors), {kind.key: text}))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(
    path: Path,
    kind: CalibrationKind,
    parse: Callable[[Mapping[str, Any]], T],
    check: Callable[[T, Shapes], None] | None = None,
) -> tuple[T, dict[str, NDArray[np.float32]]]:
    """Read a file's JSON, and its tensors if `check` is given.

    Args:
        parse: parses the JSON; raises KeyError, TypeError or ValueError if it is not valid.
        check: raises CalibrationError if the JSON, or the shapes of the tensors, are not
            as wanted. None: no tensors are read.

    Raises:
        CalibrationError: the file cannot be read, is damaged, or is of another kind.
    """
    try:
        with path.open("rb") as raw:
            size, header = path.stat().st_size, int.from_bytes(raw.read(8), "little")
        if size > MAX_BYTES or not 0 < header <= min(MAX_HEADER_BYTES, size):
            raise kind.invalid
        with safe_open(path, "np") as file:
            found = _parse((file.metadata() or {}).get(kind.key, ""), kind, parse)
            if check is None:
                return found, {}
            names = file.keys()
            parts = {name: file.get_slice(name) for name in names}
            for name, part in parts.items():
                if part.get_dtype() != "F32":
                    raise CalibrationError(f"it is damaged: {name} is {part.get_dtype()}")
            check(found, {name: list(part.get_shape()) for name, part in parts.items()})
            tensors = {name: file.get_tensor(name) for name in parts}
    except OSError as error:
        raise CalibrationError(f"it cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CalibrationError(f"it is damaged: {error}") from None
    for name, one in tensors.items():
        if not np.abs(one).max(initial=0.0) <= MAX_MAGNITUDE:  # false for NaN, too
            raise CalibrationError(f"it is damaged: {name} has numbers that no model has")
    return found, tensors


def check_shapes(found: Shapes, wanted: Shapes) -> None:
    """Check that tensors have the wanted names and shapes.

    Raises:
        CalibrationError: they have others.
    """
    if found.keys() != wanted.keys():
        raise CalibrationError("it is damaged: it has other tensors")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CalibrationError(f"it is damaged: {name} is {found[name]}")


def _parse(text: str, kind: CalibrationKind, parse: Callable[[Mapping[str, Any]], T]) -> T:
    try:
        content = json.loads(text)
        if content["version"] != kind.version:
            raise CalibrationError(
                f"its version is {content['version']!r} instead of {kind.version}; make it again: "
                f"{kind.command}"
            )
        return parse(content)
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise kind.invalid from None

"""Moves keys from one position to another: K' = R(p_new - p_old) K.

A rotary embedding turns pair j of a key's channels by position * w_j: channels (j, j + D/2), or
(2j, 2j + 1) if pairs are interleaved. Turning by a difference of positions is exact as long as w_j
depends on neither position nor length, so `Rope.of` refuses scalings for which it does. The order
of a model's pairs is not in its configuration: `headrace_engine.vllm.rotary_embedding` reads it
from the loaded model. Keys are turned in fp32, from the stored original: a key that was turned and
rounded is never turned again. Values carry no position. Source: RoFormer (arXiv 2104.09864),
section 3.2.2; Llama 3's scaling as in `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LINEAR_IN_POSITION = ("default", "linear", "llama3")

Turns = tuple[Tensor, Tensor]
"""Cosines and sines, each fp32 [tokens or 1, 1, head_dim / 2]."""


class RopeError(ValueError):
    """Keys of this model cannot be moved."""


@dataclass(frozen=True)
class Rope:
    """A model's rotary embedding.

    Attributes:
        speeds: w_j, fp64 [head_dim / 2], radians a position.
        is_interleaved: whether pairs are channels (2j, 2j + 1), not (j, j + half).
    """

    speeds: Tensor
    is_interleaved: bool = False

    @staticmethod
    def of(config: Mapping[str, Any], is_interleaved: bool = False) -> Rope:
        """Read the embedding in a model's `config.json`.

        Raises:
            RopeError: the embedding is of a kind whose keys cannot be moved exactly.
        """
        try:
            rope = Rope(_speeds(config), is_interleaved)
        except RopeError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise RopeError(f"the rotary embedding cannot be read: {error!r}") from None
        if not (rope.speeds.isfinite() & (rope.speeds > 0)).all():
            raise RopeError(
                "the rotary embedding turns pairs by no angle, or by none that is finite"
            )
        return rope

    def shift(self, keys: Tensor, difference: int | Tensor) -> Tensor:
        """Move keys `difference` positions further on.

        Args:
            keys: [tokens, heads, head_dim], of any float dtype.
            difference: positions, of either sign; or int64 [tokens].

        Returns:
            The moved keys, in the shape and dtype of `keys`.
        """
        return self.turn(keys, self.turns(difference, keys.device))

    def turns(self, difference: int | Tensor, device: torch.device | None = None) -> Turns:
        """Return the cosines and sines by which `turn` moves keys; `difference` as in `shift`."""
        by = torch.as_tensor(difference, dtype=torch.float64, device=device)
        angles = by.reshape(-1, 1, 1) * self.speeds.to(by.device)
        return angles.cos().float(), angles.sin().float()

    def turn(self, keys: Tensor, turns: Turns) -> Tensor:
        """Move keys as `shift` does, with `turns` that are used several times."""
        cos, sin = turns
        pairs, at = ((-1, 2), -1) if self.is_interleaved else ((2, -1), -2)
        first, second = keys.float().unflatten(-1, pairs).unbind(at)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], at)
        return turned.flatten(-2).to(keys.dtype)


def _speeds(config: Mapping[str, Any]) -> Tensor:
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _LINEAR_IN_POSITION:
        raise RopeError(
            f"rope_type {kind!r}: keys can be moved for {', '.join(_LINEAR_IN_POSITION)} only"
        )
    if config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) != 1.0:
        raise RopeError("partial_rotary_factor: keys can be moved if all of a key turns")
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise RopeError("rope_theta is missing")
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    speeds = float(theta) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if kind == "linear":
        speeds = speeds / float(scaling["factor"])
    elif kind == "llama3":
        speeds = _llama3(speeds, scaling)
    return speeds


def _llama3(speeds: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Make slow pairs `factor` times slower, leave fast ones, and interpolate between the two."""
    factor, length = float(scaling["factor"]), scaling["original_max_position_embeddings"]
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = length * speeds / (2 * math.pi)  # in the length that the model was made for
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * speeds / factor + smooth * speeds

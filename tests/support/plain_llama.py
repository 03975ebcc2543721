"""A Llama in plain torch, as plainly as can be: what recomputing rows in an engine must agree with.

Float32; attention by explicit masks over absolute positions; one prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu


@dataclass
class Computed:
    """K, V [layers, n, kv_heads, head_dim]; the attention of each layer's rows; the logits of rows
    that went through all layers."""

    keys: Tensor
    values: Tensor
    attention: list[Tensor]
    logits: Tensor


class PlainLlama:
    """The model in a folder."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._weights = load_file(folder / "model.safetensors")
        self.layers = self._config["num_hidden_layers"]
        self.dim = self._config["head_dim"]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, heads, dim] as it is at these positions: pairs (j, j + dim / 2)."""
        half = self.dim // 2
        speed = self._config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (positions[:, None].double() * speed)[:, None]
        cos, sin = angle.cos().float(), angle.sin().float()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def compute(
        self,
        tokens: list[int],
        depths: list[int],
        keys: Tensor,
        values: Tensor,
        missing: tuple[int, int] = (0, 0),
        gone: Tensor | None = None,
    ) -> Computed:
        """Compute row p in its first `depths[p]` layers, over stale K and V as `Computed` has, of
        which no row sees those from `missing[0]` to before `missing[1]`, nor those that are `gone`:
        bool [layers, kv_heads, n]."""
        keys, values, attention = keys.clone(), values.clone(), []
        n, depth = len(tokens), torch.tensor(depths)
        hidden = self._weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(self.layers):
            rows = (depth > layer).nonzero().flatten()
            x = self._norm(hidden[rows], f"layers.{layer}.input_layernorm")
            q, k, v = (self._heads(x, layer, name) for name in "qkv")
            q, k = self.rotate(q, rows), self.rotate(k, rows)
            keys[layer, rows], values[layer, rows] = k, v
            groups = q.shape[1] // k.shape[1]
            all_k = keys[layer].repeat_interleave(groups, 1)
            all_v = values[layer].repeat_interleave(groups, 1)
            scores = torch.einsum("rhd,thd->hrt", q, all_k) * self.dim**-0.5
            unseen = torch.arange(n)[None] > rows[:, None]
            unseen[:, slice(*missing)] = True
            if gone is not None:
                unseen = unseen | gone[layer].repeat_interleave(groups, 0)[:, None]
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
            attention.append(weights)
            mixed = torch.einsum("hrt,thd->rhd", weights, all_v).flatten(1)
            hidden = hidden.clone()
            hidden[rows] += mixed @ self._matrix(layer, "self_attn.o_proj").T
            x = self._norm(hidden[rows], f"layers.{layer}.post_attention_layernorm")
            gate, up = (x @ self._matrix(layer, f"mlp.{name}_proj").T for name in ("gate", "up"))
            hidden[rows] += (silu(gate) * up) @ self._matrix(layer, "mlp.down_proj").T
        last = self._norm(hidden[depth >= self.layers], "norm")
        return Computed(keys, values, attention, last @ self._weights["lm_head.weight"].T)

    def _matrix(self, layer: int, name: str) -> Tensor:
        return self._weights[f"model.layers.{layer}.{name}.weight"]

    def _heads(self, x: Tensor, layer: int, name: str) -> Tensor:
        return (x @ self._matrix(layer, f"self_attn.{name}_proj").T).unflatten(1, (-1, self.dim))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).rsqrt()
        return x * scale * self._weights[f"model.{name}.weight"]

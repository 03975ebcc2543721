"""A model in plain torch that computes chosen rows over given KV, layer by layer, in fp32.

Attention is masked by absolute position: row p sees positions 0 to p, fresh or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace_lab.models import checkpoint
from headrace_lab.models.decoder import Layer

ROWS_AT_ONCE = 512


@dataclass
class KV:
    """K and V of all layers, each fp32 [layers, n, kv_heads, head_dim], K rotated."""

    keys: Tensor
    values: Tensor

    def clone(self) -> KV:
        return KV(self.keys.clone(), self.values.clone())

    def part(self, first: int, length: int) -> KV:
        return KV(
            self.keys[:, first : first + length].clone(),
            self.values[:, first : first + length].clone(),
        )


Keep = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, rows int64 [r], fresh K, fresh V [r, kv_heads, head_dim]) -> bool [r], the rows that
continue with this layer's attention. At the call, the KV has not been overwritten yet."""
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [r, heads, head_dim], rows int64 [r], K, V [n, kv_heads, head_dim]) -> fp32
[r, heads * head_dim]: replaces exact attention."""


class LM:
    """A Llama, Mistral or Qwen3 model from a folder.

    Raises:
        ValueError: the model is of another type, layers keep no KV, or attention has a window.

    Attributes:
        layers, heads, kv_heads, dim: sizes of the model.
        pairs: number of (row, layer) pairs whose KV was computed so far.
    """

    def __init__(self, folder: str) -> None:
        config, decoder = checkpoint.read(Path(folder), (*checkpoint.TYPES, "mistral"))
        shape = decoder.shape
        if shape.cross_layer.kind != "vanilla":
            raise ValueError("some of its layers keep no KV")
        if config["model_type"] == "mistral" and config.get("sliding_window"):
            raise ValueError("its attention has a sliding window")
        self._decoder = decoder.requires_grad_(False)
        self._layers: list[Layer] = list(decoder.model.layers)
        self.layers: int = shape.cross_layer.layers
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.head_dim
        self.rope = decoder.rope
        self.pairs = 0

    def empty(self, tokens: int) -> KV:
        shape = self.layers, tokens, self.kv_heads, self.dim
        return KV(torch.zeros(shape), torch.zeros(shape))

    def compute(
        self,
        tokens: Tensor,
        kv: KV,
        rows: Tensor,
        keep: Keep | None = None,
        watch: Callable[[int, Tensor, Tensor], None] | None = None,
        sees: Callable[[Tensor], Tensor] | None = None,
        attend: Attend | None = None,
        there: Tensor | None = None,
    ) -> Tensor:
        """Compute rows and write their KV.

        Args:
            tokens: int64 [n].
            kv: of at least n positions; rows attend to its KV even where it is stale.
            rows: int64 ascending, the rows that the first layer computes.
            keep: see `Keep`; None computes all rows in all layers.
            watch: called with the layer, its remaining rows, and their queries
                [r, heads, head_dim].
            sees: rows -> the last position that each attends to, ascending; None: their own.
            attend: see `Attend`; None: exact attention.
            there: bool, positions of `kv` that exact attention sees; None: all.

        Returns:
            fp32 [r, vocabulary]: logits of the rows that went through all layers.
        """
        hidden = self._decoder.model.embed_tokens(tokens[rows])
        for layer, block in enumerate(self._layers):
            x = block.input_layernorm(hidden)
            q, (k, v) = block.self_attn.query(x), block.self_attn.key_value(x)
            k = self.rope.shift(k, rows)
            self.pairs += len(rows)
            if keep is not None:
                kept = keep(layer, rows, k, v)
            kv.keys[layer, rows], kv.values[layer, rows] = k, v
            if keep is not None:
                rows, hidden, q = rows[kept], hidden[kept], q[kept]
            if not len(rows):
                break
            q = self.rope.shift(q, rows)
            if watch is not None:
                watch(layer, rows, q)
            last = rows if sees is None else sees(rows)
            if attend is None:
                mixed = self._attend(q, last, kv.keys[layer], kv.values[layer], there)
            else:
                mixed = attend(layer, q, last, kv.keys[layer], kv.values[layer])
            hidden = hidden + block.self_attn.o_proj(mixed)
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return self._decoder.logits(hidden)

    def prefill(self, tokens: Tensor) -> KV:
        """Return the exact KV of a text."""
        kv = self.empty(len(tokens))
        last = torch.arange(len(tokens)) == len(tokens) - 1

        def keep(layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return last[rows] if layer == self.layers - 1 else torch.ones_like(rows).bool()

        self.compute(tokens, kv, torch.arange(len(tokens)), keep)
        return kv

    def follow(self, tokens: Tensor, kv: KV, first: int) -> Tensor:
        """Return the logits of the tokens from `first` on, over the KV before them, which does not
        change."""
        n = len(tokens)
        longer = self.empty(n)
        longer.keys[:, :first], longer.values[:, :first] = kv.keys[:, :first], kv.values[:, :first]
        return self.compute(tokens, longer, torch.arange(first, n))

    def greedy(self, tokens: Tensor, kv: KV, count: int) -> Tensor:
        """Return `tokens` and the `count` likeliest tokens after them; `kv` is that of `tokens`."""
        n = len(tokens)
        longer = self.empty(n + count)
        longer.keys[:, :n], longer.values[:, :n] = kv.keys, kv.values
        for at in range(n - 1, n + count - 1):
            logits = self.compute(tokens, longer, torch.tensor([at]))
            tokens = torch.cat([tokens, logits[-1].argmax().reshape(1)])
        return tokens

    def mass(self, q: Tensor, rows: Tensor, keys: Tensor, there: Tensor) -> Tensor:
        """Return the rows' attention to each position, averaged over rows and heads: fp32 [n].

        Args:
            q: [r, heads, head_dim], rotated.
            rows: int64 [r].
            keys: [n, kv_heads, head_dim], rotated.
            there: bool [n], the positions that the rows attend to.
        """
        all_keys = keys.repeat_interleave(self.heads // self.kv_heads, 1)
        scores = torch.einsum("rhd,thd->hrt", q, all_keys) * self.dim**-0.5
        unseen = (torch.arange(len(keys))[None] > rows[:, None]) | ~there
        return scores.masked_fill(unseen, float("-inf")).softmax(-1).mean((0, 1))

    def _attend(
        self, q: Tensor, last: Tensor, keys: Tensor, values: Tensor, there: Tensor | None
    ) -> Tensor:
        mixed = []
        for part in range(0, len(last), ROWS_AT_ONCE):
            some = last[part : part + ROWS_AT_ONCE]
            end = int(some[-1]) + 1
            seen = torch.arange(end)[None] <= some[:, None]
            if there is not None:
                seen &= there[:end]
            k, v = (
                one[:end].transpose(0, 1).repeat_interleave(self.heads // self.kv_heads, 0)[None]
                for one in (keys, values)
            )
            asked = q[part : part + ROWS_AT_ONCE].transpose(0, 1)[None]
            found = scaled_dot_product_attention(asked, k, v, attn_mask=seen)
            mixed.append(found[0].transpose(0, 1).flatten(1))
        return torch.cat(mixed)

    def output(self, layer: int) -> Tensor:
        """Return the output projection, fp32 [hidden, kv_heads, group, head_dim]."""
        matrix = self._layers[layer].self_attn.o_proj.weight
        return matrix.unflatten(1, (self.kv_heads, -1, self.dim))

"""A Llama in plain torch that computes chosen rows over given KV, layer by layer, in fp32.

Attention is masked by absolute position: row p sees positions 0 to p, whichever of them are fresh.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from headrace_engine.rope import Rope

ROWS_AT_ONCE = 512
WEIGHTS = re.compile(
    r"(lm_head|model\.(embed_tokens|norm|layers\.\d+\.(input_layernorm|post_attention_layernorm"
    r"|self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)))\.weight"
    r"|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)


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
"""(layer, rows int64 [r], fresh K, fresh V [r, kv_heads, head_dim]) -> bool [r], the rows that the
next layer computes. The KV still holds what lay there before."""
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [r, heads, head_dim], rows int64 [r], K, V [n, kv_heads, head_dim]) -> fp32
[r, heads * head_dim]: attention in place of the exact one."""


class LM:
    """The model in a folder.

    Raises ValueError for one with weights that are not a Llama's, such as biases.

    Attributes:
        layers: of the model.
        pairs: (row, layer) pairs whose KV was computed so far.
    """

    def __init__(self, folder: str) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        self._weights: dict[str, Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            self._weights |= {name: one.float() for name, one in load_file(file).items()}
        if other := sorted(name for name in self._weights if not WEIGHTS.fullmatch(name)):
            raise ValueError(f"it is no plain Llama: it has {other[0]}")
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.dim: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.rope = Rope.of(config)
        self._eps = config["rms_norm_eps"]
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
            kv: of n positions at least; what is stale is attended to as it is.
            rows: int64 ascending, computed in the first layer.
            keep: as `Keep`; None computes all rows in all layers.
            watch: gets the layer, the rows that go on, and their queries [r, heads, head_dim].
            sees: rows -> the last position that each attends to, ascending; None: their own.
            attend: as `Attend`; None: exact attention.
            there: bool, of the positions of `kv`: what exact attention sees; None: all.

        Returns:
            fp32 [r, vocabulary]: logits of the rows that went through all layers.
        """
        hidden = self._weights["model.embed_tokens.weight"][tokens[rows]]
        for layer in range(self.layers):
            x = self._norm(hidden, f"layers.{layer}.input_layernorm")
            q, k, v = (self._split(x, layer, name) for name in "qkv")
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
            hidden = hidden + mixed @ self._matrix(layer, "self_attn.o_proj").T
            x = self._norm(hidden, f"layers.{layer}.post_attention_layernorm")
            gate, up = (x @ self._matrix(layer, f"mlp.{name}_proj").T for name in ("gate", "up"))
            hidden = hidden + (silu(gate) * up) @ self._matrix(layer, "mlp.down_proj").T
        return self._norm(hidden, "norm") @ self._head().T

    def prefill(self, tokens: Tensor) -> KV:
        """The exact KV of a text."""
        kv = self.empty(len(tokens))
        last = torch.arange(len(tokens)) == len(tokens) - 1

        def keep(layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return last[rows] if layer == self.layers - 1 else torch.ones_like(rows).bool()

        self.compute(tokens, kv, torch.arange(len(tokens)), keep)
        return kv

    def follow(self, tokens: Tensor, kv: KV, first: int) -> Tensor:
        """Logits of the tokens from `first` on, over the KV before them, which stays as it is."""
        n = len(tokens)
        longer = self.empty(n)
        longer.keys[:, :first], longer.values[:, :first] = kv.keys[:, :first], kv.values[:, :first]
        return self.compute(tokens, longer, torch.arange(first, n))

    def greedy(self, tokens: Tensor, kv: KV, count: int) -> Tensor:
        """`tokens` with so many of the likeliest tokens behind them; `kv` is of `tokens`."""
        n = len(tokens)
        longer = self.empty(n + count)
        longer.keys[:, :n], longer.values[:, :n] = kv.keys, kv.values
        for at in range(n - 1, n + count - 1):
            logits = self.compute(tokens, longer, torch.tensor([at]))
            tokens = torch.cat([tokens, logits[-1].argmax().reshape(1)])
        return tokens

    def mass(self, q: Tensor, rows: Tensor, keys: Tensor, there: Tensor) -> Tensor:
        """Attention that rows pay to each position, meaned over rows and heads: fp32 [n].

        Args:
            q: [r, heads, head_dim], rotated.
            rows: int64 [r].
            keys: [n, kv_heads, head_dim], rotated.
            there: bool [n], what they attend to.
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
        """What heads' results are multiplied by: fp32 [hidden, kv_heads, group, head_dim]."""
        matrix = self._matrix(layer, "self_attn.o_proj")
        return matrix.unflatten(1, (self.kv_heads, -1, self.dim))

    def _matrix(self, layer: int, name: str) -> Tensor:
        return self._weights[f"model.layers.{layer}.{name}.weight"]

    def _head(self) -> Tensor:
        tied = self._weights["model.embed_tokens.weight"]
        return self._weights.get("lm_head.weight", tied)

    def _split(self, x: Tensor, layer: int, name: str) -> Tensor:
        return (x @ self._matrix(layer, f"self_attn.{name}_proj").T).unflatten(1, (-1, self.dim))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return x * scale * self._weights[f"model.{name}.weight"]

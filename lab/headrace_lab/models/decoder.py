"""A Llama- or Qwen3-shaped decoder whose layers read KV as `CrossLayerConfig` says, in plain torch.

It is the reference of the vLLM models, and it can be trained: no kernel, no cache, autograd
throughout. Its parameters have the names of the checkpoint, so `load_state_dict` takes a checkpoint
unchanged:

    model.layers.I.self_attn.{q,k,v,o}_proj.weight   k and v in storage layers only
    model.layers.I.self_attn.{q,k}_norm.weight       with `qk_norm`; k in storage layers only
    model.layers.I.self_attn.mix.{first,last}_{keys [kv_heads, D/2],values [kv_heads, D]}
                                                     in layers that mix
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from headrace_engine.rope import Rope
from headrace_prefill.cross_layer.mixing import by_channel, mix
from headrace_prefill.cross_layer.shape import DecoderShape

SHORT = 512
"""Maximum number of tokens for which attention is computed as two matrix products. On a CPU that
takes half the time of torch's kernel at 256 tokens, forward and backward. For more tokens, the
scores take too much memory."""
KV = dict[int, tuple[Tensor, Tensor]]
"""K, rotated, and V of each storage layer so far, each [batch, n, kv_heads, D]."""


class Mixture(nn.Module):
    """The mixing weights of one layer; initially they give the mean of the two layers."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.first_keys, self.last_keys = (
            nn.Parameter(torch.full((kv_heads, head_dim // 2), 0.5)) for _ in range(2)
        )
        self.first_values, self.last_values = (
            nn.Parameter(torch.full((kv_heads, head_dim), 0.5)) for _ in range(2)
        )

    def keys(self, first: Tensor, last: Tensor) -> Tensor:
        """Return the mixture of two layers' rotated keys [..., kv_heads, D]."""
        return mix(first, last, by_channel(self.first_keys), by_channel(self.last_keys))

    def values(self, first: Tensor, last: Tensor) -> Tensor:
        """Return the mixture of two layers' values [..., kv_heads, D]."""
        return mix(first, last, self.first_values, self.last_values)


class Attention(nn.Module):
    """Causal attention with grouped heads, to this layer's KV or to that of storage layers."""

    def __init__(self, shape: DecoderShape, layer: int) -> None:
        super().__init__()
        self._shape, self._layer = shape, layer
        dim, bias = shape.head_dim, shape.attention_bias
        self.q_proj = nn.Linear(shape.hidden, shape.heads * dim, bias)
        self.o_proj = nn.Linear(shape.heads * dim, shape.hidden, bias)
        if shape.qk_norm:
            self.q_norm = nn.RMSNorm(dim, shape.eps)
        if shape.cross_layer.stores(layer):
            self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * dim, bias)
            self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * dim, bias)
            if shape.qk_norm:
                self.k_norm = nn.RMSNorm(dim, shape.eps)
        elif shape.cross_layer.mixes:
            self.mix = Mixture(shape.kv_heads, dim)

    def forward(self, hidden: Tensor, rope: Rotation, kv: KV) -> Tensor:
        """Return the attention output [batch, n, hidden] of `hidden`, which has the same shape.

        A storage layer adds its K and V to `kv`."""
        shape, query = self._shape, rope(self.query(hidden))
        if shape.cross_layer.stores(self._layer):
            key, value = self.key_value(hidden)
            kv[self._layer] = rope(key), value
        keys = [kv[layer][0] for layer in shape.cross_layer.keys(self._layer)]
        values = [kv[layer][1] for layer in shape.cross_layer.values(self._layer)]
        mixed = attend(
            query.transpose(1, 2),
            (self.mix.keys(*keys) if len(keys) == 2 else keys[0]).transpose(1, 2),
            (self.mix.values(*values) if len(values) == 2 else values[0]).transpose(1, 2),
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def query(self, hidden: Tensor) -> Tensor:
        """Return queries before the rotation: [..., n, hidden] to [..., n, heads, D]."""
        query = self._heads(self.q_proj(hidden))
        return self.q_norm(query) if self._shape.qk_norm else query

    def key_value(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return a storage layer's keys before the rotation, and its values.

        Each is [..., n, kv_heads, D]."""
        key = self._heads(self.k_proj(hidden))
        return (
            self.k_norm(key) if self._shape.qk_norm else key,
            self._heads(self.v_proj(hidden)),
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._shape.head_dim))


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute causal attention, in the inputs' dtype.

    Args:
        query: [batch, heads, n, D].
        keys, values: [batch, kv_heads, n, D].

    Returns:
        [batch, heads, n, D]
    """
    tokens, dim = query.shape[-2:]
    if tokens > SHORT:
        return scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    group = query.shape[1] // keys.shape[1]
    if group > 1:
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    later = torch.full((tokens, tokens), -math.inf, dtype=query.dtype).triu(1)
    scores = (query * dim**-0.5) @ keys.transpose(-1, -2) + later
    return torch.softmax(scores, -1) @ values


class Rotation:
    """The rotary embedding of positions 0 to n - 1, in the NeoX order of channels."""

    def __init__(self, rope: Rope, tokens: int) -> None:
        angles = torch.arange(tokens, dtype=torch.float64)[:, None, None] * rope.speeds
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x: [batch, n, heads, D]."""
        cos, sin = self._cos.to(x), self._sin.to(x)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class MLP(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, shape.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, shape: DecoderShape, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)

    def forward(self, hidden: Tensor, rope: Rotation, kv: KV) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rope, kv)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Model(nn.Module):
    """The model without its output head."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, n) for n in range(shape.cross_layer.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)


class Decoder(nn.Module):
    """The model that a parsed config.json describes, with random weights.

    Raises:
        CrossLayerConfigError: `kv_fusion` is not valid.
        RopeError: its rotary embedding is not known here.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.shape = DecoderShape.of(config)
        with torch.device("cpu"):  # its few numbers are also needed if weights are on "meta"
            self.rope = Rope.of(config)
        self.model = Model(self.shape)
        self.lm_head = nn.Linear(self.shape.hidden, self.shape.vocabulary, bias=False)
        if self.shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, n, vocabulary] of token ids [batch, n]."""
        return self.logits(self.states(tokens))

    def states(self, tokens: Tensor) -> Tensor:
        """Return the last layer's output [batch, n, hidden] for token ids [batch, n]."""
        rope, kv = self.rotation(tokens.shape[1]), KV()
        hidden = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden, rope, kv)
        return hidden

    def rotation(self, tokens: int) -> Rotation:
        """Return the rotary embedding of positions 0 to `tokens` - 1."""
        return Rotation(self.rope, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of the last layer's output [..., hidden]."""
        return self.lm_head(self.model.norm(hidden))

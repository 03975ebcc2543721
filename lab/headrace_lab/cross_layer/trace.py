"""A decoder's states on texts, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_lab.models.decoder import KV, Decoder


@dataclass(frozen=True)
class Trace:
    """All layers' states on texts.

    Attributes:
        inputs: the input of each layer, and the output of the last one: each [texts, n, hidden].
        attended: the output of each layer's attention, which is added to the layer's input.
        kv: K and V of the layers that have KV.
    """

    inputs: list[Tensor]
    attended: list[Tensor]
    kv: KV

    @staticmethod
    @torch.no_grad()
    def of(model: Decoder, tokens: Tensor) -> Trace:
        """Compute the states on texts, int64 [texts, n]."""
        rope, kv = model.rotation(tokens.shape[1]), KV()
        inputs, attended = [model.model.embed_tokens(tokens)], []
        for layer in model.model.layers:
            attended.append(layer.self_attn(layer.input_layernorm(inputs[-1]), rope, kv))
            hidden = inputs[-1] + attended[-1]
            inputs.append(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
        return Trace(inputs, attended, kv)

    @torch.no_grad()
    def last(self, model: Decoder, first: int) -> Tensor:
        """Return the last layer's output of a model whose layers below `first` are the same."""
        kv = KV({layer: both for layer, both in self.kv.items() if layer < first})
        hidden = self.inputs[first]
        rope = model.rotation(hidden.shape[1])
        for layer in model.model.layers[first:]:
            hidden = layer(hidden, rope, kv)
        return hidden

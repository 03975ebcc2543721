"""What a decoder computes of texts, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_lab.models.decoder import KV, Decoder


@dataclass(frozen=True)
class Trace:
    """All layers' states.

    Attributes:
        inputs: what each layer takes, and what the last one gives: each [texts, n, hidden].
        attended: what each layer's attention adds to its input.
        kv: of the layers that have KV.
    """

    inputs: list[Tensor]
    attended: list[Tensor]
    kv: KV

    @staticmethod
    @torch.no_grad()
    def of(model: Decoder, tokens: Tensor) -> Trace:
        """Of texts, int64 [texts, n]."""
        rope, kv = model.rotation(tokens.shape[1]), KV()
        inputs, attended = [model.model.embed_tokens(tokens)], []
        for layer in model.model.layers:
            attended.append(layer.self_attn(layer.input_layernorm(inputs[-1]), rope, kv))
            hidden = inputs[-1] + attended[-1]
            inputs.append(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
        return Trace(inputs, attended, kv)

    @torch.no_grad()
    def last(self, model: Decoder, first: int) -> Tensor:
        """What the last layer of a model gives that is the same below layer `first`."""
        kv = KV({layer: both for layer, both in self.kv.items() if layer < first})
        hidden = self.inputs[first]
        rope = model.rotation(hidden.shape[1])
        for layer in model.model.layers[first:]:
            hidden = layer(hidden, rope, kv)
        return hidden

"""Real KV and what it does: SmolLM2-135M over three texts, and decoded KV put back in its place.

A text's first `CONTEXT` tokens are computed once; their keys and values are what codecs are fed.
The next `NEXT` tokens are then computed on top of the cache, as it was or as a codec gave it back,
and their logits are compared.
"""

from __future__ import annotations

import copy
import inspect
import pydoc_data.topics
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace_kvstore.codec import Codec, LayerShape, Order

CONTEXT, NEXT, BLOCK_TOKENS = 1024, 128, 128
LICENCE = Path(__file__).parents[2] / "LICENSE"
Layer = tuple[torch.Tensor, torch.Tensor]
"""K (after rotation) and V of one layer, each [kv_heads, tokens, head_dim]."""


def texts() -> dict[str, str]:
    """Prose, code and law that every checkout has."""
    return {
        "prose": pydoc_data.topics.topics["compound"],
        "code": inspect.getsource(statistics),
        "law": LICENCE.read_text(),
    }


@dataclass
class Text:
    """One text's exact run."""

    layers: list[Layer]
    """KV of the context."""
    queries: list[torch.Tensor]
    """For each layer the queries (after rotation) of the next tokens, [heads, NEXT, head_dim]."""
    logits: torch.Tensor
    """Logits of the next tokens, [NEXT, vocabulary], float32."""
    run: Callable[[list[Layer]], torch.Tensor]
    """Logits of the next tokens on top of another cache."""


class Model:
    """The model in bfloat16, with each layer's queries within reach."""

    def __init__(self, folder: Path) -> None:
        self.queries: list[torch.Tensor] = []
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attention(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.queries.append(query[0])
            return plain(module, query, *args, **kwargs)

        transformers.AttentionInterface.register("headrace_watched", attention)
        transformers.AttentionMaskInterface.register(
            "headrace_watched", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        )
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="headrace_watched"
        ).eval()

    @torch.inference_mode()
    def read(self, text: str) -> Text:
        """The exact run; ValueError for a text that is too short."""
        ids = self.tokenizer(text, return_tensors="pt").input_ids[:, : CONTEXT + NEXT]
        if ids.shape[1] < CONTEXT + NEXT:
            raise ValueError(f"a text has only {ids.shape[1]} tokens")
        cache = self.model(ids[:, :CONTEXT], use_cache=True).past_key_values
        layers = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]

        @torch.inference_mode()
        def run(other: list[Layer]) -> torch.Tensor:
            mine = copy.deepcopy(cache)
            for layer, (keys, values) in zip(mine.layers, other, strict=True):
                layer.keys, layer.values = keys[None], values[None]
            logits = self.model(ids[:, CONTEXT:], past_key_values=mine).logits
            return torch.as_tensor(logits[0], dtype=torch.float32)

        self.queries.clear()
        logits = run(layers)
        return Text(layers, list(self.queries), logits, run)


def shape_of(layer: Layer, order: Order = Order.VEC) -> LayerShape:
    """Shape of one block of the layer."""
    heads, _, head_dim = layer[0].shape
    return LayerShape(heads, BLOCK_TOKENS, head_dim, "bfloat16", order)


def block_bytes(layer: Layer, block: int) -> npt.NDArray[np.uint8]:
    """One block of a layer as vLLM's CPU cache holds it (`Order.VEC`)."""
    here = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
    heads = layer[0].shape[0]
    keys = layer[0][:, here].transpose(1, 2).reshape(heads, -1)
    values = layer[1][:, here].reshape(heads, -1)
    return torch.cat((keys, values), 1).contiguous().view(torch.uint8).flatten().numpy()


def from_bytes(stored: npt.NDArray[np.uint8], shape: LayerShape) -> Layer:
    """Return the block's K and V again."""
    h, n, d = shape.kv_heads, shape.block_tokens, shape.head_dim
    both = torch.from_numpy(stored).view(torch.bfloat16).view(h, 2, n * d)
    return both[:, 0].reshape(h, d, n).transpose(1, 2), both[:, 1].reshape(h, n, d)


def decoded(layers: list[Layer], codec: Codec, window_tokens: int) -> list[Layer]:
    """Return the layers as they come back from `codec`, the blocks of the window untouched."""
    kept = range((CONTEXT - window_tokens) // BLOCK_TOKENS, CONTEXT // BLOCK_TOKENS)
    if not codec.lossy:
        return layers
    shape = shape_of(layers[0])
    coder = codec.bind(shape)
    stored = np.empty(coder.stored_bytes, np.uint8)
    result = []
    for layer in layers:
        blocks = []
        for block in range(CONTEXT // BLOCK_TOKENS):
            buffer = block_bytes(layer, block)
            if block not in kept:
                coder.encode(buffer, stored)
                buffer = np.empty_like(buffer)
                coder.decode(stored, buffer)
            blocks.append(from_bytes(buffer, shape))
        keys, values = zip(*blocks, strict=True)
        result.append((torch.cat(keys, 1), torch.cat(values, 1)))
    return result

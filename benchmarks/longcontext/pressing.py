"""NVIDIA's kvpress on one context. Runs in kvpress's own environment, and imports nothing of ours.

    python pressing.py MODEL INPUT.npz OUTPUT_FOLDER

INPUT.npz holds `tokens` int64 [n], `first`, the length of the context, `judged` int64, rows of the
tail whose log-probabilities are wanted, and `shares` float64, of the KV that stays.

Each press gets the exact prefill, as in kvpress's own pipeline. A hook must not see another's
result, so one prefill serves all of them: each layer's KV is handed to every press, and what each
keeps is put aside. Then the tail is computed over what each kept, at its true positions.
OUTPUT_FOLDER gets `NAME at SHARE.npz` for each press: `logp` fp32 [judged, vocabulary] and `kept`,
the share of (layer, KV head, token) that stayed. `exact at 1.npz` is the model without a press.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvpress import (
    AdaKVPress,
    ExpectedAttentionPress,
    KVzipPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
)
from kvpress.presses.base_press import BasePress
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PRESSES: dict[str, Callable[[float], Any]] = {
    "window": lambda ratio: StreamingLLMPress(ratio, n_sink=0),
    "StreamingLLM": lambda ratio: StreamingLLMPress(ratio),
    "SnapKV": lambda ratio: SnapKVPress(ratio),
    "PyramidKV": lambda ratio: PyramidKVPress(ratio),
    "ExpectedAttention": lambda ratio: ExpectedAttentionPress(ratio),
    "ExpectedAttention, AdaKV": lambda ratio: AdaKVPress(
        ExpectedAttentionPress(ratio, epsilon=2e-2)
    ),
}


class Pressed:
    """KV that one press kept: keys and values of each layer, and (head, token) pairs to mask."""

    def __init__(self) -> None:
        self.keys, self.values = list[Tensor](), list[Tensor]()
        self.masked: list[tuple[Tensor, ...] | None] = []

    def add(self, keys: Tensor, values: Tensor, masked: tuple[Tensor, ...] | None) -> None:
        self.keys.append(keys)
        self.values.append(values)
        self.masked.append(masked)

    def kept(self, tokens: int) -> float:
        heads = self.keys[0].shape[1]
        held = sum(one.shape[1] * one.shape[2] for one in self.keys)
        left = sum(0 if one is None else len(one[1]) for one in self.masked)
        return (held - left) / (len(self.keys) * heads * tokens)


class Every(BasePress):  # type: ignore[misc]
    """Hands each layer to every press, and leaves the cache as it is."""

    def __init__(self, presses: dict[tuple[str, float], Any]) -> None:
        self.presses = presses
        self.found = {name: Pressed() for name in presses}

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        for name, press in self.presses.items():
            module.masked_key_indices = None
            kept = press.compress(module, hidden_states, keys, values, attentions, kwargs)
            self.found[name].add(kept[0], kept[1], module.masked_key_indices)
        module.masked_key_indices = None
        return keys, values


class Zip(KVzipPress):  # type: ignore[misc]
    """KVzip and KVzip+ in one reconstruction, at several ratios.

    kvpress takes the chat template's prefix for the context's beginning, scores it 0 and drops it.
    These contexts begin without it, so here the prefix is empty: nothing is dropped unscored.
    """

    score_val: Tensor
    kvzip_plus_normalization: bool = False

    def __init__(self, ratios: list[float]) -> None:
        super().__init__(0.5)
        self.ratios, self.found = ratios, dict[tuple[str, float], Pressed]()

    def prepare(self, *arguments: Any, **options: Any) -> Any:
        self.prefix_length = 0
        prepared = super().prepare(*arguments, **options)
        self.plus = torch.zeros_like(self.score_val)
        return prepared

    def score_kvzip(self, *arguments: Any) -> Any:
        kept = super().score_kvzip(*arguments)
        for _ in range(2):
            self.score_val, self.plus = self.plus, self.score_val
            self.kvzip_plus_normalization = not self.kvzip_plus_normalization
            if self.kvzip_plus_normalization:
                super().score_kvzip(*arguments)
        return kept

    def compress_post(self, model: Any) -> None:
        for name, scores in {"KVzip": self.score_val, "KVzip+": self.plus}.items():
            for ratio in self.ratios:
                self.score_val, self.compression_ratio = scores.clone(), ratio
                super().compress_post(model)
                found = self.found[name, ratio] = Pressed()
                for layer, held in zip(model.model.layers, self._cache.layers, strict=True):
                    found.add(held.keys, held.values, layer.self_attn.masked_key_indices)
                    layer.self_attn.masked_key_indices = None


def tail_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention of the tail: causal, and blind to the pairs that a press left out.

    kvpress puts keys there whose weight underflows to 0. Left out outright, the weight is 0.
    """
    heads, rows, length = key.shape[1], query.shape[2], key.shape[2]
    seen = torch.ones(1, heads, rows, length, dtype=torch.bool)
    seen[..., length - rows :] = torch.ones(rows, rows, dtype=torch.bool).tril()
    if module.masked_key_indices is not None:
        batch, head, at = module.masked_key_indices
        seen[batch, head, :, at] = False
    group = query.shape[1] // heads
    key, value, seen = (one.repeat_interleave(group, 1) for one in (key, value, seen))
    found = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
    return found.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("tail", tail_attention)


def tail(model: Any, tokens: Tensor, first: int, judged: Tensor, pressed: Pressed) -> Tensor:
    """Return the log-probabilities after the judged rows, over the retained KV."""
    cache = DynamicCache(config=model.config)
    for number, (keys, values) in enumerate(zip(pressed.keys, pressed.values, strict=True)):
        cache.update(keys, values, number)
        model.model.layers[number].self_attn.masked_key_indices = pressed.masked[number]
    positions = torch.arange(first, len(tokens))[None]
    model.config._attn_implementation = "tail"
    found = model(input_ids=tokens[None, first:], past_key_values=cache, position_ids=positions)
    model.config._attn_implementation = "sdpa"
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    logits: Tensor = found.logits[0, judged]
    return logits.float().log_softmax(-1)


@torch.no_grad()
def main(folder: str, source: str, target: str) -> None:
    with np.load(source) as given:
        tokens, judged = (torch.from_numpy(given[name]) for name in ("tokens", "judged"))
        first, shares = int(given["first"]), given["shares"].tolist()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config._attn_implementation = "sdpa"

    def write(name: str, share: float, pressed: Pressed) -> None:
        logp = tail(model, tokens, first, judged, pressed).numpy()
        kept = pressed.kept(first)
        np.savez(Path(target) / f"{name} at {share}.npz", logp=logp, kept=kept)
        print(f"  kvpress: {name} at {share}: {kept:.4f} kept", flush=True)

    presses = {(name, share): make(1 - share) for name, make in PRESSES.items() for share in shares}
    every, zipped = Every(presses), Zip([1 - share for share in shares])
    cache = DynamicCache(config=model.config)
    with zipped(model), every(model):
        model.model(input_ids=tokens[None, :first], past_key_values=cache)
    whole = Pressed()
    for layer in cache.layers:
        whole.add(layer.keys, layer.values, None)
    write("exact", 1, whole)
    for (name, share), pressed in every.found.items():
        write(name, share, pressed)
    for (name, ratio), pressed in zipped.found.items():
        write(name, next(share for share in shares if 1 - share == ratio), pressed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])

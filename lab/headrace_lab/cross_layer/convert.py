"""Conversion of a trained decoder, without training, so that layers read other layers' KV.

A reader's K and V are fitted in closed form (`fit`). The phase of the fitted keys is merged into
the reader's query projection. Then its output projection is fitted again by ridge regression: the
target is the attention output of the exact layer, the input is the attention to the fitted KV.
Readers are fitted from the lowest to the highest, each on the output of the readers below it, so a
reader corrects a part of their error.

Two choices are made:

- The readers are the layers whose conversion alone causes the least KL.
- A reader reads the storage layers below it that fit with the least error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

from headrace_lab.cross_layer.error import Error, Truth
from headrace_lab.cross_layer.fit import KeyFit, Sums, fit_keys, fit_values
from headrace_lab.cross_layer.trace import Trace
from headrace_lab.models.decoder import KV, Decoder
from headrace_prefill.cross_layer.config import CrossLayerConfig, CrossLayerConfigError

Pair = tuple[int, int]
ConvertKind = Literal["fused", "lite"]
MIN_STORED = 2
"""Number of lowest layers that always keep KV: they have no two layers below them."""
CHOOSING = 2
"""Number of texts that are left out of the fit: layers are chosen on them."""
OUTPUT_RIDGE = 1e-2
"""Ridge, as a share of the mean of the diagonal; it pulls towards the original weights. Measured on
SmolLM2's layer 25, KL on other texts for 1e-3, 1e-2, 1e-1: `fused` 0.0129, 0.0111, 0.0115; `lite`
0.0271, 0.0186, 0.0183."""


@dataclass(frozen=True)
class Point:
    """One model of the curve.

    Attributes:
        cross_layer: the readers, and the layers that they read.
        layer: the reader that this point adds.
        error: error against the exact model.
    """

    cross_layer: CrossLayerConfig
    layer: int
    error: Error

    @property
    def saved(self) -> float:
        """Saved share of the model's KV."""
        return len(self.cross_layer.readers) / self.cross_layer.layers


class Converter:
    """A decoder, and its states on calibration texts.

    Args:
        config: its parsed config.json.
        tokens: int64 [texts, n], to fit and to choose on; at least `CHOOSING` + 1 texts.

    Raises:
        CrossLayerConfigError: it is not a plain Llama, or it has too few layers.
    """

    def __init__(self, config: Mapping[str, Any], model: Decoder, tokens: Tensor) -> None:
        shape = model.shape
        if shape.qk_norm or shape.cross_layer.kind != "vanilla":
            raise CrossLayerConfigError("only a Llama whose layers all keep KV can be converted")
        if shape.cross_layer.layers <= MIN_STORED:
            raise CrossLayerConfigError(
                f"a model of {shape.cross_layer.layers} layers has none to convert"
            )
        self._config, self._model, self._choosing = dict(config), model, tokens[-CHOOSING:]
        self._trace = Trace.of(model, tokens[:-CHOOSING])
        self.sums = Sums.of(self._trace.kv)
        self.layers = shape.cross_layer.layers

    def described(self, cross_layer: CrossLayerConfig) -> dict[str, Any]:
        """Return the config.json of the converted model."""
        return {
            **self._config,
            "architectures": ["KVFusionLlamaForCausalLM"],
            "kv_fusion": cross_layer.section(),
        }

    def cross_layer(self, kind: ConvertKind, readers: Iterable[int]) -> CrossLayerConfig:
        """Return these layers as readers, each with the storage layers that fit it best."""
        chosen = frozenset(readers)
        found = {}
        for layer in chosen:
            stored = [below for below in range(layer) if below not in chosen]
            found[layer] = self._best(kind, layer, stored)
        return CrossLayerConfig.parse(
            CrossLayerConfig(kind, self.layers, self.layers - len(found), found).section(),
            self.layers,
        )

    @torch.no_grad()
    def convert(self, cross_layer: CrossLayerConfig) -> Decoder:
        """Return the model with these readers."""
        made = Decoder(self.described(cross_layer))
        kept = made.state_dict().keys()
        weights = {name: one for name, one in self._model.state_dict().items() if name in kept}
        made.load_state_dict(weights, strict=False)
        first = min(cross_layer.readers)
        kv = KV({layer: both for layer, both in self._trace.kv.items() if layer < first})
        hidden = self._trace.inputs[first]
        rope = made.rotation(hidden.shape[1])
        for number in range(first, self.layers):
            layer = made.model.layers[number]
            if number in cross_layer.readers:
                self._fit(made, cross_layer, number)
                self._refit_output(made, number, hidden, kv)
            if number < max(cross_layer.readers):
                hidden = layer(hidden, rope, kv)
        return made

    def curve(self, kind: ConvertKind, truth: Truth, most: int) -> Iterator[Point]:
        """Yield models with one reader, two, and so on up to `most`.

        Args:
            truth: on texts other than those of the fit, for the errors of the points.
        """
        alone = self.alone(kind)
        order = sorted(alone, key=alone.__getitem__)
        for count in range(1, min(most, len(order)) + 1):
            readers = order[:count]
            cross_layer = self.cross_layer(kind, readers)
            error = truth.error(self.convert(cross_layer), first=min(readers))
            yield Point(cross_layer, order[count - 1], error)

    def alone(self, kind: ConvertKind) -> dict[int, float]:
        """Return, by layer, the KL of the model with this layer as its only reader, on texts that
        were left out of the fit."""
        some, found = Truth(self._model, self._choosing), {}
        for layer in range(MIN_STORED, self.layers):
            made = self.convert(self.cross_layer(kind, [layer]))
            found[layer] = some.error(made, first=layer).kl
        return found

    def _best(self, kind: ConvertKind, layer: int, stored: list[int]) -> Pair:
        """Return the two storage layers with the least error of keys plus that of values, each as a
        share of the energy; for `lite`, one is chosen for keys and one for values."""
        values = {below: fit_values(self.sums, layer, [below]).error for below in stored}
        if kind == "lite":
            keys = {below: fit_keys(self.sums, layer, [below]).error for below in stored}
            return min(stored, key=keys.__getitem__), min(stored, key=values.__getitem__)
        return min(
            combinations(stored, 2),
            key=lambda pair: (
                fit_keys(self.sums, layer, pair).error + min(values[below] for below in pair)
            ),
        )

    def _fit(self, made: Decoder, cross_layer: CrossLayerConfig, layer: int) -> None:
        """Set a reader's mixing weights, and rotate its query projection."""
        attention = made.model.layers[layer].self_attn
        keys = fit_keys(self.sums, layer, cross_layer.keys(layer))
        scale = keys.weights[0] if cross_layer.kind == "lite" else torch.ones_like(keys.phase)
        for part in (attention.q_proj.weight, attention.q_proj.bias):
            if part is not None:
                part.copy_(turned(part, keys, scale))
        if cross_layer.kind == "fused":
            values = fit_values(self.sums, layer, cross_layer.values(layer))
            for name, weight in (
                ("first_keys", keys.weights[0]),
                ("last_keys", keys.weights[1]),
                ("first_values", values.weights[0]),
                ("last_values", values.weights[1]),
            ):
                getattr(attention.mix, name).copy_(weight)

    def _refit_output(self, made: Decoder, layer: int, hidden: Tensor, kv: KV) -> None:
        """Fit the output projection to the attention output of the exact layer."""
        block = made.model.layers[layer]
        attention, seen = block.self_attn, list[Tensor]()
        hook = attention.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            now = attention(block.input_layernorm(hidden), made.rotation(hidden.shape[1]), kv)
        finally:
            hook.remove()
        given = seen[0].flatten(0, 1)
        missing = (self._trace.attended[layer] - now).flatten(0, 1)
        products = given.mT @ given
        products.diagonal().add_(OUTPUT_RIDGE * products.diagonal().mean())
        attention.o_proj.weight.add_(torch.linalg.solve(products, given.mT @ missing).mT)


def turned(weight: Tensor, keys: KeyFit, scale: Tensor) -> Tensor:
    """Return a query projection that includes the phase of the keys and a scale.

    Args:
        weight: [heads * D, hidden], or a bias [heads * D].
        scale: [kv_heads, D/2].
    """
    kv_heads, half = keys.phase.shape
    parts = weight.reshape(kv_heads, -1, 2, half, *weight.shape[1:])
    shape = (kv_heads, 1, half) + (1,) * (weight.ndim - 1)
    cos, sin = ((scale * f(keys.phase)).reshape(shape) for f in (torch.cos, torch.sin))
    a, b = parts[:, :, 0], parts[:, :, 1]
    return torch.stack([a * cos + b * sin, b * cos - a * sin], 2).reshape(weight.shape)

"""From which layers readers draw keys, and from which values.

The article finds that upper layers' values come from the bottom layer above all, and their keys
from the bottom and the middle layer both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_lab.cross_layer.fit import Sums, fit_keys, fit_values
from headrace_lab.cross_layer.trace import Trace
from headrace_lab.models.decoder import Decoder


@dataclass(frozen=True)
class Nearest:
    """For one upper layer of a model that was not made for sharing.

    Attributes:
        layer: the upper layer.
        keys, values: the layer of the lower half that each fits best.
        key_error, value_error: the fit's, as a share of the energy.
        first_key_error, first_value_error: of the fit to layer 0.
    """

    layer: int
    keys: int
    values: int
    key_error: float
    value_error: float
    first_key_error: float
    first_value_error: float


def nearest(sums: Sums) -> list[Nearest]:
    """For each layer of the upper half."""
    half, found = sums.layers // 2, []
    for layer in range(half, sums.layers):
        keys = [fit_keys(sums, layer, [below]).error for below in range(half)]
        values = [fit_values(sums, layer, [below]).error for below in range(half)]
        best = min(range(half), key=keys.__getitem__), min(range(half), key=values.__getitem__)
        errors = keys[best[0]], values[best[1]], keys[0], values[0]
        found.append(Nearest(layer, *best, *errors))
    return found


@torch.no_grad()
def learned(model: Decoder, tokens: Tensor) -> dict[int, tuple[float, float]]:
    """For each reader of a `fused` model that was trained so: the energy that its keys, and that
    its values, draw from the lower of its two layers, as a share of what they draw from both."""
    kv, fusion, found = Trace.of(model, tokens).kv, model.shape.fusion, {}
    for layer in range(fusion.layers):
        if fusion.stores(layer):
            continue
        mixture = model.model.layers[layer].self_attn.mix
        first, last = fusion.keys(layer)
        zero = torch.zeros(())
        shares = []
        for which, of in ((0, mixture.keys), (1, mixture.values)):
            low, high = kv[first][which], kv[last][which]
            drawn = [float(one.square().sum()) for one in (of(low, zero), of(zero, high))]
            shares.append(drawn[0] / sum(drawn))
        found[layer] = (shares[0], shares[1])
    return found

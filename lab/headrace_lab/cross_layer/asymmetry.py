"""The layers from which readers draw keys, and those from which they draw values.

The FusedKV article finds that upper layers' values come mostly from the bottom layer, and their
keys from both the bottom and the middle layer.
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
    """Best sources of one upper layer, in a model that was not made for sharing.

    Attributes:
        layer: the upper layer.
        keys, values: the layer of the lower half from which its K, and its V, are fitted best.
        key_error, value_error: errors of these fits, as a share of the energy.
        first_key_error, first_value_error: errors of the fits from layer 0.
    """

    layer: int
    keys: int
    values: int
    key_error: float
    value_error: float
    first_key_error: float
    first_value_error: float


def nearest(sums: Sums) -> list[Nearest]:
    """Return the best sources of each layer of the upper half."""
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
    """Return how much each reader of a trained `fused` model draws from its lower layer.

    The result has, by reader, the share of the energy of its keys and that of its values. The share
    is over the sum of the energies drawn from both layers."""
    kv, cross_layer, found = Trace.of(model, tokens).kv, model.shape.cross_layer, {}
    for layer in range(cross_layer.layers):
        if cross_layer.stores(layer):
            continue
        mixture = model.model.layers[layer].self_attn.mix
        first, last = cross_layer.keys(layer)
        zero = torch.zeros(())
        shares = []
        for which, of in ((0, mixture.keys), (1, mixture.values)):
            low, high = kv[first][which], kv[last][which]
            drawn = [float(one.square().sum()) for one in (of(low, zero), of(zero, high))]
            shares.append(drawn[0] / sum(drawn))
        found[layer] = (shares[0], shares[1])
    return found

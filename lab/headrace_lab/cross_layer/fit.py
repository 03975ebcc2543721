"""Fits of one layer's K and V by those of other layers, in closed form, and their errors.

The fits need only sums of products over calibration tokens, `Sums`. If a reader's own projections
can undo a map, the fit is up to that map.

Keys. Channels j and j + D/2 are one complex number k, which a rotary embedding multiplies by
exp(i * position * w_j). A constant factor c commutes with that, and can be moved to the query:
q . (c k) = (conj(c) q) . k. Therefore the keys of layer i are fitted as

    k_i ~ exp(i phi) (a_s k_s + a_t k_t)        a real: one weight for each pair of channels

and the phase is merged into the query projection. With b_m = sum conj(k_m) k_i and
A_mn = Re sum conj(k_m) k_n over the sources m and n, the best a for a phase is A^-1 beta,
beta = Re(exp(-i phi) b), and explains beta^T A^-1 beta of the energy. That is a quadratic form in
(cos phi, sin phi), so the best phase is its main axis.

Values. Any linear map M of a head's channels can be merged into the output projection, so the
values are fitted as

    v_i ~ M (b_s * v_s + b_t * v_t)

in alternating steps: M by ridge regression for given b, and b by least squares for given M, whose
normal equations have the matrix (M^T M) * sum v v^T, elementwise. Each step lowers the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_lab.models.decoder import KV

RIDGE = 1e-4
"""Amount added to a matrix's diagonal, as a share of the diagonal's mean."""
TURNS = 4


@dataclass(frozen=True)
class Sums:
    """Sums over tokens of products of all layers' K and V.

    Attributes:
        keys: complex64 [kv_heads, D/2, layers, layers]; element (m, n) is sum conj(k_m) k_n.
        values: float32 [kv_heads, layers, D, layers, D].
    """

    keys: Tensor
    values: Tensor

    @staticmethod
    def of(kv: KV) -> Sums:
        """Compute the sums from K (rotated) and V of every layer."""
        keys = torch.stack([kv[n][0].flatten(0, 1) for n in range(len(kv))])  # [l, t, h, D]
        pairs = torch.complex(*keys.chunk(2, -1)).permute(2, 3, 0, 1)  # [h, D/2, l, t]
        values = torch.stack([kv[n][1].flatten(0, 1) for n in range(len(kv))]).permute(2, 0, 3, 1)
        flat = values.flatten(1, 2)  # [h, l * D, t]
        layers, dim = values.shape[1:3]
        products = (flat @ flat.mT).unflatten(1, (layers, dim)).unflatten(3, (layers, dim))
        return Sums(pairs.conj() @ pairs.mT, products)

    @property
    def layers(self) -> int:
        return self.keys.shape[-1]


class KeyFit(NamedTuple):
    """Fit of one layer's keys.

    Attributes:
        weights: [sources, kv_heads, D/2].
        phase: radians [kv_heads, D/2].
        error: squared error, as a share of the energy of the keys.
    """

    weights: Tensor
    phase: Tensor
    error: float


class ValueFit(NamedTuple):
    """Fit of one layer's values.

    Attributes:
        weights: [sources, kv_heads, D].
        error: squared error if M is applied, as a share of the energy of the values.
    """

    weights: Tensor
    error: float


def fit_keys(sums: Sums, layer: int, sources: Sequence[int]) -> KeyFit:
    """Fit the weights of the sources' keys, and the phase to merge into the query projection."""
    chosen = list(sources)
    products = _ridged(sums.keys[:, :, chosen][..., chosen].real)
    wanted = sums.keys[:, :, chosen, layer]
    parts = torch.stack([wanted.real, wanted.imag], -1)  # [h, D/2, sources, 2]
    solved = torch.linalg.solve(products, parts)
    form = parts.mT @ solved  # [h, D/2, 2, 2]
    angle = 0.5 * torch.atan2(2 * form[..., 0, 1], form[..., 0, 0] - form[..., 1, 1])
    axis = torch.stack([angle.cos(), angle.sin()], -1)[..., None]  # [h, D/2, 2, 1]
    weights = (solved @ axis)[..., 0]
    explained = (axis.mT @ form @ axis).sum()
    energy = sums.keys[:, :, layer, layer].real.sum()
    return KeyFit(weights.permute(2, 0, 1), angle, float(1 - explained / energy))


def fit_values(sums: Sums, layer: int, sources: Sequence[int]) -> ValueFit:
    """Fit the weights of the sources' values, up to a linear map of a head's channels."""
    chosen = list(sources)
    heads, dim = sums.values.shape[0], sums.values.shape[2]
    products = sums.values[:, chosen][:, :, :, chosen]  # [h, s, D, s, D]
    wanted = sums.values[:, layer][:, :, chosen]  # [h, D, s, D]
    energy = sums.values[:, layer, :, layer].diagonal(dim1=1, dim2=2).sum()
    weights = torch.zeros(heads, len(chosen), dim)
    weights[:, -1] = 1.0
    for turn in range(TURNS if len(chosen) > 1 else 1):
        both = torch.einsum("hsd,hsdue,hue->hde", weights, products, weights)
        cross = torch.einsum("hasd,hsd->had", wanted, weights)
        own = torch.linalg.solve(_ridged(both), cross.mT).mT  # M, [h, D, D]
        explained = (own * cross).sum()
        if turn == TURNS - 1 or len(chosen) == 1:
            break
        squares = own.mT @ own
        normal = (squares[:, None, :, None] * products).flatten(3).flatten(1, 2)
        right = torch.einsum("had,hasd->hsd", own, wanted).flatten(1)
        weights = torch.linalg.solve(_ridged(normal), right).unflatten(1, (len(chosen), dim))
        # M can have any scale, so the weights are normalised to about 1.
        weights = weights / weights.square().mean((1, 2), keepdim=True).sqrt()
    return ValueFit(weights.transpose(0, 1), float(1 - explained / energy))


def _ridged(matrix: Tensor) -> Tensor:
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return matrix + RIDGE * mean * torch.eye(matrix.shape[-1])

"""Reference of the rule in plain torch, for any rank and precision, to test the compiled code with.

Shapes: H KV heads, n pages, T tokens of a page, D dimensions, m queries of a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.summaries import RANK_ALONE, RANK_BESIDE


@dataclass(frozen=True)
class Summary:
    """Summaries of pages; each part is quantised and converted back.

    Attributes:
        mean: fp32 [H, n, D].
        directions: fp32 [H, n, rank, D].
        coefficients: fp32 [H, n, T, rank].
        kept: fp32 [H, n, kept, D], keys that are kept whole; the other parts do not cover them.
    """

    mean: Tensor
    directions: Tensor
    coefficients: Tensor
    kept: Tensor


@dataclass(frozen=True)
class Form:
    """Form of a page's summary.

    Attributes:
        rank: number of directions besides the mean.
        bits: bits of each number; None for fp32. Queries then have 8 bits, or fp32.
        largest: whether a page is estimated by its largest logit, not by the sum of exponentials.
        kept: number of keys of each page that are kept whole.
        by_norm: whether these are the keys of largest norm; else those farthest from the mean.
    """

    rank: int = RANK_ALONE
    bits: int | None = 4
    largest: bool = False
    kept: int = 0
    by_norm: bool = False

    def nbytes(self, tokens: int, dim: int) -> float:
        """Return the bytes of one page and head, with an fp32 scale for each row.

        Kept keys have the same precision."""
        rows = 1 + self.rank + self.kept
        numbers = rows * dim + self.rank * (tokens - self.kept)
        scales = 0 if self.bits is None else 4 * rows
        return numbers * (self.bits or 32) / 8 + scales

    def summary(self, keys: Tensor) -> Summary:
        """Summarise pages.

        Args:
            keys: fp32 [H, n, T, D].
        """
        kept = keys[:, :, :0]
        if self.kept:
            from_ = 0.0 if self.by_norm else keys.mean(2, keepdim=True)
            order = (keys - from_).square().sum(-1).argsort(-1, descending=True)
            order = order[..., None].expand_as(keys)
            ordered = keys.gather(2, order)
            kept, keys = ordered[:, :, : self.kept], ordered[:, :, self.kept :]
        mean = keys.mean(2)
        own = self.directions(keys - mean[:, :, None])
        return Summary(self.quantised(mean), *own, self.quantised(kept))

    def directions(self, deviations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pages' own directions and the tokens' coefficients.

        Args:
            deviations: fp32 [H, n, T, D].
        """
        # eigh of the Gram matrix is ten times faster than batched svd and has the same vectors.
        _, vectors = torch.linalg.eigh(deviations @ deviations.mT)
        basis = vectors[..., -self.rank :].flip(-1) if self.rank else vectors[..., :0]
        return self.quantised(basis.mT @ deviations), self.quantised(basis.mT).mT

    def quantised(self, rows: Tensor) -> Tensor:
        """Round numbers to `bits`, with one scale for each row of the last dimension."""
        if self.bits is None or not rows.numel():
            return rows
        most = 2 ** (self.bits - 1) - 1
        scale = (rows.abs().amax(-1, keepdim=True) / most).clamp(min=1e-30)
        return (rows / scale).round() * scale

    def logits(self, summary: Summary, queries: Tensor) -> Tensor:
        """Return the logarithm of the attention of queries to pages, without the softmax's sum.

        Args:
            queries: fp32 [H, m, D], times the scale of the logits.

        Returns:
            fp32 [H, m, n].
        """
        asked = queries if self.bits is None else rounded(queries)
        mean = torch.einsum("hmd,hnd->hmn", asked, summary.mean)
        along = torch.einsum("hmd,hnrd->hmnr", asked, summary.directions)
        each = torch.einsum("hmnr,hntr->hmnt", along, summary.coefficients) + mean[..., None]
        if summary.kept.shape[2]:
            whole = torch.einsum("hmd,hnkd->hmnk", queries, summary.kept)
            each = torch.cat([each, whole], -1)
        return each.amax(-1) if self.largest else each.logsumexp(-1)


@dataclass(frozen=True)
class Coordinates:
    """Pages as their mean, in 4 bits, and coordinates in a basis.

    Attributes:
        basis: the layer's basis.
        bits: bits of a coordinate; None for fp32. Queries then have 8 bits, or fp32.
        largest: as in `Form`.
        own: number of the page's own directions, for the residual of the coordinates.
    """

    basis: Basis
    bits: int | None = 4
    largest: bool = False
    own: int = RANK_BESIDE

    def nbytes(self, tokens: int, dim: int) -> float:
        """Return the bytes of one page and head."""
        numbers = self.basis.into.shape[2] * tokens + self.own * (tokens + dim)
        return dim / 2 + 8 + 4 * self.own + numbers * (self.bits or 32) / 8

    def logits(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Return the same as `Form.logits`, computed from the keys."""
        origin, into, back = (
            torch.from_numpy(one) for one in (self.basis.origin, self.basis.into, self.basis.back)
        )
        means = keys.mean(2)
        deviations = keys - means[:, :, None]
        coordinates = torch.einsum("hntd,hdr->hntr", deviations, into)
        if self.bits is not None:
            finer = (2 ** (self.bits - 1) - 1) / 7
            wider = (coordinates.abs().amax((2, 3), keepdim=True) / 7).clamp(min=1)
            coordinates = (coordinates / wider * finer).round() / finer * wider
        weights = torch.einsum("hmd,hrd->hmr", queries, back)
        if self.bits is not None:
            queries, weights = rounded(queries), rounded(weights)
        mean = queries @ Form(bits=4).quantised(means - origin[:, None]).mT
        each = torch.einsum("hmr,hntr->hmnt", weights, coordinates) + mean[..., None]
        if self.own:
            left = deviations - torch.einsum("hntr,hrd->hntd", coordinates, back)
            directions, coefficients = Form(self.own, self.bits).directions(left)
            along = torch.einsum("hmd,hnjd->hmnj", queries, directions)
            each += torch.einsum("hmnj,hntj->hmnt", along, coefficients)
        return each.amax(-1) if self.largest else each.logsumexp(-1)


def rounded(rows: Tensor) -> Tensor:
    """Round to 8 bits and convert back, with one step for each row of the last dimension."""
    step = (rows.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return (rows / step + 0.5).floor() * step

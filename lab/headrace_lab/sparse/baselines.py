"""Other projects' rules for which pages matter, in plain torch, for comparison.

    mean        q.mu (UCM's GSA: mean of a block's keys)
    quest       sum_d max(q_d min_d, q_d max_d), an upper bound of the page's logits (Quest,
                arXiv 2406.10774)
    hashed      maximum over the page's tokens of the agreement in sign of 128 random projections
                (HATA, arXiv 2506.02572, with random hashes in place of trained ones)
    merged      keys on the quarter of dimensions that are largest over the text, each two merged
                (UCM's KVStar: blk_repre_dim_prune_ratio 0.25, blk_repre_inner_token_merge 2)
    pairs       means of each two keys, in 4 bits
    clusters    8 centroids of the page's keys, in 4 bits, with their sizes
    newest      the later, the better: attention sink and recent tokens (arXiv 2309.17453)
    oracle      the attention itself

Each function takes keys fp32 [H, n, T, D] (KV heads, pages, tokens, dimensions) and queries fp32
[H, m, D], times the scale of the logits, and returns fp32 [H, m, n].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_lab.sparse.reference import Form

HASH_BITS = 128
KEPT_DIMENSIONS = 0.25
CLUSTERS, ROUNDS = 8, 6
FOUR_BITS = Form(bits=4)

Logits = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Baseline:
    """A rule.

    Attributes:
        logits: returns a number for each query and page.
        softmax: whether these are logits of attention. If so, their softmax over pages is summed
            over the query heads of a KV head; else they are summed directly.
        bytes_vs_k: bytes that the rule keeps, over those of 16-bit keys, for pages of 16 tokens and
            64 dimensions.
    """

    logits: Logits
    softmax: bool
    bytes_vs_k: float


def mean(keys: Tensor, queries: Tensor) -> Tensor:
    return queries @ keys.mean(2).mT


def quest(keys: Tensor, queries: Tensor) -> Tensor:
    return queries.clamp(min=0) @ keys.amax(2).mT + queries.clamp(max=0) @ keys.amin(2).mT


def hashed(keys: Tensor, queries: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    planes = torch.randn(keys.shape[-1], HASH_BITS, generator=draw)
    ours, theirs = (torch.sign(one @ planes) for one in (queries, keys))
    equal = torch.einsum("hmb,hntb->hmnt", ours, theirs)
    return equal.amax(-1)


def merged(keys: Tensor, queries: Tensor) -> Tensor:
    size = keys.abs().mean((1, 2))
    kept = size.topk(round(KEPT_DIMENSIONS * keys.shape[-1]), -1).indices
    some = keys.gather(-1, kept[:, None, None].expand(*keys.shape[:3], -1))
    asked = queries.gather(-1, kept[:, None].expand(*queries.shape[:2], -1))
    return _summed(_halved(some), asked)


def pairs(keys: Tensor, queries: Tensor) -> Tensor:
    return _summed(FOUR_BITS.quantised(_halved(keys)), queries)


def clusters(keys: Tensor, queries: Tensor) -> Tensor:
    centres = keys[:, :, :: max(1, keys.shape[2] // CLUSTERS)][:, :, :CLUSTERS].clone()
    for _ in range(ROUNDS):
        nearest = torch.cdist(keys, centres).argmin(-1)
        members = torch.nn.functional.one_hot(nearest, centres.shape[2]).float()
        sizes = members.sum(2)
        found = members.mT @ keys / sizes[..., None].clamp(min=1)
        centres = torch.where(sizes[..., None] > 0, found, centres)
    logits = torch.einsum("hmd,hncd->hmnc", queries, FOUR_BITS.quantised(centres))
    return (logits + sizes.log()[:, None]).logsumexp(-1)


def newest(keys: Tensor, queries: Tensor) -> Tensor:
    order = torch.arange(keys.shape[1], dtype=torch.float32)
    return order.expand(*queries.shape[:2], -1)


def oracle(keys: Tensor, queries: Tensor) -> Tensor:
    return _summed(keys, queries)


def _halved(keys: Tensor) -> Tensor:
    return keys.unflatten(2, (-1, 2)).mean(3)


def _summed(keys: Tensor, queries: Tensor) -> Tensor:
    return torch.einsum("hmd,hntd->hmnt", queries, keys).logsumexp(-1)


BASELINES = {
    "mean": Baseline(mean, True, 1 / 16),
    "Quest": Baseline(quest, True, 2 / 16),
    "HATA": Baseline(hashed, False, HASH_BITS / (64 * 16)),
    "KVStar": Baseline(merged, True, KEPT_DIMENSIONS / 2),
    "sink + recent": Baseline(newest, False, 0.0),
}
EXTRA = {
    "pairs": Baseline(pairs, True, (8 * 36) / 2048),
    "clusters": Baseline(clusters, True, (8 * 36 + 8) / 2048),
}
ORACLE = Baseline(oracle, True, 1.0)

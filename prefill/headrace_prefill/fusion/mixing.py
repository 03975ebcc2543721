"""The learned mixture of two layers' KV, per channel, and what it commutes with.

    K_i = a_first * K_0 + a_last * K_(n-1)        V_i = b_first * V_0 + b_last * V_(n-1)

K_0 and K_(n-1) are the cached keys, which are rotated (RoPE) and, where the model has it, normed.
A rotary embedding turns the pair of channels (j, j + D/2). Both channels of a pair have the same
weight a, so mixing rotated keys is rotating mixed keys: a * R(p) K = R(p) (a * K), and a query's
score depends on the difference of positions alone. For that the keys' weights are kept once a pair.

Since the weights are per channel they can be moved out of attention instead:

    q . K_i = (q * a_first) . K_0 + (q * a_last) . K_(n-1)
    P V_i   = b_first * (P V_0) + b_last * (P V_(n-1))

Source: Reconstructing KV Caches with Cross-layer Fusion (arXiv 2512.03870), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_channel(pairs: Tensor) -> Tensor:
    """[..., D/2] weights of rotary pairs as [..., D] weights of channels."""
    return torch.cat([pairs, pairs], -1)


def mix(first: Tensor, last: Tensor, first_weight: Tensor, last_weight: Tensor) -> Tensor:
    """first * first_weight + last * last_weight.

    Args:
        first, last: [..., kv_heads, D].
        first_weight, last_weight: [kv_heads, D].
    """
    return first * first_weight + last * last_weight

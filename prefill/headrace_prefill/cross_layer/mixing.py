"""The learned mixture of two layers' KV, per channel, which commutes with rotary embeddings.

    K_i = a_first * K_0 + a_last * K_(n-1)        V_i = b_first * V_0 + b_last * V_(n-1)

K_0 and K_(n-1) are the cached keys, which are rotated (RoPE) and, where the model has it, normed.
A rotary embedding rotates the pair of channels (j, j + D/2). Both channels of a pair have the same
weight a, so mixing rotated keys equals rotating mixed keys: a * R(p) K = R(p) (a * K), and a
query's score depends only on the difference of positions. Therefore the keys' weights are stored
once for each pair.

Since the weights are per channel, they can instead be moved out of attention:

    q . K_i = (q * a_first) . K_0 + (q * a_last) . K_(n-1)
    P V_i   = b_first * (P V_0) + b_last * (P V_(n-1))

Source: Reconstructing KV Caches with Cross-layer Fusion (arXiv 2512.03870), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_channel(pairs: Tensor) -> Tensor:
    """Return weights of rotary pairs, [..., D/2], as weights of channels, [..., D]."""
    return torch.cat([pairs, pairs], -1)


def mix(first: Tensor, last: Tensor, first_weight: Tensor, last_weight: Tensor) -> Tensor:
    """Return first * first_weight + last * last_weight.

    Args:
        first, last: [..., kv_heads, D].
        first_weight, last_weight: [kv_heads, D].
    """
    return first * first_weight + last * last_weight

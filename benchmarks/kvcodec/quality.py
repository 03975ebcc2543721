"""A codec's errors: of K, V and the attention's output, and of the next token."""

from __future__ import annotations

import statistics

import torch

from benchmarks.kvcodec.model import Layer, Text, decoded
from headrace_kvstore.codec import Codec


def relative_rms(exact: torch.Tensor, other: torch.Tensor) -> float:
    """RMS of the error by RMS of the exact."""
    exact, other = exact.double(), other.double()
    return float(((exact - other).square().mean() / exact.square().mean()).sqrt())


def attend(queries: torch.Tensor, layer: Layer) -> torch.Tensor:
    """softmax(q K^T / sqrt(d)) V in float32; query heads share KV heads in runs."""
    keys, values = (
        part.float().repeat_interleave(queries.shape[0] // part.shape[0], 0) for part in layer
    )
    scores = queries.float() @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5
    return scores.softmax(-1) @ values


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean KL(exact || other) of the next token, in nats."""
    p, q = exact.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def errors(texts: list[Text], codec: Codec, window_tokens: int) -> dict[str, float]:
    """Return the means over texts (and layers, for the first three) of one codec's errors."""
    seen: dict[str, list[float]] = {"k_rms": [], "v_rms": [], "attention_rms": []}
    seen |= {"kl": [], "top1": []}
    for text in texts:
        layers = decoded(text.layers, codec, window_tokens)
        for exact, other, queries in zip(text.layers, layers, text.queries, strict=True):
            seen["k_rms"].append(relative_rms(exact[0], other[0]))
            seen["v_rms"].append(relative_rms(exact[1], other[1]))
            both = attend(queries, exact), attend(queries, other)
            seen["attention_rms"].append(relative_rms(*both))
        logits = text.run(layers)
        seen["kl"].append(divergence(text.logits, logits))
        same = text.logits.argmax(-1) == logits.argmax(-1)
        seen["top1"].append(float(same.float().mean()))
    return {name: statistics.fmean(values) for name, values in seen.items()}


def keys_as_values_rms(texts: list[Text], codec: Codec) -> float:
    """K's error if keys were quantised per token as values are: why they are not."""
    swapped = [[(layer[1], layer[0]) for layer in text.layers] for text in texts]
    return statistics.fmean(
        relative_rms(exact[1], other[1])
        for layers in swapped
        for exact, other in zip(layers, decoded(layers, codec, 0), strict=True)
    )

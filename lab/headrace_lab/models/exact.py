"""The exact model's answer to a prompt, and the error of the answer over other KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_lab.models.lm import KV, LM


@dataclass(frozen=True)
class Exact:
    """The exact model's KV and answer for a prompt.

    Attributes:
        tokens: int64 [n], the prompt.
        kv: KV of all of them.
        answer: int64 [n + m], the prompt and the answer.
        logits: log-probabilities, fp32 [m, vocabulary], at each token of the answer.
    """

    tokens: Tensor
    kv: KV
    answer: Tensor
    logits: Tensor

    @staticmethod
    def of(lm: LM, tokens: Sequence[int], count: int) -> Exact:
        """Compute a prompt and its greedy answer of `count` tokens."""
        prompt = torch.tensor(tokens)
        kv = lm.prefill(prompt)
        answer = lm.greedy(prompt, kv, count)
        return Exact(prompt, kv, answer, _follow(lm, answer, kv, len(tokens)))


@dataclass(frozen=True)
class Score:
    """Error of an approximation against the exact model, on the exact model's own answer.

    Attributes:
        kl: mean over tokens of KL(exact || approximation), nats.
        kl_p99: 99th percentile of the KL over tokens.
        top1: share of tokens where both have the same likeliest token.
        perplexity: the approximation's perplexity over the exact model's.
    """

    kl: float
    kl_p99: float
    top1: float
    perplexity: float


def score(lm: LM, exact: Exact, kv: KV) -> Score:
    """Score KV of the prompt. K and V of its last token are computed again over that KV."""
    n = len(exact.tokens)
    found = _follow(lm, exact.answer, kv, n)
    kl = (exact.logits.exp() * (exact.logits - found)).sum(-1).double()
    said = exact.answer[n:, None]
    nll = (exact.logits.gather(1, said) - found.gather(1, said)).mean()
    same = found.argmax(-1) == exact.logits.argmax(-1)
    return Score(
        float(kl.mean()),
        float(np.percentile(kl.numpy(), 99)),
        float(same.float().mean()),
        float(nll.exp()),
    )


def _follow(lm: LM, answer: Tensor, kv: KV, n: int) -> Tensor:
    return lm.follow(answer[:-1], kv, n - 1).log_softmax(-1)

"""The error of a converted model against the exact one: perplexity and KL on texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from headrace_lab.cross_layer.trace import Trace
from headrace_lab.models.decoder import Decoder


@dataclass(frozen=True)
class Error:
    """Error of a model against the exact one.

    Attributes:
        perplexity: its perplexity over the exact model's, on the same tokens.
        kl: mean KL from the exact model's distribution, nats a token.
    """

    perplexity: float
    kl: float


class Truth:
    """States of the exact model on texts, with which other models are compared.

    Args:
        tokens: int64 [texts, n].

    Attributes:
        perplexity: the exact model's own.
    """

    def __init__(self, model: Decoder, tokens: Tensor) -> None:
        self._model, self._tokens = model, tokens
        self._trace = Trace.of(model, tokens)
        self._loss = self._compare(model, self._trace.inputs[-1])[0]
        self.perplexity = float(torch.tensor(self._loss).exp())

    def error(self, other: Decoder, first: int = 0) -> Error:
        """Return the error of another model.

        Args:
            first: the first layer that differs; the layers below it are not computed.
        """
        loss, kl = self._compare(other, self._trace.last(other, first))
        return Error(float(torch.tensor(loss - self._loss).exp()), kl)

    @torch.no_grad()
    def _compare(self, other: Decoder, hidden: Tensor) -> tuple[float, float]:
        """Return loss and KL, nats a token, given the last layer's output `hidden`.

        Logits exist for one text at a time."""
        loss, kl = 0.0, 0.0
        for mine, its, tokens in zip(self._trace.inputs[-1], hidden, self._tokens, strict=True):
            logits = other.logits(its)
            loss += float(cross_entropy(logits[:-1], tokens[1:]))
            target = self._model.logits(mine).log_softmax(-1)
            kl += float(
                kl_div(logits.log_softmax(-1), target, reduction="batchmean", log_target=True)
            )
        return loss / len(hidden), kl / len(hidden)

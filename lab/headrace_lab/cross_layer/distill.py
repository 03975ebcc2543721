"""Distillation of the exact model into the layers without KV.

The loss is the KL from the exact model's distribution, on one text in each step. Only the readers'
layers are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from headrace_lab.models.decoder import Decoder

LEARNING_RATE = 3e-4
MIX_RATE = 3e-3
"""Learning rate of mixing weights, which are about 1; elements of matrices are about 0.03."""
CLIP = 1.0


def distill(
    model: Decoder,
    exact: Decoder,
    texts: Sequence[Tensor],
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train `model`.

    Args:
        exact: the model that it was converted from.
        texts: token ids, int64 [n] each; each is used once.
        report: called with the number of each step, from 1, and its loss.
    """
    groups = _groups(model)
    learning = [weight for group in groups for weight in group["params"]]
    for weight in model.parameters():
        weight.requires_grad_(False)
    for weight in learning:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, text in enumerate(texts):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / len(texts))
        with torch.no_grad():
            target = exact(text[None])[0].log_softmax(-1)
        with torch.enable_grad():
            found = model(text[None])[0].log_softmax(-1)
            loss = kl_div(found, target, reduction="batchmean", log_target=True)
            loss.backward()
        nn.utils.clip_grad_norm_(learning, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        report(step + 1, float(loss.detach()))
    for weight in model.parameters():
        weight.requires_grad_(True)


def _groups(model: Decoder) -> list[dict[str, Any]]:
    cross_layer = model.shape.cross_layer
    mixing: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for number, layer in enumerate(model.model.layers):
        if cross_layer.stores(number):
            continue
        for name, weight in layer.named_parameters():
            (mixing if ".mix." in name else others).append(weight)
    return [{"params": others, "lr": LEARNING_RATE}, {"params": mixing, "lr": MIX_RATE}]

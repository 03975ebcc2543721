"""Quality of an arm's predictions, compared with the exact model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.longcontext.texts import Case

Row = dict[str, Any]


def judged_rows(case: Case) -> Tensor:
    """Rows of the tail that predict the judged tokens: int64 [judged]."""
    return torch.tensor(case.judged) - 1 - case.first


def judge(case: Case, arm: str, share: float, kept: float, exact: Tensor, found: Tensor) -> Row:
    """One row.

    Args:
        share: of the KV's bytes that the arm may keep.
        kept: that it kept.
        exact, found: log-probabilities fp32 [judged, vocabulary].
    """
    at = torch.tensor(case.judged)
    right = torch.tensor(case.tokens)[at]
    kl = (exact.exp() * (exact - found)).sum(-1).double()
    knows, says = (one.argmax(-1) == right for one in (exact, found))
    nll, nll_exact = (-one.gather(1, right[:, None]).mean() for one in (found, exact))
    facts = {}
    for depth, tokens in case.facts.items():
        of = torch.isin(at, torch.tensor(tokens))
        facts[f"{depth:.2f}"] = [int((says & knows & of).sum()), int((knows & of).sum())]
    return {
        "text": case.name,
        "kind": case.kind,
        "context_tokens": case.first,
        "judged": len(at),
        "arm": arm,
        "share": share,
        "kept": kept,
        "kl": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1": float((exact.argmax(-1) == found.argmax(-1)).double().mean()),
        "log_perplexity_over_exact": float(nll - nll_exact),
        "facts": facts,
    }

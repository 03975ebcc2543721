"""Effect of errors of reused KV on the answer, and its share that each choice of rows leaves.

    python -m benchmarks.blending.first_order --json FILE [--prompts N]

The KL of an answer over placed KV changes with an error of K or V of token i at layer l by

    felt(l, i) = |dKL/dK[l, i] . (K_exact - K_placed) + dKL/dV[l, i] . (V_exact - V_placed)|

to first order, through all that is computed after it: text of no chunk, the question, the answer.
A choice leaves the share of `felt` in pairs that it does not compute. This is not a KL, but it does
not depend on chance at single tokens, and takes one backward pass for any number of choices. The
first four tokens of each chunk are exact here: every rule computes them, and their error is large.

    left.<choice>.<budget>   mean over prompts; texts for tuning, 1,900 to 2,800 tokens
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.blending.arms import offsets_depths
from benchmarks.plain import model
from headrace_lab.blending.correct import Case
from headrace_lab.models.exact import Exact
from headrace_lab.models.lm import KV, LM
from headrace_prefill.blending.token_selection import LAST_TOKENS, SelectionRule

TOKENS, ANSWER, SEED = (1900, 2800), 48, 7
STARTS = 4
BUDGETS = 0.10, 0.15
Float = NDArray[np.float32]
Int = NDArray[np.int64]


def felt(lm: LM, case: Case) -> Float:
    """Return `felt` of the module's docstring, float32 [layers, tokens of chunks]."""
    n, count = len(case.exact.tokens), len(case.exact.logits)
    start = case.placed.clone()
    firsts = torch.from_numpy(np.flatnonzero((case.offsets >= 0) & (case.offsets < STARTS)))
    start.keys[:, firsts] = case.exact.kv.keys[:, firsts]
    start.values[:, firsts] = case.exact.kv.values[:, firsts]
    outside = torch.from_numpy(np.flatnonzero(case.offsets < 0))
    rows = torch.cat([outside, torch.arange(n, n + count - 1)])
    with torch.enable_grad():
        keys, values = start.keys.requires_grad_(), start.values.requires_grad_()
        longer = lm.empty(count - 1)
        kv = KV(torch.cat([keys, longer.keys], 1), torch.cat([values, longer.values], 1))
        logits = lm.compute(case.exact.answer[:-1], kv, rows)[-count:].log_softmax(-1)
        exact = case.exact.logits
        (exact.exp() * (exact - logits)).sum(-1).mean().backward()
    at = torch.from_numpy(case.chunk)
    assert keys.grad is not None and values.grad is not None
    change = (keys.grad * (case.exact.kv.keys - keys.detach())).sum((2, 3))[:, at]
    change += (values.grad * (case.exact.kv.values - values.detach())).sum((2, 3))[:, at]
    found: Float = change.abs().numpy()
    return found


def answers_mass(lm: LM, case: Case) -> Float:
    """Return the exact answer's attention, in the form of a probe's mass."""
    n, count = len(case.exact.tokens), len(case.exact.logits)
    kv, found = lm.empty(n + count - 1), np.zeros((lm.layers, n), np.float32)
    kv.keys[:, :n], kv.values[:, :n] = case.exact.kv.keys, case.exact.kv.values
    there = torch.ones(n + count - 1, dtype=torch.bool)

    def watch(layer: int, rows: torch.Tensor, q: torch.Tensor) -> None:
        found[layer] = lm.mass(q, rows, kv.keys[layer], there)[:n].numpy()

    lm.compute(case.exact.answer[:-1], kv, torch.arange(n - 1, n + count - 1), watch=watch)
    return found


def choices(lm: LM, case: Case, budget: float) -> dict[str, Int]:
    """Depths of the chunks' tokens."""
    tokens, layers = len(case.chunk), lm.layers
    order = np.argsort(case.offsets[case.chunk], kind="stable")
    epic = np.zeros(tokens, np.int64)
    epic[order[: int(budget * tokens)]] = layers
    found = {"EPIC": offsets_depths(case, epic, layers)}
    for name, drafts in (("ours", None), ("ours, no draft", 0)):
        probed = case.probed(lm) if drafts is None else case.probed(lm, drafts=drafts)
        left = budget - probed.rows / tokens
        found[name] = SelectionRule().depths(case.offsets, probed.mass, layers, left)
    left = budget - LAST_TOKENS / tokens
    found["attention of the exact answer"] = SelectionRule().depths(
        case.offsets, answers_mass(lm, case), layers, left
    )
    return {name: depths[case.chunk] for name, depths in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--prompts", type=int, default=9, metavar="N")
    options = parser.parse_args()
    from headrace.model import resolve
    from headrace_lab.texts.prompts import documents, prompts

    lm, encode = model(str(resolve(None)))
    shares: dict[str, list[float]] = {}
    files = documents(False)
    for prompt in prompts(encode, options.prompts, files=files, tokens=TOKENS, seed=SEED):
        case = Case.of(lm, prompt, Exact.of(lm, prompt.tokens, ANSWER))
        errors = felt(lm, case)
        for budget in BUDGETS:
            for name, depths in choices(lm, case, budget).items():
                left = errors[np.arange(lm.layers)[:, None] >= depths].sum() / errors.sum()
                shares.setdefault(f"left.{name}.{budget}", []).append(float(left))
        print(prompt.name, {name: round(some[-1], 3) for name, some in shares.items()}, flush=True)
        found = {name: float(np.mean(some)) for name, some in shares.items()}
        options.json.write_text(json.dumps({"figures": found, "prompts": shares}, indent=1))


if __name__ == "__main__":
    main()

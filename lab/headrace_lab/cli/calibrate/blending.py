"""`headrace lab calibrate blending`: the recompute ratio that meets a target error, for one model.

The model is computed in plain torch, outside of any engine, on prompts of several documents, most
of which were seen elsewhere before. Documents are the user's own texts, or those of installed
packages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.cli.console import CliError, stderr, stdout
from headrace_lab.cli.calibrate.model import model
from headrace_lab.cli.calibrate.texts import files_of

MARK = "\x00here\x00"


def calibrate(
    name: str | None,
    *,
    texts: Path | None,
    prompts: int,
    tokens: int,
    target_kl: float,
    output: Path | None,
) -> None:
    """Measure, print the curve, and print the budget for the target.

    Raises:
        CliError: plain torch cannot compute the model, there are too few texts, or no budget meets
            the target.
    """
    from headrace_lab.blending import curve as curves
    from headrace_lab.texts.prompts import documents
    from headrace_lab.texts.prompts import prompts as made

    folder, lm, tokenizer, encode = model(name)
    files = documents(False) if texts is None else files_of(texts)
    curve = curves.Curve()
    begun = time.monotonic()
    span = int(0.8 * tokens), int(1.2 * tokens)
    every = made(encode, prompts, files=files, tokens=span, frame=frame(tokenizer))
    for number, prompt in enumerate(every):
        curve.add(curves.points(lm, prompt))
        stderr().print(
            f"prompt {number + 1} of {prompts}: {len(prompt.tokens)} tokens, "
            f"{time.monotonic() - begun:.0f} s",
            markup=False,
        )
    table = Table("budget", "KL mean", "KL worst prompt", "same top token")
    for budget, scores in sorted(curve.scores.items()):
        same = sum(one.top1 for one in scores) / len(scores)
        worst = max(one.kl for one in scores)
        table.add_row(f"{budget:.2f}", f"{curve.kl(budget):.4f}", f"{worst:.4f}", f"{same:.3f}")
    stdout().print(table)
    wanted = curve.budget_for(target_kl)
    if output is not None:
        points = {str(b): [asdict(s) for s in scores] for b, scores in curve.scores.items()}
        output.write_text(json.dumps({"model": str(folder), "budget": wanted, "scores": points}))
    if wanted is None:
        raise CliError(
            f"no budget up to {max(curve.scores):.2f} keeps to a KL of {target_kl:g}; allow more "
            "error, or leave blending off"
        )
    stdout().print(f"techniques.blending.recompute_ratio: {wanted:.2f}", markup=False)


def frame(tokenizer: Any) -> tuple[str, str]:
    """Return the text that the model's chat template puts before and after a user's message."""
    from headrace_lab.texts.prompts import SYSTEM

    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": MARK}]
    template: Callable[..., str] = tokenizer.apply_chat_template
    try:
        whole = template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:
        try:  # a template without a system role
            whole = template(messages[1:], tokenize=False, add_generation_prompt=True)
        except Exception:  # or no template
            return "", ""
    before, _, behind = whole.partition(MARK)
    return before, behind

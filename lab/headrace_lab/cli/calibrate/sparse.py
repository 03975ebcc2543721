"""`headrace lab calibrate sparse`: a model's bases, and the keep ratio that meets a target error.

The bases are learned from some texts. The error of each ratio is measured on other texts, with an
engine's summaries and choice of pages.
"""

from __future__ import annotations

from pathlib import Path

from headrace.cli.console import CliError, stdout
from headrace_lab.cli.calibrate.file import CalibrationInputs, means


def calibrate(
    name: str | None,
    *,
    texts: Path | None,
    learn: int,
    measure: int,
    tokens: int,
    page_tokens: int,
    target_kl: float,
    output: Path | None,
) -> None:
    """Learn, measure, print the curve, and write the file for the target.

    Raises:
        CliError: plain torch cannot compute the model, the texts are too short, the file cannot be
            written, or no keep ratio meets the target.
    """
    from headrace_decode.sparse.engine.calibration import Calibration, write
    from headrace_lab.sparse.calibrate import Learning, divergences, min_share

    asked = CalibrationInputs.of(name, "sparse", texts, learn + measure, tokens, output)
    learning, scores = Learning(asked.lm, page_tokens), []
    for number, text in enumerate(asked.texts[:learn], 1):
        learning.add(text)
        asked.done(number, "learned")
    bases = learning.bases()
    for number, text in enumerate(asked.texts[learn:], learn + 1):
        scores.append(divergences(asked.lm, text, bases, page_tokens))
        asked.done(number, "measured")
    kl = means(scores)
    wanted = min_share(kl, target_kl)
    if wanted is None:
        raise CliError(
            f"no ratio up to {max(kl):.2f} keeps to a KL of {target_kl:g}; allow more error, or "
            "leave sparse attention off. No file was written"
        )
    found = Calibration(
        asked.model, asked.shape, page_tokens, kl, target_kl=target_kl, keep_ratio=wanted
    )
    write(asked.file, found, bases)
    stdout().print(f"keep_ratio: {wanted:.2f}", markup=False)
    stdout().print(f"techniques.sparse.calibration: {asked.file}", markup=False, soft_wrap=True)

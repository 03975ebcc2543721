"""`headrace lab calibrate compression`: the predictor of a model, and the error of compressed
contexts with it.

The predictor learns from some texts, which are read again. The error of each share is measured on
other texts, with the scores and pages that an engine uses.
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
    output: Path | None,
) -> None:
    """Learn, measure, print the curve, and write the file.

    Raises:
        CliError: plain torch cannot compute the model, the texts are too short, or the file cannot
            be written.
    """
    import torch

    from headrace_decode.attention.calibration_file import CalibrationResult
    from headrace_decode.compression.engine.calibration import write
    from headrace_lab.compression.learning import Samples
    from headrace_lab.compression.reading import Computed, divergences

    asked = CalibrationInputs.of(name, "compression", texts, learn + measure, tokens, output)
    lm, samples, scores = asked.lm, Samples(), []
    for number, text in enumerate(asked.texts[:learn], 1):
        context = Computed.of(lm, lm.rope, torch.tensor(text))
        samples.add(context.turned, context.values.transpose(1, 2), context.repeated(lm))
        asked.done(number, "read again")
    predictor = samples.learned()
    for number, text in enumerate(asked.texts[learn:], learn + 1):
        scores.append(divergences(lm, lm.rope, text, predictor, page_tokens))
        asked.done(number, "measured")
    kl = means(scores)
    try:
        write(asked.file, CalibrationResult(asked.model, asked.shape, page_tokens, kl), predictor)
    except OSError as error:
        raise CliError(f"{asked.file} cannot be written: {error.strerror or error}") from None
    stdout().print(
        f"techniques.compression.calibration: {asked.file}", markup=False, soft_wrap=True
    )

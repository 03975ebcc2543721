"""`headrace calibrate bounded`: the gate of a model, and what bounded contexts cost with it.

The gate learns from some texts, which are read again, and shares are measured on others, with the
scores and units that an engine has.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.table import Table

from headrace.cli.calibrate.model import model
from headrace.cli.calibrate.texts import check_writable, files_of, long_texts
from headrace.cli.console import CliError, stderr, stdout


def bounded(
    name: str | None,
    *,
    texts: Path | None,
    learn: int,
    measure: int,
    tokens: int,
    unit_tokens: int,
    output: Path | None,
) -> None:
    """Learn, measure, print the curve, and write the file.

    Raises:
        CliError: the model cannot be computed so, the texts are too short, or the file cannot be
            written.
    """
    import torch

    from headrace_decode.bounded.engine.calibration import write
    from headrace_decode.bounded.offline.learning import Samples
    from headrace_decode.bounded.offline.reading import Computed, divergences
    from headrace_decode.sparse.calibration_file import Measured, Shape
    from headrace_prefill.reuse.offline.prompts import documents

    if output is not None:
        check_writable(output)
    files = documents(False) if texts is None else files_of(texts)
    folder, lm, _, encode = model(name)
    shape = Shape.of(json.loads((Path(folder) / "config.json").read_text("utf-8")))
    file = output or Path(f"{Path(name or folder).name}.bounded.safetensors")
    check_writable(file)
    begun, count = time.monotonic(), learn + measure
    # All are cut before the first is computed: too short texts are refused at once.
    every = list(long_texts(encode, files, count, tokens))

    def done(what: str) -> None:
        stderr().print(f"{what}, {time.monotonic() - begun:.0f} s", markup=False)

    samples = Samples()
    for number, text in enumerate(every[:learn], 1):
        context = Computed.of(lm, lm.rope, torch.tensor(text))
        samples.add(context.turned, context.values.transpose(1, 2), context.repeated(lm))
        done(f"text {number} of {count} read again")
    gate = samples.learned()
    done("learned")
    scores = []
    for number, text in enumerate(every[learn:], learn + 1):
        scores.append(divergences(lm, lm.rope, text, gate, unit_tokens))
        done(f"text {number} of {count} measured")
    kl = {share: sum(one[share] for one in scores) / measure for share in scores[0]}
    table = Table("share", "KL mean", "KL worst text")
    for share, mean in kl.items():
        table.add_row(f"{share:.2f}", f"{mean:.4f}", f"{max(one[share] for one in scores):.4f}")
    stdout().print(table)
    try:
        write(file, Measured(Path(name or folder).name, shape, unit_tokens, kl), gate)
    except OSError as error:
        raise CliError(f"{file} cannot be written: {error.strerror or error}") from None
    stdout().print(f"techniques.bounded.calibration: {file}", markup=False, soft_wrap=True)

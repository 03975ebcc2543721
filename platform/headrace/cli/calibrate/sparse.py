"""`headrace calibrate sparse`: the bases of a model, and the share that keeps to a target error.

The bases are learned from some texts, and shares are measured on others, with summaries and choice
as an engine has them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.table import Table

from headrace.cli.calibrate.model import model
from headrace.cli.calibrate.texts import check_writable, files_of, long_texts
from headrace.cli.console import CliError, stderr, stdout


def sparse(
    name: str | None,
    *,
    texts: Path | None,
    learn: int,
    measure: int,
    tokens: int,
    unit_tokens: int,
    target_kl: float,
    output: Path | None,
) -> None:
    """Learn, measure, print the curve, and write the file for the target.

    Raises:
        CliError: the model cannot be computed so, the texts are too short, the file cannot be
            written, or no share keeps to the target.
    """
    from headrace_decode.sparse.calibration_file import Shape
    from headrace_decode.sparse.engine.calibration import Calibration, write
    from headrace_decode.sparse.offline.calibrate import Learning, divergences, least_share
    from headrace_prefill.reuse.offline.prompts import documents

    if output is not None:
        check_writable(output)
    files = documents(False) if texts is None else files_of(texts)
    folder, lm, _, encode = model(name)
    shape = Shape.of(json.loads((Path(folder) / "config.json").read_text("utf-8")))
    file = output or Path(f"{Path(name or folder).name}.sparse.safetensors")
    check_writable(file)
    begun, count = time.monotonic(), learn + measure
    # All are cut before the first is computed: too short texts are refused at once.
    every = list(long_texts(encode, files, count, tokens))

    def done(number: int, what: str) -> None:
        taken = time.monotonic() - begun
        stderr().print(f"text {number} of {count} {what}, {taken:.0f} s", markup=False)

    learning, scores = Learning(lm, unit_tokens), []
    for number, text in enumerate(every[:learn], 1):
        learning.add(text)
        done(number, "learned")
    bases = learning.bases()
    for number, text in enumerate(every[learn:], learn + 1):
        scores.append(divergences(lm, text, bases, unit_tokens))
        done(number, "measured")
    kl = {share: sum(one[share] for one in scores) / measure for share in scores[0]}
    table = Table("share", "KL mean", "KL worst text")
    for share, mean in kl.items():
        table.add_row(f"{share:.2f}", f"{mean:.4f}", f"{max(one[share] for one in scores):.4f}")
    stdout().print(table)
    wanted = least_share(kl, target_kl)
    if wanted is None:
        raise CliError(
            f"no share up to {max(kl):.2f} keeps to a KL of {target_kl:g}; allow more error, or "
            "leave sparse attention off. No file was written"
        )
    found = Calibration(
        Path(name or folder).name, shape, unit_tokens, kl, target_kl=target_kl, share=wanted
    )
    write(file, found, bases)
    stdout().print(f"share: {wanted:.2f}", markup=False)
    stdout().print(f"techniques.sparse.calibration: {file}", markup=False, soft_wrap=True)

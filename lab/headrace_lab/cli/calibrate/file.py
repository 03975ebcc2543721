"""Common parts of commands that write a calibration file: they check the arguments before anything
is computed, and print the curve."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from headrace.cli.console import CliError, stderr, stdout
from headrace_lab.cli.calibrate.model import model
from headrace_lab.cli.calibrate.texts import files_of, long_texts

if TYPE_CHECKING:
    from headrace_decode.attention.calibration_file import ModelShape
    from headrace_lab.models.lm import LM


@dataclass(frozen=True)
class CalibrationInputs:
    """A model, the texts to calibrate it on, and the file to write.

    Attributes:
        model: the model's name, for messages.
        shape: the model's shape.
        texts: token ids, all of one length.
        file: the file to write.
    """

    lm: LM
    model: str
    shape: ModelShape
    texts: list[list[int]]
    file: Path
    _begun: float = field(default_factory=time.monotonic)

    @classmethod
    def of(
        cls,
        name: str | None,
        kind: str,
        texts: Path | None,
        count: int,
        tokens: int,
        output: Path | None,
    ) -> CalibrationInputs:
        """Read the model and the texts, and check that the file can be written.

        Args:
            kind: kind of the file, part of its name if no `output` is given.
            count, tokens: number of texts, and tokens of each.

        Raises:
            CliError: plain torch cannot compute the model, the texts are too short, or the file
                cannot be written.
        """
        from headrace_decode.attention.calibration_file import ModelShape
        from headrace_lab.texts.prompts import documents

        if output is not None:
            _check_writable(output)
        files = documents(False) if texts is None else files_of(texts)
        folder, lm, _, encode = model(name)
        shape = ModelShape.of(json.loads((Path(folder) / "config.json").read_text("utf-8")))
        known = Path(name or folder).name
        file = output or Path(f"{known}.{kind}.safetensors")
        _check_writable(file)
        return cls(lm, known, shape, list(long_texts(encode, files, count, tokens)), file)

    def done(self, number: int, what: str) -> None:
        """Print that a text is done."""
        taken = time.monotonic() - self._begun
        stderr().print(f"text {number} of {len(self.texts)} {what}, {taken:.0f} s", markup=False)


def means(scores: Sequence[dict[float, float]]) -> dict[float, float]:
    """Return the mean KL by keep ratio; print it with the KL of the worst text.

    Args:
        scores: KL of each text by keep ratio.
    """
    kl = {
        keep_ratio: sum(one[keep_ratio] for one in scores) / len(scores) for keep_ratio in scores[0]
    }
    table = Table("keep ratio", "KL mean", "KL worst text")
    for keep_ratio, mean in kl.items():
        table.add_row(
            f"{keep_ratio:.2f}", f"{mean:.4f}", f"{max(one[keep_ratio] for one in scores):.4f}"
        )
    stdout().print(table)
    return kl


def _check_writable(file: Path) -> None:
    if not os.access(file.parent, os.W_OK) or file.is_dir():
        raise CliError(f"{file} cannot be written", 2)

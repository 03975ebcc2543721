"""The model that a calibration computes, in plain torch, outside of any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.cli.console import CliError

if TYPE_CHECKING:
    from headrace_lab.models.lm import LM


def model(name: str | None) -> tuple[str, LM, Any, Callable[[str], list[int]]]:
    """Return the folder, the model, its tokenizer, and a function from text to tokens, which adds
    no special ones.

    Raises:
        CliError: plain torch cannot compute the model.
    """
    import torch
    from transformers import AutoTokenizer

    from headrace.model import resolve
    from headrace_lab.models.lm import LM

    torch.set_grad_enabled(False)
    folder = resolve(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    try:
        lm = LM(folder)
    except (ValueError, KeyError, OSError) as error:
        raise CliError(f"{folder}: this model cannot be calibrated: {error}", 2) from None

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return found

    return folder, lm, tokenizer, encode

"""The user's texts that a calibration computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headrace.cli.console import CliError

MIN_TEXTS = 8
CHARACTERS_A_TOKEN = 8
"""Maximum number of characters of a file that are read for each missing token."""


def files_of(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders.

    Raises:
        CliError: there are too few.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    if len(found) < MIN_TEXTS:
        raise CliError(
            f"{folder} has {len(found)} files; give a folder with {MIN_TEXTS} or more texts", 2
        )
    return found


def long_texts(
    encode: Callable[[str], list[int]], files: Sequence[Path], count: int, tokens: int
) -> Iterator[list[int]]:
    """Yield `count` texts of `tokens` tokens each; no two texts have tokens of the same file.

    Raises:
        CliError: the files are too short.
    """
    order = list(files)
    random.Random(0).shuffle(order)
    left = iter(order)
    for number in range(count):
        text: list[int] = []
        for file in left:
            with file.open(encoding="utf-8", errors="replace") as opened:
                text += encode(opened.read(CHARACTERS_A_TOKEN * (tokens - len(text))))
            if len(text) >= tokens:
                break
        else:
            raise CliError(
                f"the texts make {number} pieces of {tokens} tokens, each of files of its own, and "
                f"{count} are needed; give more texts, or smaller --tokens",
                2,
            )
        yield text[:tokens]

"""The choice of the table columns that fit a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rich.cells import cell_len

Column = TypeVar("Column")
GAP = 2
"""Characters between two columns."""


def fitting(columns: Mapping[Column, Sequence[str]], width: int) -> list[Column]:
    """Return the first columns that fit `width` characters together.

    Args:
        columns: header and cells of each column, the most important one first.
    """
    kept, left = list[Column](), width + GAP
    for column, texts in columns.items():
        left -= max(map(cell_len, texts)) + GAP
        if left < 0:
            break
        kept.append(column)
    return kept

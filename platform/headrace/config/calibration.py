"""Reads the calibration files of techniques, and the ratio in the one for sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headrace.config.techniques import SparseSection, TechniquesSection

if TYPE_CHECKING:
    from headrace_decode.attention.calibration_file import CalibrationResult
    from headrace_decode.sparse.engine.calibration import Calibration

FIELD = "techniques.sparse.calibration"
COMPRESSION_FIELD = "techniques.compression.calibration"
DEFAULT_KEEP_RATIO = 0.1
"""Ratio without a calibration file."""


Found = TypeVar("Found", bound="CalibrationResult")


def sparse_calibration(section: SparseSection) -> Calibration | None:
    """Return the contents of the calibration file of sparse attention; None without one.

    Raises:
        ValueError: the file cannot be used; the text says why, and which command makes one.
    """
    if section.calibration is None:
        return None
    from headrace_decode.sparse.engine.calibration import COMMAND, read

    return _usable(section.calibration, section.page_tokens, read, COMMAND)


def compression_calibration(techniques: TechniquesSection) -> CalibrationResult | None:
    """Return the contents of the calibration file of compression; None without one.

    Raises:
        ValueError: as `sparse_calibration`.
    """
    section = techniques.compression
    if section.calibration is None:
        return None
    from headrace_decode.compression.engine.calibration import COMMAND, read

    return _usable(section.calibration, techniques.sparse.page_tokens, read, COMMAND)


def _usable(file: str, page_tokens: int, read: Callable[[Path], Found], command: str) -> Found:
    from headrace_decode.attention.calibration_file import CalibrationError

    try:
        found = read(Path(file))
        if found.page_tokens != page_tokens:
            raise CalibrationError(
                f"it is for pages of {found.page_tokens} tokens, and techniques.sparse.page_tokens "
                f"is {page_tokens}"
            )
    except CalibrationError as error:
        raise ValueError(
            f"{file} cannot be used: {error}. `{command} --page-tokens {page_tokens}` makes such a "
            "file"
        ) from None
    return found


def keep_ratio_of(section: SparseSection) -> float:
    """Return the ratio of requests that name none.

    Raises:
        ValueError: as `sparse_calibration`.
    """
    if section.keep_ratio is not None:
        return section.keep_ratio
    found = sparse_calibration(section)
    return DEFAULT_KEEP_RATIO if found is None else found.keep_ratio

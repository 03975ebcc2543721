"""Reads the files that `techniques.NAME.calibration` name, and the share in one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headrace.config.techniques import SparseSection, TechniquesSection

if TYPE_CHECKING:
    from headrace_decode.sparse.calibration_file import Measured
    from headrace_decode.sparse.engine.calibration import Calibration

FIELD = "techniques.sparse.calibration"
BOUNDED_FIELD = "techniques.bounded.calibration"
SHARE = 0.1
"""Share of an app without a calibration."""


Found = TypeVar("Found", bound="Measured")


def calibrated(section: SparseSection) -> Calibration | None:
    """Return the contents of the calibration file of sparse attention; None without one.

    Raises:
        ValueError: the file cannot be used; the text says why, and which command makes one.
    """
    if section.calibration is None:
        return None
    from headrace_decode.sparse.engine.calibration import COMMAND, read

    return _usable(section.calibration, section.unit_tokens, read, COMMAND)


def bounded_calibrated(techniques: TechniquesSection) -> Measured | None:
    """Return the contents of the calibration file of bounded contexts; None without one.

    Raises:
        ValueError: as `calibrated`.
    """
    section = techniques.bounded
    if section.calibration is None:
        return None
    from headrace_decode.compression.engine.calibration import COMMAND, read

    return _usable(section.calibration, techniques.sparse.unit_tokens, read, COMMAND)


def _usable(file: str, unit_tokens: int, read: Callable[[Path], Found], command: str) -> Found:
    from headrace_decode.sparse.calibration_file import CalibrationError

    try:
        found = read(Path(file))
        if found.unit_tokens != unit_tokens:
            raise CalibrationError(
                f"it is for units of {found.unit_tokens} tokens, and techniques.sparse.unit_tokens "
                f"is {unit_tokens}"
            )
    except CalibrationError as error:
        raise ValueError(
            f"{file} cannot be used: {error}. `{command} --unit-tokens {unit_tokens}` makes such a "
            "file"
        ) from None
    return found


def share_of(section: SparseSection) -> float:
    """Return the share of requests that name none.

    Raises:
        ValueError: as `calibrated`.
    """
    if section.share is not None:
        return section.share
    found = calibrated(section)
    return SHARE if found is None else found.share

"""The file that `techniques.sparse.calibration` names, and the share that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config.techniques import SparseSection

if TYPE_CHECKING:
    from headrace_decode.sparse.engine.calibration import Calibration

FIELD = "techniques.sparse.calibration"
SHARE = 0.1
"""Of an app without a calibration."""


def calibrated(section: SparseSection) -> Calibration | None:
    """What the file says; None without one, or where sparse attention is off.

    Raises:
        ValueError: it cannot be used; the text says why, and which command makes one.
    """
    if section.mode == "off" or section.calibration is None:
        return None
    from headrace_decode.sparse.engine.calibration import COMMAND, CalibrationError, read

    try:
        found = read(Path(section.calibration))
        if found.unit_tokens != section.unit_tokens:
            raise CalibrationError(
                f"it is for units of {found.unit_tokens} tokens, and techniques.sparse.unit_tokens "
                f"is {section.unit_tokens}"
            )
    except CalibrationError as error:
        raise ValueError(
            f"{section.calibration} cannot be used: {error}. `{COMMAND} --unit-tokens "
            f"{section.unit_tokens}` makes such a file"
        ) from None
    return found


def share_of(section: SparseSection) -> float:
    """The share of requests that name none.

    Raises:
        ValueError: as `calibrated`.
    """
    if section.share is not None:
        return section.share
    found = calibrated(section)
    return SHARE if found is None else found.share

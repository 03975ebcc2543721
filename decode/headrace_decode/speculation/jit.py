"""How this package's loops are compiled: without the GIL, and kept on disk where possible.

A look-up is a microsecond of small functions that hand arrays to one another. A call that is not
inlined copies seven to ten words of each array, and where it might raise, each view that it is
given is counted up and down with locked instructions. So every function is inlined into its
compiled callers, and a division by zero is inf or NaN instead of an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import njit  # type: ignore[import-untyped]

logger = logging.getLogger("headrace.speculation")


def jit(function: Callable[..., Any]) -> Any:
    """Compile on first use. The code is kept beside the source, in the user's cache or in
    NUMBA_CACHE_DIR; where none of these can be written, each process compiles for itself."""
    options = {"nogil": True, "forceinline": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError as error:
        logger.info("compiled code is not kept on disk: %s", error)
        return njit(**options)(function)

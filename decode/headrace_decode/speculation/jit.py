"""How this package's loops are compiled: without the GIL, and kept on disk where possible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import njit  # type: ignore[import-untyped]

logger = logging.getLogger("headrace.speculation")


def jit(function: Callable[..., Any]) -> Any:
    """Compile on first use. The code is kept beside the source, in the user's cache or in
    NUMBA_CACHE_DIR; where none of these can be written, each process compiles for itself."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        logger.info("compiled code is not kept on disk: %s", error)
        return njit(nogil=True)(function)

"""Compilation with numba, also if no folder for the compiled code can be written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import njit  # type: ignore[import-untyped]

logger = logging.getLogger("headrace.kvstore")


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function as `numba.njit` does. The code is kept beside the function's file, in the
    user's cache or in NUMBA_CACHE_DIR. If none of these can be written, each process compiles for
    itself."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError as error:
            logger.info("compiled code is not kept on disk: %s", error)
            return njit(**options)(function)

    return compiled

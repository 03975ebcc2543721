"""Number of pages that a row attends to, and the pages among them that are always chosen.

    n      = pages of the row's KV, the newest (which may be partly filled) included
    chosen = max(ceil(keep_ratio n), sinks + recent)

A row is dense if it has few tokens of KV, where the choice costs more than it saves, or if all
pages would be chosen.
"""

from __future__ import annotations

import math

SINKS = 1
"""Number of first pages that are always attended to."""
RECENT = 2
"""Number of newest pages that are always attended to; the very newest needs no summary."""
MIN_TOKENS = 2048
"""Rows with less KV are dense (`python -m benchmarks.sparse.engine`)."""


def page_count(kv_tokens: int, page_tokens: int) -> int:
    """Return the number of pages that hold so many tokens."""
    return -(-kv_tokens // page_tokens)


def selected_page_count(kv_tokens: int, page_tokens: int, keep_ratio: float) -> int | None:
    """Return the number of pages that a row attends to; None if it is dense.

    Args:
        kv_tokens: the row's KV, its own token included.
        keep_ratio: above 0, at most 1.
    """
    if kv_tokens < MIN_TOKENS:
        return None
    n = page_count(kv_tokens, page_tokens)
    chosen = max(math.ceil(keep_ratio * n), SINKS + RECENT)
    return chosen if chosen < n else None

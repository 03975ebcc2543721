"""The block ids of a transfer, group by group, as engines tell them."""

from __future__ import annotations

from typing import Any


def has_blocks(meta: Any) -> bool:
    """Whether a request has blocks to read. One whose whole prompt is cached here has none.

    Args:
        meta: vLLM's `ReqMeta`.
    """
    return any(len(group) for group in meta.local_block_ids)


def by_group(blocks: Any) -> list[list[int]]:
    """Block ids group by group, from whatever a message made of them.

    Raises:
        TypeError: they are no lists of integers.
    """
    found = [list(group) for group in blocks]
    if any(not isinstance(block, int) for group in found for block in group):
        raise TypeError("block ids that are no integers")
    return found

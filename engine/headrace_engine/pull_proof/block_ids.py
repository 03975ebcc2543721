"""The block ids of a transfer, group by group, as engines report them."""

from __future__ import annotations

from typing import Any


def has_blocks(meta: Any) -> bool:
    """Whether a request has blocks to read. One whose whole prompt is cached here has none.

    Args:
        meta: vLLM's `ReqMeta`.
    """
    return any(len(group) for group in meta.local_block_ids)


def by_group(blocks: Any) -> list[list[int]]:
    """Return block ids group by group, as lists, from the sequences in a message.

    Raises:
        TypeError: these are no sequences of integers.
    """
    found = [list(group) for group in blocks]
    if any(not isinstance(block, int) for group in found for block in group):
        raise TypeError("block ids that are no integers")
    return found

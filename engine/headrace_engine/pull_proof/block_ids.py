"""The block ids of a transfer, group by group, as engines report them."""

from __future__ import annotations

from dataclasses import replace
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


def without_unneeded(read_spec: Any) -> Any:
    """Return vLLM's `ReadSpec` without the producer's blocks of groups of which none is read here.

    vLLM takes the last n blocks where n are read, and for no blocks all of them. With attention in
    chunks no block is read if the next token begins a chunk.
    """
    pairs = zip(read_spec.local_block_ids, read_spec.remote_block_ids, strict=True)
    theirs = [list(group) if len(ours) else [] for ours, group in pairs]
    return replace(read_spec, remote_block_ids=theirs)

"""Keeps approximate KV of a request out of its engine's prefix cache, and so out of the store.

A cache salt isolates a whole prompt. This module isolates the blocks from one on: those before are
exact, and are shared as any others. `tests/unit/test_contracts_private_kv.py` pins the uses of
vLLM.
"""

from __future__ import annotations

import uuid
from typing import Any

from headrace_kvstore.identity.private_blocks import private_name


def keep_private(request: Any, first_block: int | None = None) -> None:
    """Give a request's blocks from `first_block` on names that no other block can have.

    Args:
        request: vLLM's, in the scheduler.
        first_block: None for the first block that has no hash yet.
    """
    hasher, mine = request._block_hasher, uuid.uuid4().bytes
    if hasher is None:
        return  # prefix caching is off

    def name_new_blocks(request: Any) -> list[bytes]:
        first = len(request.block_hashes)
        return [private_name(mine, first + n) for n in range(len(hasher(request)))]

    hashes = request.block_hashes
    if first_block is not None:
        hashes[first_block:] = [private_name(mine, n) for n in range(first_block, len(hashes))]
    request._block_hasher = name_new_blocks


def stop_naming(request: Any) -> None:
    """Take the names of a request's blocks away, and give its new blocks none.

    No prefix cache and no store then gets them.
    """
    request.block_hashes, request._block_hasher = [], None

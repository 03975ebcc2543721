"""Names of KV blocks that belong to one request.

A block whose KV is approximate must not be found by its tokens: neither in an engine's prefix cache
nor in the store. Such a block gets a random name in place of vLLM's hash. A request's private
blocks are its last ones: KV after an approximate block is approximate, too.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence

_MARK = b"private KV: "
"""Prefix of 12 bytes. A hash of 32 bytes begins so by chance with a probability of 2**-96."""


def private_name(request: bytes, number: int) -> bytes:
    """Return the name of one block of a request, 32 bytes.

    Args:
        request: random bytes, the same for all blocks of a request.
        number: of the block in the request.
    """
    about = number.to_bytes(8, "little")
    return _MARK + hashlib.blake2b(request + about, digest_size=32 - len(_MARK)).digest()


def is_private(name: bytes) -> bool:
    """Whether a block belongs to one request."""
    return name.startswith(_MARK)


def shared_blocks(names: Sequence[bytes]) -> int:
    """Return how many of a request's first blocks other requests may use.

    Args:
        names: of its blocks, in order.
    """
    if not names or not is_private(names[-1]):
        return len(names)
    return bisect.bisect_left(names, True, key=is_private)

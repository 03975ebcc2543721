"""The block checksum and raw memory, written for reading: the model that tests hold the kernels to.

Follows the formula in `headrace_kvstore.blocks.checksum` word by word in Python's own integers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDE = 1 << 64
G = 0x9E3779B97F4A7C15
LANES = 16


def mix(z: int) -> int:
    """splitmix64's finaliser."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WIDE
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WIDE
    return z ^ (z >> 31)


def model_sum(data: bytes, seed: int) -> int:
    """Sum of the bytes, slowly."""
    padded = data + bytes(-len(data) % 64)
    words = [int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)]
    folded = 0
    for lane in range(LANES):
        a = b = 0
        for word in words[lane::LANES]:
            a = (a + word) % WIDE
            b = (b + a) % WIDE
        folded += mix(mix((a + G * (lane + 1)) % WIDE) ^ b)
    return mix(mix(seed ^ mix((len(data) + G) % WIDE)) ^ folded % WIDE)


def forge(data: NDArray[np.uint8]) -> None:
    """Change bytes so that no sum of theirs tells: +1, -2, +1 in three words of one lane."""
    words = data[: 3 * 64].view("<u4").reshape(3, LANES)
    can = (words[0] < 2**32 - 1) & (words[1] > 1) & (words[2] < 2**32 - 1)
    lane = int(np.flatnonzero(can)[0])
    words[0, lane] += 1
    words[1, lane] -= 2
    words[2, lane] += 1


class Memory:
    """Zeroed bytes at an address aligned to 64, plus `shift`."""

    def __init__(self, size: int, shift: int = 0) -> None:
        owner = np.zeros(size + 64 + shift, np.uint8)
        start = -owner.ctypes.data % 64 + shift
        self.bytes: NDArray[np.uint8] = owner[start : start + size]
        self.address = int(owner.ctypes.data) + start

    def put(self, data: bytes, at: int = 0) -> None:
        """Write bytes."""
        self.bytes[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def get(self, at: int = 0, size: int | None = None) -> bytes:
        """Read bytes."""
        return self.bytes[at : None if size is None else at + size].tobytes()

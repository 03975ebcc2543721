"""The lanes of `checksum`'s sums, as torch operations on whatever device the bytes are on.

A lane's second sum adds up its first after every row, so word w of row r counts rows - r times:

    a[l] = sum of w[r, l];  b[l] = sum of (rows - r) w[r, l]        modulo 2^64

Integers of torch wrap like unsigned ones. So the sums equal the compiled kernels' to the bit,
whichever side made them.
"""

from __future__ import annotations

import torch

LANES = 16


def lane_sums(runs: torch.Tensor) -> torch.Tensor:
    """Sums of runs of bytes.

    Args:
        runs: [n, ...], each of the n contiguous, of any number type.

    Returns:
        int64 [n, 2, 16], a and b of each lane, the bits of u64; on the device of the runs.
    """
    data = runs.contiguous().view(len(runs), -1).view(torch.uint8)
    short = -data.shape[1] % (4 * LANES)
    if short:
        data = torch.nn.functional.pad(data, (0, short))
    words = data.view(torch.int32).view(len(runs), -1, LANES).to(torch.int64) & 0xFFFFFFFF
    rows = words.shape[1]
    weights = torch.arange(rows, 0, -1, dtype=torch.int64, device=data.device)
    a = words.sum(dim=1)
    b = words.mul_(weights[:, None]).sum(dim=1)
    return torch.stack((a, b), dim=1)

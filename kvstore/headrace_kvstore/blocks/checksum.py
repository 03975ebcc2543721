"""Checksum, one u64 per (block, layer), that tells whether KV bytes are the ones that were stored.

It is computed while copying, in the one pass over memory that the copy needs anyway. A run's bytes
are cut into rows of 64 bytes (the last one filled up with zeros), and each row into 16
little-endian 32-bit words w. Each lane l of the 16 keeps Fletcher's two sums in 64 bits:

    a[l] += w[l];  b[l] += a[l]                                for each row, all starting at 0
    sum = mix(mix(seed ^ mix(length + G)) ^ F)                 length in bytes
    F   = sum over l of mix(mix(a[l] + G (l + 1)) ^ b[l])      all modulo 2^64

with G = 0x9E3779B97F4A7C15 and mix splitmix64's finaliser (D. Lea, S. Vigna), a bijection.

**Detected damage.** 32-bit words in 64-bit sums leave no room for high bits to cancel, as they do
if sums are as wide as words. Up to 2^32 rows, the (a, b) differ for certain if in some lane one
or two words differ, whatever their values: any one or two flipped bits, two words swapped
anywhere, any damage within 32 words in a row. They also differ for certain if a range was zeroed
that was not zero, since a can then only fall. Other damage (shifted, truncated, foreign bytes)
leaves 32 sums equal only by coincidence. Different (a, b) give one u64 with probability 2^-64.
Different seeds, or different lengths under one seed, with the same (a, b) give different sums for
certain. So even the sum of a block of zeros shows which block it is.

**Undetected damage.** It is no cryptographic hash: an attacker who can write the bytes can make any
sum. Changes to three or more words of a lane may cancel in both sums, such as +1, -2, +1 at equal
distances. They go unseen if they cancel in every lane that they touch.

Addresses are of host memory, as integers. The caller keeps the memory alive, and source and
destination must not overlap. Calls release the GIL while they run. The first call on a machine
compiles for a second or more; the first call of each later process loads the compiled code in about
0.2 s. `prepare` does this beforehand.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace_kvstore.blocks import checksum_kernels as kernels
from headrace_kvstore.identity.namespace import block_key

STREAM_FROM_BYTES = 1 << 20
"""Size from which on batches are written past the caches: faster in all, though later reads of the
bytes go to memory. Smaller batches fit the second-level cache, and the next reader is faster
there."""
THREADS_FROM_BYTES = 4 << 20
"""Size below which a batch is not worth waking a thread."""
MAX_THREADS = 64
"""Maximum number of threads kept between batches; they are started as they are needed."""

_PERSON = b"headrace-kv-seed"
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = kernels.mix.py_func
"""`mix` on whole arrays."""


def block_seed(namespace_digest: bytes, block_hash: bytes) -> int:
    """Return the u64 that ties a block's sums to its key. Raises ValueError as `block_key`."""
    key = block_key(namespace_digest, block_hash)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=_PERSON).digest(), "little")


def layer_seeds(block_seeds: ArrayLike, layers: int) -> NDArray[np.uint64]:
    """Return mix(block seed + G (layer + 1)), shape [blocks, layers], or [layers] for one seed.

    All layers of a block have different seeds.
    """
    seeds = np.asarray(block_seeds, np.uint64)[..., None]
    return _MIX(seeds + _GAMMA * np.arange(1, layers + 1, dtype=np.uint64))


def copy_sum(
    dst: ArrayLike, src: ArrayLike, nbytes: ArrayLike, seeds: ArrayLike, *, threads: int = 1
) -> NDArray[np.uint64]:
    """Copy runs of bytes and return the sums of the bytes read, in one pass.

    A run may consist of pieces that lie apart in memory; its sum is that of their concatenation.

    Args:
        dst, src: addresses, shape [..., pieces] where seeds have shape [...], or the seeds' own
            shape if each run is one piece. Destinations are fast only if aligned to 64 bytes.
        nbytes: sizes of the pieces, of any shape that broadcasts to that of the addresses.
        seeds: u64 per run.
        threads: number of threads that share a large batch, the caller's included.

    Returns:
        u64 sums, in the shape of the seeds.

    Raises:
        ValueError: shapes do not fit.
    """
    return _run(kernels.COPY_SUM, dst, src, nbytes, seeds, threads)


def copy(dst: ArrayLike, src: ArrayLike, nbytes: ArrayLike, *, threads: int = 1) -> None:
    """Copy pieces without sums. Arguments and errors as `copy_sum`."""
    runs = np.zeros(np.shape(src), np.uint64)
    _run(kernels.COPY, dst, src, nbytes, runs, threads)


def checksum(
    src: ArrayLike, nbytes: ArrayLike, seeds: ArrayLike, *, threads: int = 1
) -> NDArray[np.uint64]:
    """Return the sums of runs without copying. Arguments, result and errors as `copy_sum`."""
    return _run(kernels.SUM, src, src, nbytes, seeds, threads)


def length_mix(nbytes: int) -> np.uint64:
    """Return mix(length + G), the contribution of a run's length to its sum."""
    return np.uint64(_MIX(np.full(1, nbytes, np.uint64) + _GAMMA)[0])


def checksum_of(data: bytes | bytearray | memoryview | NDArray[np.uint8], seed: int) -> int:
    """Return the sum of one buffer's bytes."""
    view = np.frombuffer(data, np.uint8)
    return int(checksum([view.ctypes.data], [view.size], [seed])[0])


def prepare() -> None:
    """Compile the code, or load it from disk, so that the first call need not wait for it."""
    checksum_of(b"", 0)


def _run(
    mode: int, dst: ArrayLike, src: ArrayLike, nbytes: ArrayLike, seeds: ArrayLike, threads: int
) -> NDArray[np.uint64]:
    seeds = np.asarray(seeds, np.uint64)
    src = np.asarray(src, np.uint64)
    dst = np.asarray(dst, np.uint64)
    if dst.shape != src.shape:
        raise ValueError(f"destinations {dst.shape}, sources {src.shape}")
    if src.shape != seeds.shape and src.shape[:-1] != seeds.shape:
        raise ValueError(f"addresses of shape {src.shape} for seeds of shape {seeds.shape}")
    # Fresh contiguous arrays: the kernel is compiled for exactly one kind of array.
    sizes = np.array(np.broadcast_to(np.asarray(nbytes, np.uint64), src.shape)).ravel()
    work = [np.array(part).ravel() for part in (dst, src)] + [sizes, np.array(seeds).ravel()]
    sums = np.zeros(seeds.size, np.uint64)
    total = int(sizes.sum())
    stream = total >= STREAM_FROM_BYTES
    if threads <= 1 or total < THREADS_FROM_BYTES:
        kernels.run_batch(mode, stream, *work, sums)
    else:
        _share(threads, mode, stream, work, sums)
    return sums.reshape(seeds.shape)


def _share(
    threads: int, mode: int, stream: bool, work: list[NDArray[np.uint64]], sums: NDArray[np.uint64]
) -> None:
    """Give each thread runs of about equally many bytes; the caller's thread takes the first."""
    pieces = work[0].size // sums.size
    run_bytes = work[2].reshape(sums.size, pieces).sum(axis=1)
    reached = np.cumsum(run_bytes) / max(int(run_bytes.sum()), 1)
    cuts = np.searchsorted(reached, np.arange(1, threads) / threads, side="right")
    bounds = [0, *(int(cut) for cut in cuts), sums.size]

    def part(first: int, last: int) -> None:
        addresses = [each[first * pieces : last * pieces] for each in work[:3]]
        kernels.run_batch(mode, stream, *addresses, work[3][first:last], sums[first:last])

    parts = list(pairwise(bounds))
    others = [_team().submit(part, *bound) for bound in parts[1:]]
    part(*parts[0])
    for other in others:
        other.result()


@cache
def _team() -> ThreadPoolExecutor:
    """Return this process's threads that share batches. A layer's copy is too short to start
    threads for each. A forked child makes its own."""
    return ThreadPoolExecutor(MAX_THREADS, "kv-copy")


os.register_at_fork(after_in_child=_team.cache_clear)


def payload_sums(
    digest: bytes, block_hash: bytes, first_layer: int, addresses: np.ndarray, layer_bytes: int
) -> np.ndarray:
    """Return the checksums of layers in memory, u64 (n,): a `segment.Verify`."""
    seeds = layer_seeds(block_seed(digest, block_hash), first_layer + len(addresses))
    return checksum(addresses, layer_bytes, seeds[first_layer:])

"""Compiled loops that copy and sum KV bytes at memory speed, on raw addresses, without the GIL.

Everything here is one batched kernel, `run_batch`. `checksum` defines the sums, and the rest of the
store calls that module. Three decisions follow, with GB/s of one thread copying 270 MB in pieces of
192 KiB on a Xeon (Emerald Rapids) core, where one large memcpy of the same bytes does 10.6:

- The inner loop is written as LLVM vectors of 8 u64, since a row of 64 bytes is one cache line:
  LLVM lowers them to AVX-512, AVX2, SSE2 or NEON as the machine has it.
- Copies write with non-temporal stores (8.4 instead of 6.8): an ordinary store first reads the line
  that it will overwrite. It pays even when the bytes are read next, except for batches that stay in
  the second-level cache (`checksum.STREAM_FROM_BYTES`).
- Reading runs ahead of the loop by a prefetch of 4 KiB into the second-level cache (10.2 instead
  of 8.4): hardware prefetchers stop at page ends.

A library's checksum is no match: copying with `memmove` and taking XXH3 of each piece while it lies
in the second-level cache gives 0.59 to 0.69 of these kernels' speed (docs/kvstore-measurements.md).

Addresses are of host memory and trusted; nothing checks them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types  # type: ignore[import-untyped]
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

from headrace_kvstore.numba_jit import jit

SUM, COPY, COPY_SUM = 0, 1, 2
"""Modes of `run_batch`."""

ROW_BYTES = 64
PREFETCH_BYTES = 4096

_WORDS = 8
_U64 = ir.IntType(64)
_ROW = ir.VectorType(_U64, _WORDS)
_SUMS = 4 * _WORDS
"""A run's state in u64: sums of low words, of high words, and the sums of those sums."""


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_U64, value)


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for one line, for reading (0), into the second-level cache (2), as data (1)."""
    bytes_ptr, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [bytes_ptr, i32, i32, i32])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    hints = [ir.Constant(i32, hint) for hint in (0, 2, 1)]
    builder.call(prefetch, [builder.inttoptr(address, bytes_ptr), *hints])


def _row_loop(*, store: bool, stream: bool, add: bool) -> Any:
    """Make an intrinsic (dst, src, rows, state) that runs over rows of 64 bytes.

    Args:
        store: write each row to dst.
        stream: write past the caches; dst must then be aligned to 64 bytes.
        add: for each row of 16 little-endian u32 words w, a += w, then b += a, lane by lane, in
            u64. `state` is the address of four vectors of 8 u64: a of the even words, a of the
            odd words, b of the even words, b of the odd words.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        dst, src, rows, state = args
        row_ptr = _ROW.as_pointer()
        places = [
            builder.inttoptr(builder.add(state, _constant(ROW_BYTES * k)), row_ptr)
            for k in range(4 if add else 0)
        ]
        before = [builder.load(place, align=8) for place in places]
        entry = builder.block
        loop, done = builder.append_basic_block("rows"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_unsigned("==", rows, _constant(0)), done, loop)

        builder.position_at_end(loop)
        index = builder.phi(_U64)
        index.add_incoming(_constant(0), entry)
        sums = [builder.phi(_ROW) for _ in places]
        for total, value in zip(sums, before, strict=True):
            total.add_incoming(value, entry)
        offset = builder.mul(index, _constant(ROW_BYTES))
        ahead = builder.add(offset, _constant(PREFETCH_BYTES))
        inside = builder.icmp_unsigned("<", ahead, builder.mul(rows, _constant(ROW_BYTES)))
        _prefetch(builder, builder.add(src, builder.select(inside, ahead, offset)))
        row = builder.load(builder.inttoptr(builder.add(src, offset), row_ptr), align=1)
        if store:
            place = builder.inttoptr(builder.add(dst, offset), row_ptr)
            written = builder.store(row, place, align=ROW_BYTES if stream else 1)
            if stream:
                one = [ir.Constant(ir.IntType(32), 1)]
                written.set_metadata("nontemporal", builder.module.add_metadata(one))
        after = []
        if add:
            low = builder.and_(row, ir.Constant(_ROW, [0xFFFFFFFF] * _WORDS))
            high = builder.lshr(row, ir.Constant(_ROW, [32] * _WORDS))
            a = [builder.add(sums[0], low), builder.add(sums[1], high)]
            after = [*a, builder.add(sums[2], a[0]), builder.add(sums[3], a[1])]
        following = builder.add(index, _constant(1))
        index.add_incoming(following, loop)
        for total, value in zip(sums, after, strict=True):
            total.add_incoming(value, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, rows), loop, done)

        builder.position_at_end(done)
        results = [builder.phi(_ROW) for _ in places]
        for result, value, end in zip(results, before, after, strict=True):
            result.add_incoming(value, entry)
            result.add_incoming(end, loop)
        for place, result in zip(places, results, strict=True):
            builder.store(result, place, align=8)
        return context.get_dummy_value()

    @intrinsic
    def rows_of(typing_context: Any, dst: Any, src: Any, rows: Any, state: Any) -> Any:
        u64 = types.uint64
        return types.void(u64, u64, u64, u64), generate

    return rows_of


_sum_rows = _row_loop(store=False, stream=False, add=True)
_copy_sum_rows = _row_loop(store=True, stream=False, add=True)
_stream_sum_rows = _row_loop(store=True, stream=True, add=True)
_stream_rows = _row_loop(store=True, stream=True, add=False)


@intrinsic
def _memcpy(typing_context: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """Call the C library's memcpy (dst, src, nbytes)."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        bytes_ptr = ir.IntType(8).as_pointer()
        pointers = [builder.inttoptr(address, bytes_ptr) for address in args[:2]]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), generate


@intrinsic
def _fence(typing_context: Any) -> Any:
    """Make earlier non-temporal stores visible to all threads before any later store."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit
def mix(z: np.uint64) -> np.uint64:
    """splitmix64's finaliser: a bijection in which every input bit reaches every output bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit
def _finish(state: Any, nbytes: np.uint64, seed: np.uint64) -> np.uint64:
    """Fold 16 lanes' sums, the length and the seed into one u64 (formula in `checksum`)."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    folded = np.uint64(0)
    for lane in range(2 * _WORDS):
        place = (lane & 1) * _WORDS + (lane >> 1)
        a, b = state[place], state[place + 2 * _WORDS]
        folded += mix(mix(a + gamma * np.uint64(lane + 1)) ^ b)
    return mix(mix(seed ^ mix(nbytes + gamma)) ^ folded)


@jit(nogil=True)
def run_batch(
    mode: int, stream: bool, dst: Any, src: Any, nbytes: Any, seeds: Any, sums: Any
) -> None:
    """Copy and/or sum many runs, each the concatenation of equally many pieces.

    Args:
        mode: SUM (dst is not used), COPY (seeds give only the number of runs) or COPY_SUM.
        stream: use non-temporal stores for destinations aligned to 64 bytes.
        dst, src, nbytes: u64 [runs * pieces]: addresses and sizes, run after run.
        seeds: u64 [runs].
        sums: u64 [runs], written unless mode is COPY.
    """
    row = np.uint64(ROW_BYTES)
    pieces = len(src) // max(len(seeds), 1)
    # A row that is not full yet (a piece's size need not be a multiple of 64) is gathered in
    # `state` after the sums. It is stored from there, so that the bytes summed are the bytes
    # stored.
    state = np.zeros(_SUMS + _WORDS, np.uint64)
    state_at = np.uint64(state.ctypes.data)
    open_row = state_at + np.uint64(8 * _SUMS)
    for run in range(len(seeds)):
        state[:] = 0
        total = filled = np.uint64(0)
        for piece in range(run * pieces, (run + 1) * pieces):
            to, at, left = dst[piece], src[piece], nbytes[piece]
            total += left
            if mode == COPY:
                whole = left // row if stream and to % row == 0 else np.uint64(0)
                _stream_rows(to, at, whole, state_at)
                done = whole * row
                _memcpy(to + done, at + done, left - done)
                continue
            if filled:
                take = min(row - filled, left)
                _memcpy(open_row + filled, at, take)
                if mode == COPY_SUM:
                    _memcpy(to, open_row + filled, take)
                filled, to, at, left = filled + take, to + take, at + take, left - take
                if filled < row:
                    continue
                _sum_rows(open_row, open_row, np.uint64(1), state_at)
                filled = np.uint64(0)
            whole = left // row
            if mode == SUM:
                _sum_rows(to, at, whole, state_at)
            elif stream and to % row == 0:
                _stream_sum_rows(to, at, whole, state_at)
            else:
                _copy_sum_rows(to, at, whole, state_at)
            done = whole * row
            filled = left - done
            if filled:
                state[_SUMS:] = 0
                _memcpy(open_row, at + done, filled)
                if mode == COPY_SUM:
                    _memcpy(to + done, open_row, filled)
        if mode == COPY:
            continue
        if filled:
            _sum_rows(open_row, open_row, np.uint64(1), state_at)
        sums[run] = _finish(state, total, seeds[run])
    if stream:
        _fence()

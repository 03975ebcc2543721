"""The mixture of two layers' KV blocks on a GPU: one Triton kernel, one pass, one rounding.

    output[i] = first[blocks[i]] * first_weight + last[blocks[i]] * last_weight

`blocks.Mixer` does the same on the CPU. Sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Number of elements that one Triton program mixes."""


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    first,
    last,
    blocks,
    first_weight,
    last_weight,
    output,
    first_stride,
    last_stride,
    size,
    period,
    TILE: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + number).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = at < size
    channel = at % period
    low = tl.load(first + block * first_stride + at, mask=there, other=0).to(tl.float32)
    high = tl.load(last + block * last_stride + at, mask=there, other=0).to(tl.float32)
    a = tl.load(first_weight + channel, mask=there, other=0).to(tl.float32)
    b = tl.load(last_weight + channel, mask=there, other=0).to(tl.float32)
    mixed = (low * a + high * b).to(output.dtype.element_ty)
    tl.store(output + number * size + at, mixed, mask=there)


def mix_blocks(
    first: Tensor,
    last: Tensor,
    blocks: Tensor,
    first_weight: Tensor,
    last_weight: Tensor,
    memory: Tensor | None = None,
) -> Tensor:
    """Return mixed blocks of two layers' K, of their V, or of both.

    Args:
        first, last: caches [blocks, ...], each block contiguous, such as vLLM's on a GPU:
            [blocks, tokens, kv_heads, D].
        blocks: numbers of the blocks, int [n].
        first_weight, last_weight: of the shape of a block's last axes, [kv_heads, D] for the layout
            above.
        memory: tensor to mix into, with at least as many elements as the blocks; None for a new
            one.

    Returns:
        [n, ...], in the dtype of `first`.
    """
    block = first.shape[1:]
    size, period = block.numel(), first_weight.numel()
    for cache in (first, last):
        if cache.shape[1:] != block or not cache[0].is_contiguous():
            raise ValueError("blocks must be contiguous, and of one shape in both layers")
    if first_weight.shape != last_weight.shape or first_weight.shape != block[-first_weight.ndim :]:
        raise ValueError("weights must have the shape of the last axes of a block")
    if memory is None:
        memory = torch.empty(len(blocks) * size, dtype=first.dtype, device=first.device)
    output = memory[: len(blocks) * size].view(len(blocks), *block)
    if len(blocks):
        _mix[(len(blocks), triton.cdiv(size, TILE))](
            *(first, last, blocks, first_weight.contiguous(), last_weight.contiguous(), output),
            *(first.stride(0), last.stride(0), size, period),
            TILE=TILE,
        )
    return output

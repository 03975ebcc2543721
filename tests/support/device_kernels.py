"""What must hold of the store's kernels on any device; the CPU's code is the reference.

Triton is imported in Triton's interpreter or where there is a GPU, so tests import this file late.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from headrace_kvstore.blocks import checksum
from headrace_kvstore.codec import CODECS, LayerShape, Order, QuantizationRangeError
from headrace_kvstore.device.checksum_kernels import copy_sum
from headrace_kvstore.device.codec_kernels import DeviceCoder, LayerStrides
from headrace_kvstore.device.number_formats import EXACT, float_of, narrow

GAP_BYTES = 64
"""Between pieces of memory that must stay as they are."""


def check_copy_sum(device: str, runs: int, pieces: int, piece_bytes: int, seed: int) -> None:
    """Copies and sums runs whose pieces lie in no order."""
    draw = np.random.default_rng(seed)
    size, count = piece_bytes + GAP_BYTES, runs * pieces
    memory = draw.integers(0, 256, count * size, dtype=np.uint8)
    if seed % 2:
        memory[:] = 255  # the largest words
    starts = draw.permutation(count).astype(np.uint64).reshape(runs, pieces) * np.uint64(size)
    seeds = draw.integers(0, 2**64, runs, dtype=np.uint64)
    wanted = checksum.checksum(np.uint64(memory.ctypes.data) + starts, piece_bytes, seeds)

    source = torch.from_numpy(memory).to(device)
    target = torch.zeros_like(source)
    src, dst = (_at(tensor, starts, device) for tensor in (source, target))
    asked = torch.from_numpy(seeds.view(np.int64)).to(device)
    for into in (None, dst):
        found = copy_sum(into, src, piece_bytes, asked).cpu().numpy().view(np.uint64)
        assert (found == wanted).all()
    copied = np.zeros_like(memory)
    for start in starts.ravel().astype(int):
        copied[start : start + piece_bytes] = memory[start : start + piece_bytes]
    assert (target.cpu().numpy() == copied).all(), "pieces are copied and nothing else is"


def layers(shape: LayerShape, blocks: int, seed: int) -> torch.Tensor:
    """Blocks of one layer [blocks, bytes]: numbers of all magnitudes, groups that are constant,
    zero or tiny."""
    draw = torch.Generator().manual_seed(seed)
    count = 2 * shape.plane_elements
    numbers = torch.randn((blocks, count), generator=draw)
    numbers *= torch.exp(4 * torch.randn((blocks, count), generator=draw))
    numbers[:, : count // 4] *= 1e-30
    numbers[0, count // 2 :] = numbers[0, 0]
    numbers[-1, : count // 8] = 0.0
    bounded = numbers.clamp(-3e4, 3e4).to(getattr(torch, shape.dtype))
    return bounded.view(torch.uint8).view(blocks, -1)


def strides(shape: LayerShape) -> LayerStrides:
    """Of one layer of one block in HND or NHD order."""
    row = 2 * shape.head_dim
    if shape.order is Order.NHD:
        return LayerStrides(row, shape.kv_heads * row, shape.head_dim)
    return LayerStrides(shape.block_tokens * row, row, shape.head_dim)


def check_codec(device: str, name: str, shape: LayerShape, seed: int, blocks: int = 2) -> None:
    """Stored bytes and decoded bytes are the CPU's."""
    codec = CODECS[name]()
    coder = codec.bind(shape)
    given = layers(shape, blocks, seed)
    wanted = np.empty((blocks, coder.stored_bytes), np.uint8)
    back = np.empty((blocks, shape.layer_bytes), np.uint8)
    for layer, stored, decoded in zip(given.numpy(), wanted, back, strict=True):
        coder.encode(layer, stored)
        coder.decode(stored, decoded)

    kernels = DeviceCoder(codec, shape, strides(shape))
    there = given.to(device)
    starts = np.arange(blocks, dtype=np.uint64) * np.uint64(shape.layer_bytes)
    made = torch.full((blocks, coder.stored_bytes + 64), 7, dtype=torch.uint8, device=device)
    unfit = torch.zeros(blocks, dtype=torch.int32, device=device)
    kernels.encode(_at(there, starts, device), made, unfit)
    assert not unfit.any()
    assert (made.cpu().numpy()[:, : coder.stored_bytes] == wanted).all()
    into = torch.zeros_like(there)
    kernels.decode(made, _at(into, starts, device))
    assert (into.cpu().numpy() == back).all()


def check_any_bytes_decode(device: str, name: str, shape: LayerShape, seed: int) -> None:
    """Bytes that no encoder made mean the same numbers on both sides. NaNs of any bits are one."""
    codec = CODECS[name]()
    coder = codec.bind(shape)
    stored = np.random.default_rng(seed).integers(0, 256, coder.stored_bytes, dtype=np.uint8)
    wanted = np.zeros(shape.layer_bytes, np.uint8)
    coder.decode(stored, wanted)
    into = torch.zeros((1, shape.layer_bytes), dtype=torch.uint8, device=device)
    kernels = DeviceCoder(codec, shape, strides(shape))
    row = torch.from_numpy(stored)[None].to(device)
    kernels.decode(row, _at(into, np.zeros(1, np.uint64), device))
    numbers = [
        torch.from_numpy(each).view(getattr(torch, shape.dtype)).float().nan_to_num(nan=1.5)
        for each in (wanted, into.cpu().numpy()[0])
    ]
    assert torch.equal(*numbers)


def check_nans_stay(device: str) -> None:
    """NaNs are rounded to NaNs, a GPU's own (the first) too; the largest number to infinity."""
    given = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F7FFFFF], np.uint32)
    bits = torch.from_numpy(given.view(np.int32)).to(device)
    into = torch.zeros(len(given), dtype=torch.int16, device=device)
    _narrowed[(1,)](bits, into, len(given), "bfloat16", **EXACT)
    found = into.cpu().view(torch.bfloat16)
    assert found.isnan().tolist() == [True, True, True, False]
    assert found[-1] == float("inf")


@triton.jit
def _narrowed(bits, into, COUNT: tl.constexpr, FORMAT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(into + at, narrow(float_of(tl.load(bits + at)), FORMAT).to(tl.int16))


def check_unfit(device: str, name: str, shape: LayerShape, value: float) -> None:
    """A layer with such a value is refused, the others are not."""
    codec = CODECS[name]()
    given = layers(shape, 3, seed=1)
    given[1].view(getattr(torch, shape.dtype))[-1] = value
    coder = codec.bind(shape)
    stored = np.empty(coder.stored_bytes, np.uint8)
    refused = []
    for layer in given.numpy():
        try:
            coder.encode(layer, stored)
            refused.append(0)
        except QuantizationRangeError:
            refused.append(1)
    there = given.to(device)
    starts = np.arange(3, dtype=np.uint64) * np.uint64(shape.layer_bytes)
    made = torch.empty((3, coder.stored_bytes), dtype=torch.uint8, device=device)
    unfit = torch.zeros(3, dtype=torch.int32, device=device)
    DeviceCoder(codec, shape, strides(shape)).encode(_at(there, starts, device), made, unfit)
    assert unfit.tolist() == refused == [0, 1, 0]


def _at(tensor: torch.Tensor, starts: Any, device: str) -> torch.Tensor:
    """Addresses in a tensor's memory, as kernels take them."""
    return torch.from_numpy((np.uint64(tensor.data_ptr()) + starts).astype(np.int64)).to(device)

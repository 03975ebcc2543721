"""Copies blocks from memory into the bytes of an object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace_kvstore.checksum import block_seed, copy_sum, layer_seeds
from headrace_kvstore.nvme.record import Block, Save, Shape, padded
from headrace_kvstore.objects.object_format import ObjectName, pack_headers


@dataclass(frozen=True)
class Packed:
    """An object to be made."""

    name: ObjectName
    blocks: list[Block]
    data: memoryview


def pack_blocks(shape: Shape, writer: str, saves: Sequence[Save]) -> Packed:
    """Copy blocks; those whose bytes do not match their sums are left out.

    So their memory may be given to other blocks meanwhile, without a lease.

    Raises ValueError or struct.error for a block that no header can describe.
    """
    data = np.empty(len(saves) * (shape.payload_bytes + shape.header_bytes), np.uint8)
    layers = np.arange(shape.layers, dtype=np.uint64) * np.uint64(shape.layer_bytes)
    blocks: list[Block] = []
    for save in saves:
        target = np.uint64(data.ctypes.data + len(blocks) * shape.payload_bytes) + layers
        seeds = layer_seeds(block_seed(shape.digest, save.hash), shape.layers)
        source = np.uint64(save.address) + layers
        sums = copy_sum(target, source, shape.layer_bytes, seeds)
        if np.array_equal(sums, save.sums):
            blocks.append(_block(save))
    name = ObjectName.new(shape, writer, len(blocks))
    headers = pack_headers(shape, blocks)
    data[name.headers_offset : name.size_bytes] = np.frombuffer(headers, np.uint8)
    return Packed(name, blocks, data.data[: name.size_bytes])


def _block(save: Save) -> Block:
    return Block(
        *(padded(save.hash), padded(save.parent), save.depth, save.tenant, save.compute_s),
        *(save.priority, time.time(), 0, save.sums),
    )

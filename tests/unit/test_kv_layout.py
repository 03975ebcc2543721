"""A block's bytes are found in caches of every shape and stride order that engines use.

Random bytes are written through torch's views and read back through the layout's addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from headrace_kvstore.blocks import checksum
from headrace_kvstore.blocks.block_layout import (
    BlockLayout,
    LayoutError,
    natural_order,
)

NB, H, BS, D = 5, 3, 32, 8

# name: shape, memory order of the axes (outermost first), block axis, pieces, bytes of a piece
SHAPES = {
    "CPU [NB, H, BS, 2 D]": ((NB, H, BS, 2 * D), (0, 1, 2, 3), 0, 1, H * BS * 2 * D * 2),
    "CUDA NHD, K and V apart": ((2, NB, BS, H, D), (0, 1, 2, 3, 4), 1, 2, BS * H * D * 2),
    "CUDA NHD, K and V in the block": (
        (NB, 2, BS, H, D),
        (0, 1, 2, 3, 4),
        0,
        1,
        2 * BS * H * D * 2,
    ),
    "HND behind an NHD shape": ((2, NB, BS, H, D), (0, 1, 3, 2, 4), 1, 2, BS * H * D * 2),
    "FlashInfer HND": ((NB, 2, BS, H, D), (0, 1, 3, 2, 4), 0, 1, 2 * BS * H * D * 2),
    "MLA [NB, BS, D]": ((NB, BS, D), (0, 1, 2), 0, 1, BS * D * 2),
    "0.29 LBNHC": ((NB, H, BS, 2 * D), (0, 2, 1, 3), 0, 1, H * BS * 2 * D * 2),
    "0.29 LHBNC": ((NB, H, BS, 2 * D), (1, 0, 2, 3), 0, H, BS * 2 * D * 2),
}


def cache_of(shape: Sequence[int], order: Sequence[int], seed: int = 0) -> torch.Tensor:
    """A bf16 cache of random bits with this memory order."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, [shape[axis] for axis in order], generator=generator)
    memory = bits.to(torch.int16).view(torch.bfloat16)
    return memory.permute([list(order).index(axis) for axis in range(len(order))])


def of_caches(caches: dict[str, torch.Tensor], blocks: int, axis: int) -> BlockLayout:
    """Of the same memory, viewed with the axis of the blocks first, as vLLM does."""
    return BlockLayout.of_tensors({n: c.movedim(axis, 0) for n, c in caches.items()}, blocks)


def read(addresses: np.ndarray, sizes: int) -> bytes:
    """The bytes of pieces, one after the other."""
    return b"".join(ctypes.string_at(int(address), sizes) for address in addresses.ravel())


def block_bytes(cache: torch.Tensor, block: int, axis: int, order: Sequence[int]) -> bytes:
    """A block's bytes in memory order of the axes, through torch."""
    inner = [axis_of for axis_of in order if axis_of != axis]
    squeezed = [axis_of - (axis_of > axis) for axis_of in inner]
    return (
        cache.select(axis, block).permute(squeezed).contiguous().view(torch.int16).numpy().tobytes()
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_blocks_bytes_are_where_torch_put_them(name: str) -> None:
    shape, order, axis, pieces, size = SHAPES[name]
    caches = {f"layers.{n}": cache_of(shape, order, n) for n in range(2)}
    layout = of_caches(caches, NB, axis)
    assert layout.piece_bytes == size and len(layout.layers[0].offsets) == pieces
    assert layout.block_bytes == 2 * layout.layer_bytes == 2 * pieces * size
    addresses = layout.engine_addresses([4, 0])
    assert addresses.shape == (2, 2, pieces)
    for row, block in enumerate((4, 0)):
        for n, cache in enumerate(caches.values()):
            found = read(addresses[row, n], layout.piece_bytes)
            assert found == block_bytes(cache, block, axis, order)


@pytest.mark.parametrize("name", SHAPES)
def test_a_block_saved_from_one_cache_and_loaded_into_another_is_the_same_to_torch(
    name: str,
) -> None:
    """Into another place of a cache of another size, through a payload, with one call each way."""
    shape, order, axis, _, _ = SHAPES[name]
    larger = tuple(2 * extent if at == axis else extent for at, extent in enumerate(shape))
    source = {f"layers.{n}": cache_of(shape, order, n) for n in range(2)}
    target = {f"layers.{n}": cache_of(larger, order, 10 + n) for n in range(2)}
    untouched = {layer: cache.clone() for layer, cache in target.items()}
    saving = of_caches(source, NB, axis)
    loading = of_caches(target, 2 * NB, axis)
    assert saving.layers[0].axes == loading.layers[0].axes
    payloads = np.zeros(2 * saving.block_bytes, np.uint8)
    starts = payloads.ctypes.data + np.arange(2) * saving.block_bytes
    seeds = checksum.layer_seeds([1, 2], 2)

    saved = checksum.copy_sum(
        saving.payload_addresses(starts), saving.engine_addresses([1, 3]), saving.piece_bytes, seeds
    )
    loaded = checksum.copy_sum(
        loading.engine_addresses([7, 2]),
        loading.payload_addresses(starts),
        loading.piece_bytes,
        seeds,
    )
    assert (saved == loaded).all()
    for layer, cache in target.items():
        for mine, theirs in ((7, 1), (2, 3)):
            wanted = source[layer].select(axis, theirs)
            assert torch.equal(cache.select(axis, mine).view(torch.int16), wanted.view(torch.int16))
        for other in set(range(2 * NB)) - {7, 2}:
            before = untouched[layer].select(axis, other).view(torch.int16)
            assert torch.equal(cache.select(axis, other).view(torch.int16), before)


def test_kernel_blocks_next_to_each_other_form_one_block() -> None:
    cache = cache_of((4 * NB, H, BS, D), (0, 1, 2, 3))
    layout = BlockLayout.of_tensors({"layer": cache}, NB)
    assert layout.blocks == NB
    assert layout.piece_bytes == 4 * H * BS * D * 2
    found = read(layout.engine_addresses([2]), layout.piece_bytes)
    assert found == cache[8:12].view(torch.int16).numpy().tobytes()
    whole = BlockLayout.of_tensors({"layer": cache_of((NB, H, 4 * BS, D), (0, 1, 2, 3))}, NB)
    assert whole.layer_bytes == layout.layer_bytes
    assert whole.layers[0].axes != layout.layers[0].axes, "the bytes mean other tokens"


def test_padding_behind_a_block_is_left_out() -> None:
    padded = torch.zeros(NB, 100, dtype=torch.uint8)
    layout = BlockLayout.of_tensors({"layer": padded[:, :96]}, NB)
    assert layout.layer_bytes == 96
    assert (
        np.diff(layout.engine_addresses(range(NB)).ravel().astype(np.int64)).tolist() == [100] * 4
    )


def test_layers_inside_blocks_are_told_apart() -> None:
    """BLHNC: `[block][layer]...`; and BHLNC, where the heads of a layer lie apart."""
    memory = torch.zeros(NB, 4, H, BS, D)
    inside = BlockLayout.of_tensors({f"l{n}": memory[:, n] for n in range(4)}, NB)
    assert inside.piece_bytes == H * BS * D * 4
    memory = torch.zeros(NB, H, 4, BS, D)
    between = BlockLayout.of_tensors({f"l{n}": memory[:, :, n] for n in range(4)}, NB)
    assert between.piece_bytes == BS * D * 4 and len(between.layers[0].offsets) == H
    for layout in (inside, between):
        every = layout.engine_addresses(range(NB)).ravel()
        assert len(set(every.tolist())) == every.size


def test_layers_go_by_the_numbers_in_their_names() -> None:
    names = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.0.attn"]
    layout = BlockLayout.of_tensors({name: torch.zeros(NB, 16) for name in names}, NB)
    assert layout.names == tuple(reversed(names))
    assert sorted(["b1", "1", "b", "a2"], key=natural_order) == ["1", "a2", "b", "b1"]


def test_layers_of_other_groups_have_other_blocks_and_may_lie_in_the_same_memory() -> None:
    memory = torch.zeros(2, NB, 16)
    caches = {"l0": memory[0], "l1": memory[0], "l2": memory[1], "l3": memory[1]}
    groups = {"l0": 0, "l1": 1, "l2": 0, "l3": 1}
    with pytest.raises(LayoutError, match="l0 and l1 share bytes"):
        BlockLayout.of_tensors(caches, NB)
    layout = BlockLayout.of_tensors(caches, NB, groups=groups)
    found = layout.engine_addresses([[1, 2], [3, 0]])
    for layer, columns in enumerate((0, 1, 0, 1)):
        ids = np.array([[1, 2], [3, 0]])[:, columns]
        assert (found[:, layer] == layout.engine_addresses(ids)[:, layer]).all()
    with pytest.raises(LayoutError, match="l0 and l2 share bytes"):
        BlockLayout.of_tensors(caches | {"l2": memory[0]}, NB, groups=groups)


@pytest.mark.parametrize("ids", [[-1], [0, NB]])
def test_ids_outside_the_cache_are_refused(ids: list[int]) -> None:
    layout = BlockLayout.of_tensors({"layer": torch.zeros(NB, 16)}, NB)
    with pytest.raises(IndexError, match="block ids"):
        layout.engine_addresses(ids)
    assert layout.engine_addresses([]).shape == (0, 1, 1)


class TestRefused:
    """What cannot be one payload, with the layer's name in the message."""

    def refuse(self, match: str, caches: dict[str, torch.Tensor], blocks: int = NB) -> None:
        with pytest.raises(LayoutError, match=match):
            BlockLayout.of_tensors(caches, blocks)

    def test_no_layers(self) -> None:
        self.refuse("0 layers", {})

    def test_a_cache_without_memory(self) -> None:
        self.refuse("empty: no cache", {"empty": torch.zeros(0, 4)})
        self.refuse("meta", {"meta": torch.zeros(NB, 4, device="meta")})

    def test_a_block_count_that_does_not_fit(self) -> None:
        self.refuse("a: axis 0 .* no multiple of 4 blocks", {"a": torch.zeros(NB, 4)}, 4)
        self.refuse("no multiple of 0 blocks", {"a": torch.zeros(NB, 4)}, 0)

    def test_layers_of_other_sizes_or_orders(self) -> None:
        """Hybrid models need a layout for each group of layers."""
        flat = torch.zeros(NB, 4, 8)
        self.refuse("b has 64 bytes a block, a has 128", {"a": flat, "b": torch.zeros(NB, 2, 8)})
        turned = torch.zeros(NB, 8, 4).transpose(1, 2)
        self.refuse("b has 2:8,1:4x4 as order of axes", {"a": flat, "b": turned})

    def test_a_cache_under_two_names(self) -> None:
        cache = torch.zeros(NB, 16)
        self.refuse("a and b share bytes", {"a": cache, "b": cache})

    def test_caches_that_overlap_in_part(self) -> None:
        memory = torch.zeros(NB * 32)
        caches = {"a": memory[: NB * 16], "b": memory[8 : 8 + NB * 16]}
        self.refuse("a and b share bytes", {k: v.view(NB, 16) for k, v in caches.items()})

    def test_interleaved_layers_that_touch_the_next_block(self) -> None:
        memory = torch.zeros((NB + 1) * 32)
        one = memory.as_strided((NB, 16), (32, 1), 0)
        fits = memory.as_strided((NB, 16), (32, 1), 16)
        beyond = memory.as_strided((NB, 16), (32, 1), 17)
        assert BlockLayout.of_tensors({"a": one, "b": fits}, NB).layer_bytes == 64
        self.refuse("a and b share bytes", {"a": one, "b": beyond})

    def test_elements_that_overlap(self) -> None:
        self.refuse("overlap", {"a": torch.zeros(1, 16).expand(NB, 16)})
        self.refuse("overlap", {"a": torch.zeros(100).as_strided((NB, 16), (15, 1))})

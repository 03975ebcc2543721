"""Checksums and layouts against naive models, over shapes, sizes, cuts and damage of any kind."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_kvstore.blocks import checksum as sums
from headrace_kvstore.blocks.block_layout import LayoutError, layer_layout
from tests.support.kvsums import Memory, model_sum

SEEDS = st.integers(0, 2**64 - 1)


@given(st.binary(max_size=400), SEEDS, st.lists(st.integers(0, 400), max_size=4), st.data())
def test_sums_do_not_depend_on_how_a_run_is_cut_or_placed(
    data: bytes, seed: int, cuts: list[int], draw: st.DataObject
) -> None:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    shifts = st.integers(0, 64)
    sources = [Memory(len(piece), draw.draw(shifts)) for piece in pieces]
    targets = [Memory(len(piece), draw.draw(shifts)) for piece in pieces]
    for source, piece in zip(sources, pieces, strict=True):
        source.put(piece)
    found = sums.copy_sum(
        [[target.address for target in targets]],
        [[source.address for source in sources]],
        [len(piece) for piece in pieces],
        [seed],
    )
    assert int(found[0]) == model_sum(data, seed)
    assert b"".join(target.get() for target in targets) == data


@given(st.binary(min_size=1, max_size=600), SEEDS, st.data())
def test_damage_is_seen(data: bytes, seed: int, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    start = draw.draw(st.integers(0, len(data) - 1))
    size = draw.draw(st.integers(1, 128))
    kind = draw.draw(st.sampled_from(["burst", "zeroed", "cut", "swapped", "moved"]))
    if kind == "burst":
        damaged[start : start + size] = draw.draw(
            st.binary(min_size=len(damaged[start : start + size]), max_size=128)
        )[: len(damaged[start : start + size])]
    elif kind == "zeroed":
        damaged[start:] = bytes(len(data) - start)
    elif kind == "cut":
        del damaged[start:]
    elif kind == "swapped":
        other = draw.draw(st.integers(0, len(data) - 1))
        damaged[start], damaged[other] = damaged[other], damaged[start]
    else:
        damaged = damaged[start:] + damaged[:start]
    if damaged != data:
        assert sums.checksum_of(bytes(damaged), seed) != sums.checksum_of(data, seed)


@given(st.binary(max_size=200), SEEDS, SEEDS)
def test_other_seeds_give_other_sums(data: bytes, one: int, two: int) -> None:
    assert (sums.checksum_of(data, one) == sums.checksum_of(data, two)) == (one == two)


@given(st.data())
def test_a_layout_holds_each_byte_of_a_block_once_and_in_memory_order(draw: st.DataObject) -> None:
    """For any order of axes, any padding, and blocks made of several kernel blocks."""
    shape = draw.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    axis = draw.draw(st.integers(0, len(shape) - 1))
    kernel_blocks = draw.draw(
        st.sampled_from([n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0])
    )
    blocks = shape[axis] // kernel_blocks
    itemsize = draw.draw(st.sampled_from([1, 2]))
    strides = [0] * len(shape)
    step = 1
    for inner in draw.draw(st.permutations(range(len(shape)))):
        strides[inner] = step
        step = step * shape[inner] + draw.draw(st.sampled_from([0, 0, 0, 1, 5]))
    address = 1000
    layout = layer_layout(
        *(address, [shape[axis], *shape[:axis], *shape[axis + 1 :]]),
        *([strides[axis], *strides[:axis], *strides[axis + 1 :]], itemsize, blocks),
    )

    places = np.zeros(shape, np.int64)
    for dim, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        along = np.arange(extent) * stride * itemsize
        places += along.reshape([-1 if other == dim else 1 for other in range(len(shape))])
    for block in range(blocks):
        ids = np.arange(block * kernel_blocks, (block + 1) * kernel_blocks)
        wanted = address + np.take(places, ids, axis=axis).ravel()
        wanted = np.sort((wanted[:, None] + np.arange(itemsize)).ravel())
        base = address + block * layout.block_stride_bytes
        found = [
            base + offset + byte for offset in layout.offsets for byte in range(layout.piece_bytes)
        ]
        assert found == wanted.tolist()
        gaps = np.count_nonzero(np.diff(wanted) != 1)
        assert len(layout.offsets) == gaps + 1, "pieces are as few as can be"
    assert layout.block_bytes * blocks == prod(shape) * itemsize


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=3),
)
def test_overlapping_elements_are_always_refused(axes: list[tuple[int, int]]) -> None:
    shape, strides = zip(*axes, strict=True)
    grid = np.indices(shape).reshape(len(shape), -1)
    places = (np.array(strides)[:, None] * grid).sum(axis=0)
    if len(set(places.tolist())) < places.size:
        with pytest.raises(LayoutError, match="overlap"):
            layer_layout(64, shape, strides, 2, shape[0])

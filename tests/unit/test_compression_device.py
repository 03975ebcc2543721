"""Compression as on a GPU, on tensors of a CPU: layouts of the cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.compression.engine.compressed_attention import CompressedRow, divided
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_engine.kv_views import KvOrder
from tests.support import compression_device as device
from tests.support.compression_device import DIM, KV_HEADS, LAYERS, LAYOUTS, PAGE

WITHIN = 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_pages_of_any_layout_are_apart_and_blocks_have_their_own(layout: str) -> None:
    head_pages, blocks = device.head_pages_of(layout, 6), [4, 1]
    keys, values = device.random_kv(len(blocks) * PAGE, seed=1)
    device.write(head_pages, blocks, keys, values)
    for layer in range(LAYERS):
        found = head_pages.read(layer, head_pages.pages(blocks))
        assert torch.equal(found[0], keys[layer]) and torch.equal(found[1], values[layer])
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    head_pages.write_bytes([3], data)
    read = head_pages.read_bytes([3])
    assert np.array_equal(read[:1000], data) and not read[1000:].any()
    assert len(read) == LAYERS * KV_HEADS * PAGE * 2 * DIM * 4
    for layer in range(LAYERS):
        found = head_pages.read(layer, head_pages.pages(blocks))
        assert torch.equal(found[0], keys[layer]) and torch.equal(found[1], values[layer])


def test_a_quantised_cache_and_layers_of_other_shapes_are_refused() -> None:
    small = torch.zeros(LAYERS, 3, KV_HEADS, PAGE, 2 * DIM, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="quantised"):
        HeadPages(list(small), 1, KvOrder.JOINED)
    whole = torch.zeros(LAYERS, 3, KV_HEADS, PAGE, 2 * DIM)
    with pytest.raises(ValueError, match="layer 1's KV cache has another shape"):
        HeadPages([whole[0], whole[1, :2]], 1, KvOrder.JOINED)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("predictor", [False, True], ids=["read again", "predictor"])
def test_a_context_is_scored_fitted_and_kept_alike_in_any_layout(
    layout: str, predictor: bool
) -> None:
    device.check_equal_to_cpu("cpu", layout, predictor, WITHIN)


@given(
    rows=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 90)), min_size=1, max_size=40),
    most=st.integers(1, 400),
)
def test_rows_are_divided_by_queries_and_tables_are_no_larger_than_allowed(
    rows: list[tuple[int, int]], most: int
) -> None:
    class Held:
        most, tokens = 0, 0

    made = [
        CompressedRow(number, slice(0, queries), 0, Held(), slice(0, width))  # type: ignore[arg-type]
        for number, (queries, width) in enumerate(rows)
    ]
    parts = list(divided(made, most))
    assert sorted(row.row for part in parts for row in part) == list(range(len(rows)))
    for part in parts:
        assert len({row.queries > 1 for row in part}) == 1
        assert len(part) == 1 or len(part) * max(row.width for row in part) <= most

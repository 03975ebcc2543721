"""Compression as on a GPU, on tensors of a CPU: layouts of the cache, and attention by vLLM's
Triton kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_decode.attention.batch import BatchRow
from headrace_decode.compression.engine.compressed_attention import CompressedRow, divided
from headrace_decode.compression.engine.context_scorer import RereadRows
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.engine.metadata import CompressionMetadata
from headrace_engine.kv_views import KvOrder
from tests.support import compression_device as device
from tests.support.compression_device import (
    DIM,
    KV_HEADS,
    LAYERS,
    LAYOUTS,
    PAGE,
    Asking,
)
from tests.support.interpreted import INTERPRETED, inside, outside, pass_in_the_interpreter

pytest.importorskip("triton")

WITHIN = 1e-5

if INTERPRETED:
    from tests.support.seen_triton import have_vllm_see_triton

    have_vllm_see_triton()
    from vllm.v1.attention.backends import triton_attn

    from headrace_decode.attention_backend.runtime import RUNTIME
    from headrace_engine.vllm.attention import paged_kernels
    from tests.support import sparse_device as backend


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.interpreted(__file__)
@outside
def test_attention_to_what_is_kept_holds_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    pass_in_the_interpreter(request)


@pytest.fixture(autouse=INTERPRETED)
def few_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter is slow."""
    monkeypatch.setattr(paged_kernels, "SEGMENTS", 2)
    yield


@outside
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


@outside
def test_a_quantised_cache_and_layers_of_other_shapes_are_refused() -> None:
    small = torch.zeros(LAYERS, 3, KV_HEADS, PAGE, 2 * DIM, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="quantised"):
        HeadPages(list(small), 1, KvOrder.JOINED)
    whole = torch.zeros(LAYERS, 3, KV_HEADS, PAGE, 2 * DIM)
    with pytest.raises(ValueError, match="layer 1's KV cache has another shape"):
        HeadPages([whole[0], whole[1, :2]], 1, KvOrder.JOINED)


@outside
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("predictor", [False, True], ids=["read again", "predictor"])
def test_a_context_is_scored_fitted_and_kept_alike_in_any_layout(
    layout: str, predictor: bool
) -> None:
    device.check_equal_to_cpu("cpu", layout, predictor, WITHIN)


@outside
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


@inside
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_attend_to_what_each_head_keeps_and_to_all_after_it(layout: str) -> None:
    rows = [Asking(5, 2, 1, 1), Asking(3, 2, 40, 1), Asking(4, 2, 37, 19), Asking(3, 2, 16, 16)]
    device.check_attention(rows, layout, paged_kernels.triton_causal_attention, WITHIN)


@inside
def test_many_rows_of_one_token_are_computed_without_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_kernels, "MAX_SEGMENTED", 1)
    rows = [Asking(3, 2, 5, 1), Asking(4, 2, 20, 1)]
    device.check_attention(rows, "LBNHC", paged_kernels.triton_causal_attention, WITHIN)


@inside
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 2, 3)], ids=["NHD", "HND"])
def test_exact_rows_are_vllms_bit_for_bit_beside_compressed_ones(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend of GPUs: a compressed row, a row whose queries count, and one of neither kind."""
    monkeypatch.setattr(triton_attn, "NUM_PAR_SOFTMAX_SEGMENTS", 2)
    ours, theirs = backend.Rig(True, order=order), backend.Rig(False, order=order)
    context, length, scale = 10 * backend.PAGE, 170, backend.SHAPE.scale
    batch = [
        backend.sequence(length, seed=1),
        backend.sequence(130, queries=19, seed=2),
        backend.sequence(90, seed=3),
    ]
    tables = [ours.write(one) for one in batch]
    assert tables == [theirs.write(one) for one in batch]
    room = [ours._free.pop() for _ in range(3)]
    worker = device.one_layer_worker(ours.cache, tables[0], context, room, scale)
    again = RereadRows("0", context, 120, context)
    worker.begin_step((), (), CompressionMetadata(rereads={"1": again}))

    monkeypatch.setattr(RUNTIME, "compression", worker)
    metadata = ours.metadata(batch, tables)
    assert metadata.vllms and metadata.seq_lens.tolist() == [1, 130, 90]
    monkeypatch.setattr(RUNTIME, "compression", worker)
    found, plain = ours.forward(batch, metadata), theirs.step(batch, tables)
    assert torch.equal(found[1:], plain[1:])
    [(queries, _)] = worker.scorers["0"]._came[0]
    assert torch.equal(queries, batch[1].queries[9:]), "positions 120 to 129"
    (held,) = (each.held for each in worker.select_rows(*asked("0", length))[0])
    head_pages = HeadPages([ours.cache], 1, KvOrder.JOINED)
    keys, values = head_pages.read_head_pages(held.head_pages[0])
    for head in range(4):
        kept, kv = int(held.counts[0, head // 2]) * backend.PAGE, head // 2
        mine = [
            torch.cat([part[kv, :kept], whole[context:, kv]])
            for part, whole in ((keys, batch[0].keys), (values, batch[0].values))
        ]
        weights = (batch[0].queries[0, head] * scale @ mine[0].T).softmax(-1)
        torch.testing.assert_close(found[0, head], weights @ mine[1], rtol=0, atol=WITHIN)
    assert not torch.allclose(found[0], plain[0], rtol=0, atol=WITHIN)


def asked(name: str, length: int) -> tuple[list[BatchRow], Any, Any]:
    """A step of one row with one token."""
    return [BatchRow(name, None, length)], np.array([0, 1]), np.array([length])


ROWS = st.integers(1, 30).flatmap(
    lambda behind: st.builds(
        Asking, st.integers(3, 5), st.integers(2, 3), st.just(behind), st.integers(1, behind)
    )
)


@inside
@settings(max_examples=8, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=3), layout=st.sampled_from(LAYOUTS))
def test_any_rows_attend_as_a_naive_program_does(rows: list[Asking], layout: str) -> None:
    device.check_attention(rows, layout, paged_kernels.triton_causal_attention, WITHIN)

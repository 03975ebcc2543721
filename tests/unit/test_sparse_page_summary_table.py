"""Summaries stay right whoever wrote the blocks, and a step's work on them is bounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops

from headrace_decode.attention.cpu_cache import KeyChecksums, LayerCache
from headrace_decode.sparse.engine.page_summary_table import PageSummaryTable
from headrace_decode.sparse.summaries import Summaries
from headrace_lab.sparse.moments import Moments

BLOCKS, HEADS, DIM, LAYERS = 6, 2, 32, 3


def layer(page: int = 32, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> LayerCache:
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(BLOCKS, HEADS, page, 2 * DIM, generator=generator)
    return LayerCache(cache.to(dtype))


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def right(summary_table: PageSummaryTable, layers: list[LayerCache], page: int) -> bool:
    """Whether a page's summaries are those of its keys now."""
    for summaries, keys in zip(summary_table.summaries, layers, strict=True):
        fresh = Summaries(BLOCKS, HEADS, keys.page_tokens, DIM)
        fresh.put(pages(page), keys.read(pages(page)))
        if not (fresh.codes[:, page] == summaries.codes[:, page]).all():
            return False
    return True


@pytest.mark.parametrize(("page", "isa"), [(32, "vec"), (16, "vec16")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_keys_are_read_as_vllm_wrote_them(page: int, isa: str, dtype: torch.dtype) -> None:
    cache = torch.zeros(BLOCKS, HEADS, page, 2 * DIM, dtype=dtype)
    tokens = 3 * page
    keys, values = torch.randn(2, tokens, HEADS, DIM).to(dtype)
    to_keys, to_values = cache.view(BLOCKS, HEADS, 2 * page, DIM).chunk(2, dim=2)
    slots = torch.cat([torch.arange(b * page, (b + 1) * page) for b in (4, 1, 2)])
    ops.cpu_attn_reshape_and_cache(keys, values, to_keys, to_values, slots, isa)
    found = LayerCache(cache).read(pages(4, 1, 2))
    assert torch.equal(found.transpose(1, 2).reshape(tokens, HEADS, DIM), keys)


def test_each_head_of_a_page_is_a_block_to_the_kernel() -> None:
    one = layer()
    keys, values = one.by_head()
    shape = (BLOCKS, HEADS, 2 * one.page_tokens, DIM)
    wanted = one.cache.view(shape).chunk(2, dim=2)
    assert torch.equal(keys[3 * HEADS + 1, 0], wanted[0][3, 1])
    assert torch.equal(values[3 * HEADS + 1, 0], wanted[1][3, 1])


def test_a_cache_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        LayerCache(torch.zeros(4, HEADS, 32, 2 * DIM).transpose(1, 2))


def test_sums_tell_keys_apart_and_see_no_values() -> None:
    layers = [layer(seed=n) for n in range(LAYERS)]
    sums = KeyChecksums(layers)
    before = sums.of(pages(*range(BLOCKS)))
    assert before.shape == (BLOCKS, LAYERS) and len(np.unique(before)) == before.size
    half = 32 * DIM
    layers[1].cache[2].flatten(1)[1, half - 1] += 1
    layers[2].cache[3].flatten(1)[1, half] += 1
    changed = sums.of(pages(*range(BLOCKS))) != before
    assert np.argwhere(changed).tolist() == [[2, 1]]


def test_summaries_of_blocks_that_others_wrote_are_made_anew_and_others_kept() -> None:
    layers = [layer(seed=n) for n in range(LAYERS)]
    summary_table = PageSummaryTable(layers)
    assert summary_table.refresh(pages(1, 2, 3), 1000) == (3, 3 + 3 * LAYERS)
    assert (
        summary_table.refresh(pages(1, 2, 3), 1000) == (3, 3) and summary_table.made == 3 * LAYERS
    )
    layers[0].cache[2] = torch.randn_like(layers[0].cache[2])
    assert not right(summary_table, layers, 2)
    assert summary_table.refresh(pages(3, 2), 1000) == (2, 3)
    assert right(summary_table, layers, 2)


def test_work_stops_at_the_budget_and_goes_on_where_it_stopped() -> None:
    layers = [layer(seed=n) for n in range(LAYERS)]
    summary_table, todo, steps = PageSummaryTable(layers), pages(5, 4, 3, 2, 1), 0
    each = 1 + LAYERS
    while len(todo):
        done, cost = summary_table.refresh(todo, 2 * each)
        assert 1 <= done <= 2 + 1 and cost <= 3 * each
        todo, steps = todo[done:], steps + 1
    assert steps >= 2 and all(right(summary_table, layers, n) for n in range(1, 6))
    assert summary_table.refresh(pages(1), 0) == (0, 0)


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, LAYERS - 1)),
            st.tuples(st.just("ask"), st.integers(0, 1), st.integers(1, 12)),
        ),
        max_size=20,
    )
)
def test_what_is_brought_up_is_right_whatever_happened_before(events: list[tuple]) -> None:
    layers = [layer(seed=n) for n in range(LAYERS)]
    summary_table, rng = PageSummaryTable(layers), torch.Generator().manual_seed(7)
    for kind, page, number in events:
        if kind == "write":
            layers[number].cache[page] = torch.randn(HEADS, 32, 2 * DIM, generator=rng)
        else:
            done, _ = summary_table.refresh(pages(page), number)
            assert done == 1 and right(summary_table, layers, page)


def test_summaries_are_made_in_the_basis_of_their_layer() -> None:
    layers, moments = [layer(seed=n) for n in range(LAYERS)], []
    for keys in layers:
        one = Moments(HEADS, DIM)
        one.add_pages(keys.read(pages(*range(BLOCKS))).float().numpy())
        one.add_queries(np.random.default_rng(len(moments)).normal(size=(HEADS, 50, DIM)))
        moments.append(one.basis())
    summary_table = PageSummaryTable(layers, moments)
    summary_table.refresh(pages(1, 2), 1000)
    for summaries, keys, basis in zip(summary_table.summaries, layers, moments, strict=True):
        wanted = Summaries(BLOCKS, HEADS, 32, DIM, basis=basis)
        wanted.put(pages(1, 2), keys.read(pages(1, 2)))
        assert summaries.basis is basis
        assert (wanted.codes == summaries.codes).all() and (wanted.scales == summaries.scales).all()
    assert (summary_table.summaries[0].codes[:, 1] != summary_table.summaries[1].codes[:, 1]).any()

"""Attention that keys get, and values that make up for dropped tokens, against plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace_decode.compression.refit import FITTED_ROWS, fit, fit_heads, fit_layer, sample_rows
from headrace_decode.compression.scores import (
    LEAD_TOKENS,
    ROWS_AT_ONCE,
    AttentionReceived,
    combined_scores,
    plan_repeats,
)

DIM = 8


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_received_attention_is_that_of_all_queries_of_the_group() -> None:
    heads, group, tokens, rows = 2, 3, 20, ROWS_AT_ONCE + 7
    keys = torch.randn(heads, tokens, DIM, generator=rng())
    queries = torch.randn(rows, heads * group, DIM, generator=rng(1))
    received = AttentionReceived(heads, tokens, 0.5)
    for part in (queries[:10], queries[10:]):
        received.add(part, keys)
    for head in range(heads):
        asked = queries[:, head * group : (head + 1) * group].reshape(-1, DIM)
        weights = (0.5 * asked @ keys[head].T).softmax(-1)
        expected = weights.square().mean(0).sqrt()
        assert torch.allclose(received.root_mean_square()[head], expected, atol=1e-5)


def test_kinds_of_queries_count_alike_however_many_there_are() -> None:
    keys = torch.randn(1, 6, DIM, generator=rng())
    kinds = [torch.randn(rows, 1, DIM, generator=rng(rows)) for rows in (3, 50)]
    parts = [AttentionReceived(1, 6, 1.0) for _ in kinds]
    for part, queries in zip(parts, kinds, strict=True):
        part.add(queries, keys)
    squares = [(one[:, 0] @ keys[0].T).softmax(-1).square().mean(0) for one in kinds]
    assert torch.allclose(combined_scores(parts)[0], (squares[0] + squares[1]).sqrt(), atol=1e-6)


def test_without_queries_nothing_is_known() -> None:
    with pytest.raises(ValueError, match="no queries"):
        AttentionReceived(1, 4, 1.0).root_mean_square()


@given(st.integers(1, 300), st.integers(1, 100))
def test_each_token_is_repeated_once_behind_what_leads_to_it(tokens: int, block: int) -> None:
    parts = list(plan_repeats(tokens, block))
    assert [at for _, begin, end in parts for at in range(begin, end)] == list(range(tokens))
    assert all(lead == max(0, begin - LEAD_TOKENS) for lead, begin, _ in parts)
    assert all(end - begin <= block for _, begin, end in parts)


def test_nothing_to_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to repeat"):
        list(plan_repeats(0))


def refitted(*arguments: Any) -> Tensor:
    return fit(*arguments)[1]


def move(keys: Tensor, kept: Tensor, queries: Tensor, ridge: float = 1.0) -> Tensor:
    """What all kept keys of a head move by; 0 where none is kept."""
    moved, values = fit(keys, keys, kept, queries, None, ridge)
    assert torch.equal(values, keys[kept])
    by = moved - keys[kept]
    assert torch.allclose(by, by[:1].expand_as(by), atol=1e-5)
    return by.mean(0) if len(by) else keys.new_zeros(keys.shape[1])


def one_head(tokens: int, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (tokens, DIM), (tokens, DIM), (rows, DIM)
    return tuple(torch.randn(shape, generator=rng(seed)) for shape in shapes)  # type: ignore[return-value]


def error(keys: Tensor, values: Tensor, kept: Tensor, queries: Tensor, new: Tensor) -> float:
    """Of attention to what is kept, squared."""
    logits = queries @ keys.T
    missing = logits.softmax(-1) @ values - logits[:, kept].softmax(-1) @ new
    return float(missing.square().sum())


@given(st.integers(2, 30), st.integers(1, 60), st.integers(0, 99), st.data())
def test_refitting_solves_the_ridge_regression(
    tokens: int, rows: int, seed: int, data: st.DataObject
) -> None:
    keys, values, queries = one_head(tokens, rows, seed)
    count = data.draw(st.integers(1, tokens - 1))
    kept = torch.arange(count)
    ridge = 0.1
    found = refitted(keys, values, kept, queries, ridge)
    logits = (queries @ keys.T).double()
    weights = logits[:, kept].softmax(-1)
    missing = logits.softmax(-1) @ values.double() - weights @ values[kept].double()
    penalty = ridge * rows / count * torch.eye(count, dtype=torch.float64)
    change = torch.linalg.solve(weights.T @ weights + penalty, weights.T @ missing)
    assert torch.allclose(found.double(), values[kept].double() + change, atol=1e-3)


def test_refitted_values_err_less_on_queries_that_were_not_seen() -> None:
    keys, values, queries = one_head(60, 600, 3)
    kept = torch.arange(0, 60, 4)
    new = refitted(keys, values, kept, queries[:500])
    later = queries[500:]
    assert error(keys, values, kept, later, new) < 0.7 * error(
        keys, values, kept, later, values[kept]
    )


def test_a_large_ridge_leaves_values_as_they_are() -> None:
    keys, values, queries = one_head(20, 50, 4)
    kept = torch.arange(10)
    assert torch.allclose(refitted(keys, values, kept, queries, 1e9), values[kept], atol=1e-6)


def test_where_all_is_kept_or_nothing_is_asked_values_stay() -> None:
    keys, values, queries = one_head(20, 50, 5)
    assert torch.equal(refitted(keys, values, torch.arange(20), queries), values)
    assert torch.equal(refitted(keys, values, torch.arange(9), queries[:0]), values[:9])


def test_with_many_tokens_and_queries_that_all_look_at_the_first_a_fit_is_still_found() -> None:
    """The ridge of so many tokens is less than what fp32 rounds of the square."""
    keys, values, queries = one_head(200_000, 200, 7)
    keys[:3] = 3.0
    found = refitted(keys, values, torch.arange(190_000), queries.abs())
    assert found.isfinite().all()


@given(st.integers(2, 30), st.integers(1, 60), st.integers(0, 99), st.data())
def test_moving_solves_the_ridge_regression(
    tokens: int, rows: int, seed: int, data: st.DataObject
) -> None:
    keys, _, queries = one_head(tokens, rows, seed)
    kept, ridge = torch.arange(data.draw(st.integers(1, tokens - 1))), 0.1
    asked, logits = queries.double(), (queries @ keys.T).double()
    missing = logits.exp().sum(-1).log() - logits[:, kept].exp().sum(-1).log()
    penalty = (ridge * asked.square().sum() / DIM).sqrt() * torch.eye(DIM, dtype=torch.float64)
    longer = torch.cat([asked, penalty]), torch.cat([missing, torch.zeros(DIM).double()])
    [expected] = torch.linalg.lstsq(longer[0], longer[1][None].mT).solution.T
    assert torch.allclose(move(keys, kept, queries, ridge).double(), expected, atol=1e-4)


def test_moved_keys_have_the_weight_of_all_of_the_context_for_queries_that_were_not_seen() -> None:
    keys, _, queries = one_head(60, 600, 3)
    queries += 2.0  # with no direction in common no vector could tell
    kept = torch.arange(0, 60, 4)
    whole, part = (queries @ keys.T).logsumexp(-1), (queries @ keys[kept].T).logsumexp(-1)
    moved = part + queries @ move(keys, kept, queries[:500])
    before, after = ((whole - each)[500:].abs().mean() for each in (part, moved))
    assert after < 0.5 * before


def test_where_all_is_kept_or_nothing_is_asked_keys_stay() -> None:
    keys, _, queries = one_head(20, 50, 5)
    assert not move(keys, torch.arange(20), queries).any()
    assert not move(keys, torch.arange(9), queries[:0]).any()
    assert not move(keys, torch.arange(0), queries).any()
    assert not move(keys, torch.arange(9), torch.zeros_like(queries)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_heads_of_a_layer_are_fitted_to_some_of_the_rows(dtype: torch.dtype) -> None:
    heads, group, places, rows = 2, 3, 40, 3 * FITTED_ROWS
    keys, values = torch.randn(2, heads, places, DIM, generator=rng(8)).to(dtype)
    asked = torch.randn(rows, heads * group, DIM, generator=rng(9))
    kept = torch.rand(heads, places, generator=rng(10)) < 0.3
    there = kept | (torch.rand(heads, places, generator=rng(11)) < 0.8)
    there[0] = True
    nothing = ~there[..., None]
    both = keys.masked_fill(nothing, torch.nan), values.masked_fill(nothing, torch.nan)
    found = fit_layer(*both, kept, asked, 0.5, there)
    for head, (moved, changed) in enumerate(found):
        assert moved.dtype == changed.dtype == dtype
        k, v = keys[head, there[head]].float(), values[head, there[head]].float()
        at = kept[head, there[head]].nonzero()[:, 0]
        mine = asked[::3, group * head : group * (head + 1)].flatten(0, 1) * 0.5
        alone = fit(k, v, at, mine)
        assert torch.equal(changed, alone[1].to(dtype)) and torch.equal(moved, alone[0].to(dtype))
    everywhere = fit_layer(keys, values, kept, asked, 0.5)
    assert all(torch.equal(*pair) for pair in zip(everywhere[0], found[0], strict=True))


def test_a_head_that_keeps_all_or_nothing_stays_as_it_is() -> None:
    keys, values = torch.randn(2, 2, 40, DIM, generator=rng(8))
    kept = torch.stack([torch.ones(40, dtype=torch.bool), torch.zeros(40, dtype=torch.bool)])
    whole, none = fit_layer(keys, values, kept, torch.randn(64, 2, DIM, generator=rng(9)), 0.5)
    assert torch.equal(whole[0], keys[0]) and torch.equal(whole[1], values[0])
    assert not len(none[0]) and not len(none[1])


@pytest.mark.parametrize("ridges", [(0.0, 1.0), (1.0, 0.0), (float("nan"), None)])
def test_a_ridge_that_is_not_above_0_is_refused(ridges: tuple[float, float | None]) -> None:
    keys, values, queries = one_head(20, 50, 6)
    with pytest.raises(ValueError, match="above 0"):
        fit(keys, values, torch.arange(3), queries, *ridges)


def test_each_fit_is_the_same_without_the_other() -> None:
    keys, values, queries = one_head(60, 200, 6)
    both = fit(keys, values, torch.arange(9), queries)
    assert torch.equal(both[0], fit(keys, values, torch.arange(9), queries, None)[0])
    alone = fit(keys, values, torch.arange(9), queries, key_ridge=None)
    assert torch.equal(both[1], alone[1]) and torch.equal(alone[0], keys[:9])


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    absent=st.integers(0, 8),
    rows=st.sampled_from([5, FITTED_ROWS]),
    seed=st.integers(0, 20),
)
def test_heads_that_are_fitted_together_are_those_that_are_fitted_alone(
    counts: list[int], absent: int, rows: int, seed: int
) -> None:
    heads, tokens, group = len(counts), 40 + absent, 2
    keys, values = torch.randn(2, heads, tokens, DIM, generator=rng(seed))
    there = torch.ones(heads, tokens, dtype=torch.bool)
    there[::2, 3 : 3 + absent] = False
    keys[~there], values[~there] = torch.nan, torch.nan
    kept = torch.zeros_like(there)
    for head, count in enumerate(counts):
        places = there[head].nonzero()[:, 0]
        kept[head, places[torch.randperm(len(places), generator=rng(head))[:count]]] = True
    asked = torch.randn(rows, heads * group, DIM, generator=rng(seed + 1))
    wanted = fit_layer(keys, values, kept, asked, 0.5, there)
    by_head = (sample_rows(asked) * 0.5).unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)
    found = fit_heads(keys, values, kept, by_head, there)
    for mine, its in zip(found, wanted, strict=True):
        for one, other in zip(mine, its, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)

"""Which pairs of a context stay in a budget, against a model that sorts them one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace_decode.compression.selection import AlwaysKept, select_token_pages, select_tokens
from headrace_lab.compression.entropy_budgets import by_entropy, entropies

NOTHING = AlwaysKept(sinks=0, newest=0)


@st.composite
def scored(draw: st.DrawFn) -> tuple[Tensor, AlwaysKept, int]:
    """Scores with ties, what must stay, and a budget that holds it."""
    shape = [draw(st.integers(1, most)) for most in (3, 3, 12)]
    count = shape[0] * shape[1] * shape[2]
    numbers = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    scores = torch.tensor(numbers, dtype=torch.float32).view(*shape)
    always = AlwaysKept(*(draw(st.integers(0, most)) for most in (3, 3, 2)))
    least = int(always.pairs(scores).sum())
    return scores, always, draw(st.integers(least, count + 2))


def naive(scores: Tensor, total: int, must: Tensor) -> list[bool]:
    """Pairs in order of score, those that must stay first, the earlier of two equal ones."""
    flat, first = scores.flatten().tolist(), must.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda at: (not first[at], 0 if first[at] else -flat[at]))
    chosen = set(order[:total])
    return [at in chosen for at in range(len(flat))]


@given(scored())
def test_the_best_pairs_of_all_layers_and_heads_stay(
    given_: tuple[Tensor, AlwaysKept, int],
) -> None:
    scores, always, total = given_
    kept = select_tokens(scores, total, always)
    assert kept.flatten().tolist() == naive(scores, total, always.pairs(scores))
    assert int(kept.sum()) == min(total, scores.numel())


@given(scored())
def test_first_and_newest_tokens_and_whole_layers_stay(
    given_: tuple[Tensor, AlwaysKept, int],
) -> None:
    scores, always, total = given_
    kept = select_tokens(scores, total, always)
    assert kept[..., : always.sinks].all()
    assert kept[..., scores.shape[-1] - min(always.newest, scores.shape[-1]) :].all()
    assert kept[: always.whole_layers].all()


@given(scored(), st.data())
def test_with_budgets_of_their_own_heads_keep_just_that(
    given_: tuple[Tensor, AlwaysKept, int], data: st.DataObject
) -> None:
    scores, always, _ = given_
    least = always.pairs(scores).sum(-1)
    more = [data.draw(st.integers(int(one), scores.shape[-1])) for one in least.flatten()]
    budgets = torch.tensor(more).view(least.shape)
    kept = select_tokens(scores, int(budgets.sum()), always, budgets)
    assert torch.equal(kept.sum(-1), budgets)
    for layer in range(len(scores)):
        for head in range(scores.shape[1]):
            one = scores[layer, head]
            must = always.pairs(scores)[layer, head]
            assert kept[layer, head].tolist() == naive(one, int(budgets[layer, head]), must)


def test_what_must_stay_and_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="8 pairs must stay and the budget is 7"):
        select_tokens(torch.ones(2, 2, 9), 7, AlwaysKept(sinks=1, newest=1))


@pytest.mark.parametrize("scores", [torch.ones(2, 3), torch.full((1, 1, 4), torch.nan)])
def test_scores_that_are_none_are_refused(scores: Tensor) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        select_tokens(scores, 4, NOTHING)


@pytest.mark.parametrize("budgets", [torch.ones(3, 1).long(), torch.full((2, 1), 5)])
def test_budgets_of_another_shape_or_above_the_total_are_refused(budgets: Tensor) -> None:
    with pytest.raises(ValueError, match="add up to 9 pairs at most"):
        select_tokens(torch.ones(2, 1, 8), 9, NOTHING, budgets)


def test_counts_below_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        AlwaysKept(newest=-1)


@given(
    st.lists(st.floats(0, 12), min_size=6, max_size=6),
    st.integers(1, 50),
    st.integers(0, 4),
    st.integers(0, 400),
)
def test_budgets_by_entropy_add_up_and_keep_floor_and_cap(
    numbers: list[float], tokens: int, floor: int, more: int
) -> None:
    entropy = torch.tensor(numbers).view(2, 3)
    total = 6 * min(floor, tokens) + more
    found = by_entropy(entropy, total, tokens, floor)
    assert int(found.sum()) == min(total, 6 * tokens)
    assert int(found.min()) >= min(floor, tokens) and int(found.max()) <= tokens


def test_a_head_of_twice_the_spread_gets_twice_the_tokens() -> None:
    entropy = torch.tensor([[0.0, 1.0]]) * torch.tensor(2.0).log()
    assert by_entropy(entropy, 30, 100).tolist() == [[10, 20]]


@pytest.mark.parametrize("entropy", [torch.ones(3), torch.full((1, 2), torch.inf)])
def test_entropies_that_are_none_are_refused(entropy: Tensor) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        by_entropy(entropy, 10, 10)


def test_a_floor_above_the_total_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 5 pairs"):
        by_entropy(torch.ones(2, 2), 5, 10, floor=2)


def test_even_attention_has_the_entropy_of_all_tokens() -> None:
    found = entropies(torch.zeros(2, 3, 4), torch.randn(2, 10, 4))
    assert torch.allclose(found, torch.tensor(10.0).log().expand(2))


@given(scored())
def test_pages_of_one_token_are_kept_as_pairs_are(given_: tuple[Tensor, AlwaysKept, int]) -> None:
    scores, always, total = given_
    assert torch.equal(
        select_token_pages(scores, total, 1, always), select_tokens(scores, total, always)
    )


@given(st.integers(0, 99), st.integers(1, 3), st.integers(0, 12))
def test_each_head_keeps_whole_pages_of_its_best(seed: int, heads: int, more: int) -> None:
    page, tokens = 4, 24
    scores = torch.rand(2, heads, tokens, generator=torch.Generator().manual_seed(seed))
    always, pages = AlwaysKept(sinks=1, newest=2), min(2 * heads + more, 2 * heads * tokens // page)
    kept = select_token_pages(scores, pages, page, always)
    must = always.pairs(scores)
    assert int(kept.sum()) == pages * page and kept[must].all()
    worth = {}
    for layer in range(2):
        for head in range(heads):
            mine = kept[layer, head]
            assert int(mine.sum()) % page == 0
            rank = scores[layer, head].masked_fill(must[layer, head], 2.0)
            if mine.any() and not mine.all():
                assert rank[mine].min() >= rank[~mine].max()
            best = rank.sort(descending=True).values.unflatten(0, (-1, page)).sum(-1)
            count = int(mine.sum()) // page
            worth[layer, head] = best[:count].tolist(), best[count:].tolist()
    least = min(x for inside, _ in worth.values() for x in inside)
    most = max((x for _, outside in worth.values() for x in outside), default=0.0)
    assert least >= most or least > 2.0


def test_a_context_that_is_no_number_of_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="of 4 tokens or a multiple"):
        select_token_pages(torch.ones(1, 1, 9), 2, 4)

"""What a token costs on a replica at its load, and which replicas are too dear for drafting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.token_cost import TokenPrices, acceptance, affordable, token_seconds

K = 8


def line(
    base_s: float = 0.02, row_s: float = 0.001, depth: int = K, error: float = 0.05
) -> TokenPrices:
    """A replica whose steps take `base_s + row_s n`, told up to 64 requests."""
    loads = [1 << bits for bits in range(7)]
    return TokenPrices([base_s + row_s * n for n in loads], [depth] * 7, 900.0, 540.0, error)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 48, 64, 65, 200])
def test_step_seconds_lie_on_the_line_through_the_loads_told(rows: int) -> None:
    assert line().seconds(rows) == pytest.approx(0.02 + 0.001 * rows)


def test_one_load_told_holds_for_all() -> None:
    told = TokenPrices([0.02], [4])
    assert (told.seconds(1), told.seconds(9), told.depth(9)) == (0.02, 0.02, 4)


def test_the_depth_is_that_of_the_loads_power_of_two() -> None:
    told = TokenPrices([0.02, 0.02, 0.02], [8, 4, 0])
    assert [told.depth(rows) for rows in (1, 2, 3, 4, 100)] == [8, 4, 4, 0, 0]


def test_a_token_costs_the_step_over_the_tokens_that_drafts_make_of_it() -> None:
    """n = 10: T = 0.03 s, p = 10 * 0.001 / 0.03 = 1/3; a = 0.6: of 0.6, 0.36, 0.216 two pay."""
    gained = (0.6 - 1 / 3) + (0.36 - 1 / 3)
    assert token_seconds(line(), 10, 0.6, 100) == pytest.approx(0.03 / (1 + gained))


def test_where_tokens_are_dear_nothing_is_gained() -> None:
    assert token_seconds(line(base_s=0.0), 10, 0.6, 100) == pytest.approx(0.01)


@pytest.mark.parametrize(("tokens", "gained"), [(1, 0.0), (2, 0.5), (3, 0.75), (99, 0.75)])
def test_an_answer_is_drafted_no_further_than_its_last_token_but_one(
    tokens: int, gained: float
) -> None:
    flat = TokenPrices([0.02, 0.02], [2, 2])
    assert token_seconds(flat, 1, 0.5, tokens) == pytest.approx(0.02 / (1 + gained))


def test_acceptance_is_that_of_all_replicas_together() -> None:
    told = [
        TokenPrices([1.0], [1], 800.0, 700.0),
        TokenPrices([1.0], [1], 196.0, 49.0),
        TokenPrices([1.0], [1]),
    ]
    assert acceptance(told) == pytest.approx(0.75)


def test_without_any_drafts_yet_a_little_is_expected() -> None:
    assert acceptance([TokenPrices([1.0], [1])]) == pytest.approx(0.25)


def test_a_busy_replica_is_too_dear_while_another_is_idle() -> None:
    assert affordable({"idle": line(), "busy": line()}, {"idle": 1, "busy": 12}, 100) == {"idle"}


def test_what_the_errors_cannot_tell_apart_is_as_cheap() -> None:
    told = {"a": line(error=0.2), "b": line(error=0.2)}
    assert affordable(told, {"a": 1, "b": 2}, 100) == {"a", "b"}
    assert affordable({"a": line(error=0.0), "b": line(error=0.0)}, {"a": 1, "b": 2}, 100) == {"a"}


def test_a_slow_machine_is_left_until_the_fast_one_is_as_dear() -> None:
    told = {"fast": line(), "slow": line(base_s=0.04, row_s=0.002)}
    assert affordable(told, {"fast": 1, "slow": 1}, 100) == {"fast"}
    assert affordable(told, {"fast": 40, "slow": 1}, 100) == {"slow"}


def test_one_that_drafting_is_switched_off_on_is_dearer() -> None:
    told = {"on": line(), "off": line(depth=0)}
    assert affordable(told, {"on": 1, "off": 1}, 100) == {"on"}


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        pytest.param({"a": line(), "b": None}, 100, id="one tells no prices"),
        pytest.param({"a": line(depth=0), "b": line(0.5, depth=0)}, 100, id="nobody drafts"),
        pytest.param({"a": line(), "b": line(0.5)}, 1, id="an answer of one token"),
    ],
)
def test_without_a_reason_nobody_is_left_out(
    told: dict[str, TokenPrices | None], tokens: int
) -> None:
    assert affordable(told, {"a": 1, "b": 60}, tokens) == {"a", "b"}


def test_one_replica_is_always_affordable() -> None:
    assert affordable({"a": line()}, {"a": 500}, 100) == {"a"}


prices = st.builds(
    lambda steps, depth, right, error: TokenPrices(
        sorted(steps), [depth] * len(steps), 100.0, right, error
    ),
    st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=8),
    st.integers(0, 16),
    st.floats(0.0, 100.0),
    st.floats(0.0, 2.0),
)


@given(st.lists(prices, min_size=1, max_size=4), st.data())
def test_somebody_is_always_affordable_and_the_cheapest_among_them(
    told: list[TokenPrices], data: st.DataObject
) -> None:
    rows = {str(n): data.draw(st.integers(1, 300)) for n in range(len(told))}
    named: dict[str, TokenPrices | None] = {str(n): one for n, one in enumerate(told)}
    cheap = affordable(named, rows, 50)
    chance = acceptance(told)
    costs = {str(n): token_seconds(one, rows[str(n)], chance, 50) for n, one in enumerate(told)}
    assert cheap <= set(named)
    assert min(costs.values()) in [costs[name] for name in cheap]


@given(prices, st.integers(1, 300), st.floats(0.0, 1.0))
def test_drafts_never_make_a_token_dearer_and_never_cheaper_than_they_are_deep(
    told: TokenPrices, rows: int, chance: float
) -> None:
    cost_s, plain_s = token_seconds(told, rows, chance, 99), told.seconds(rows)
    assert plain_s / (1 + told.depth(rows)) <= cost_s * (1 + 1e-9)
    assert cost_s <= plain_s

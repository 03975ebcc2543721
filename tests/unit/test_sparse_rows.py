"""Which rows of a step attend sparsely."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.attention.batch import BatchRow
from headrace_decode.attention.page_counts import MIN_TOKENS, RECENT, SINKS, selected_page_count
from headrace_decode.attention.settings import SparseSettings, settings_of
from headrace_decode.attention_backend.runtime import AttentionRuntime
from headrace_decode.sparse.engine.attention import SparseRow
from headrace_decode.sparse.engine.sparse_rows import READY_STEPS, STEP_WORK, RowPlan, SparseRows
from headrace_decode.techniques import SPARSE, keep_ratio_in


def asking(extra_args: dict[str, Any] | None) -> Any:
    """Sampling parameters with these extra arguments."""
    return SimpleNamespace(extra_args=extra_args)


PAGE, LAYERS, KV = 32, 30, MIN_TOKENS + 5
FULL = (KV - 1) // PAGE


class Fake:
    """Does what the budget allows, at so much a page."""

    def __init__(self, cost: int = 0) -> None:
        self.cost, self.asked = cost, []

    def refresh(self, row: int, first: int, last: int, budget: int) -> tuple[int, int]:
        pages = last - first
        done = min(pages, -(-budget // self.cost) if self.cost else pages)
        self.asked.append((pages, budget))
        return done, done * self.cost


class Batch:
    """Rows of requests."""

    def __init__(self, cost: int = 0) -> None:
        self.summary_table = Fake(cost)
        self.rows = SparseRows(LAYERS, PAGE)

    def step(self, *rows: tuple[str, Any, int, int, int]) -> list[RowPlan]:
        """Rows of (request, share, prompt's tokens, queries, KV)."""
        return self.rows.select_rows(
            [BatchRow(name, share, prompt) for name, share, prompt, _, _ in rows],
            np.array([row[3] for row in rows]),
            np.array([row[4] for row in rows]),
            self.summary_table.refresh,
        )


def test_a_decode_row_of_a_request_that_asks_is_sparse() -> None:
    [row] = Batch().step(("a", 0.1, 100, 1, KV))
    assert row == RowPlan(0, FULL, KV - FULL * PAGE, -(-(FULL + 1) // 10))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (("a", None, 100, 1, KV), "it asks for nothing"),
        (("a", 0.1, 100, 2, KV), "it verifies a draft"),
        (("a", 0.1, 4 * KV, 512, KV), "it computes the prompt"),
        (("a", 0.1, KV, 1, KV), "it computes the prompt's last token"),
        (("a", 0.1, 100, 1, MIN_TOKENS - 1), "it is short"),
        (("a", 0.99, 100, 1, KV), "all pages are chosen"),
    ],
)
def test_other_rows_are_dense(row: tuple[str, Any, int, int, int], why: str) -> None:
    assert Batch().step(row) == [], why


def test_only_the_rows_that_ask_are_sparse() -> None:
    found = Batch().step(
        ("a", None, 9, 1, KV), ("b", 0.1, 9, 1, KV), ("c", 0.2, 9, 3, KV), ("d", 0.5, 9, 1, KV)
    )
    assert [row.row for row in found] == [1, 3]


def test_a_row_on_a_cpu_takes_its_blocks_from_its_table() -> None:
    row = SparseRow.of(RowPlan(1, 2, 5, 3), np.array([7, 4, 9, 8], np.int32))
    assert row.pages.tolist() == [7, 4] and (row.row, row.newest) == (1, 9)
    assert (row.fill, row.chosen) == (5, 3)


def test_a_row_is_dense_until_its_pages_are_done_and_nobody_waits() -> None:
    batch, steps = Batch(cost=1 + LAYERS), 0
    while not batch.step(("a", 0.1, 9, 1, KV)):
        steps += 1
    assert steps == -(-FULL // -(-STEP_WORK // (1 + LAYERS))) - 1
    assert sum(min(n, -(-b // (1 + LAYERS))) for n, b in batch.summary_table.asked) == FULL


@pytest.mark.parametrize("layers", [1, 32, 80])
@pytest.mark.parametrize("tokens", [2_100, 32_768, 131_072])
def test_many_requests_that_arrive_together_are_sparse_within_33_steps(
    layers: int, tokens: int
) -> None:
    batch = Batch(cost=1 + layers)
    batch.rows = SparseRows(layers, PAGE)
    for step in range(READY_STEPS + 1):
        rows = [(str(n), 0.1, 9, 1, tokens + step) for n in range(6)]
        found = batch.step(*rows)
    assert len(found) == 6


def test_what_a_row_may_have_done_in_a_step_is_a_32nd_of_its_pages() -> None:
    batch = Batch(cost=1 + LAYERS)
    batch.step(*(("abcd"[n], 0.1, 9, 1, 32_768) for n in range(4)))
    asked = [budget for _, budget in batch.summary_table.asked]
    own = 32 * (1 + LAYERS)
    assert asked == [own] * 4 and own > STEP_WORK


def test_a_page_that_fills_up_is_all_that_is_looked_at_later() -> None:
    batch = Batch()
    for kv in range(KV, KV + 2 * PAGE):
        assert batch.step(("a", 0.1, 9, 1, kv))
    assert [n for n, _ in batch.summary_table.asked] == [FULL, 1, 1]


def test_a_row_that_filled_a_page_up_goes_before_one_that_comes_new() -> None:
    batch = Batch(cost=1 + LAYERS)
    while not batch.step(("old", 0.1, 9, 1, KV)):
        pass
    kv = (FULL + 1) * PAGE + 1
    found = batch.step(("new", 0.1, 9, 1, KV), ("old", 0.1, 9, 1, kv))
    assert [row.row for row in found] == [1]


def test_a_step_that_computes_a_prompt_may_do_more() -> None:
    batch = Batch(cost=1 + LAYERS)
    batch.step(("a", 0.1, 5000, 1024, 2048))
    assert batch.summary_table.asked == [(1024 // PAGE, STEP_WORK + LAYERS * 1024 // PAGE)]


def test_all_pages_are_looked_at_again_when_a_request_comes_back() -> None:
    batch = Batch()
    batch.step(("a", 0.1, 9, 1, KV))
    batch.rows.begin_step({"a", "other"})
    assert batch.step(("a", 0.1, 9, 1, KV)) == [], "KV may be on its way in this step"
    batch.rows.begin_step(set())
    assert batch.step(("a", 0.1, 9, 1, KV))
    assert [n for n, _ in batch.summary_table.asked] == [FULL, FULL]


def test_all_pages_are_looked_at_again_when_kv_is_computed_again() -> None:
    batch = Batch()
    batch.step(("a", 0.1, 9, 1, KV))
    batch.step(("a", 0.1, 9, 64, KV - 200))
    assert batch.summary_table.asked[1][0] == (KV - 200 - 64) // PAGE


@given(st.integers(1, 200_000), st.sampled_from([16, 32]), st.floats(0.001, 1))
def test_chosen_pages_are_the_share_and_more_than_the_fixed_ones(
    kv: int, page: int, share: float
) -> None:
    chosen, n = selected_page_count(kv, page, share), -(-kv // page)
    if chosen is None:
        assert kv < MIN_TOKENS or share * n > n - 1
    else:
        assert max(share * n, SINKS + RECENT) <= chosen < n
        assert chosen == SINKS + RECENT or chosen - 1 < share * n


@pytest.mark.parametrize("value", [None, "auto", "off", True, False, 0, 1, 1.0, 1.5, -1, [0.1]])
def test_only_a_share_between_0_and_1_asks(value: Any) -> None:
    assert keep_ratio_in(asking({"sparse": value}), SPARSE) is None


def test_a_share_asks() -> None:
    assert keep_ratio_in(asking({"sparse": 0.25}), SPARSE) == 0.25
    assert keep_ratio_in(asking(None), SPARSE) is keep_ratio_in(asking({}), SPARSE) is None


def test_outside_the_schedulers_steps_no_row_is_sparse() -> None:
    bound, arguments = AttentionRuntime(), (1, np.array([0, 1]), np.array([KV]), Fake().refresh)
    assert bound.sparse_rows(*arguments) == []
    bound.bind(SparseRows(LAYERS, PAGE), lambda: [BatchRow("a", 0.1, 9)])
    assert bound.sparse_rows(*arguments) == [], "a dummy run"
    bound.begin_step(set())
    assert len(bound.sparse_rows(*arguments)) == bound.sparse_row_count == 1
    assert bound.sparse_rows(2, *arguments[1:]) == [], "rows that are not the batch's"
    bound.end_step()
    assert bound.sparse_rows(*arguments) == []


def test_a_bug_in_it_leaves_the_engine_dense_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*given: int) -> tuple[int, int]:
        raise RuntimeError("a bug")

    bound = AttentionRuntime()
    bound.bind(SparseRows(LAYERS, PAGE), lambda: [BatchRow("a", 0.1, 9)])
    for _ in range(2):
        bound.begin_step(set())
        arguments = 1, np.array([0, 1]), np.array([KV]), broken
        assert bound.sparse_rows(*arguments) == []
    assert caplog.text.count("attends densely from now on") == 1


@pytest.mark.parametrize("part", ["offloading", "compression"])
def test_a_batch_that_is_not_the_steps_ends_the_requests_whose_kv_it_hides(
    part: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Follows(set[str]):
        def select_rows(self, *_: Any) -> Any:
            raise AssertionError("its rows are others'")

    bound = AttentionRuntime()
    bound.bind(SparseRows(LAYERS, PAGE), lambda: [BatchRow(n, 0.1, 9) for n in "abc"])
    setattr(bound, part, Follows("ac"))
    bound.begin_step(set())
    for count in (2, 3):
        step = count, np.arange(count + 1), np.array([KV] * count)
        if part == "offloading":
            assert bound.offloaded_rows(*step, np.zeros((count, 9))) == ([], [])
        else:
            assert bound.compressed_rows(*step) == ([], [])
        assert bound.pop_lost() == {"a", "c"} and not bound.pop_lost()
    assert "requests end, since their KV cannot be found" in caplog.text


def test_an_engine_is_told_in_its_additional_configuration() -> None:
    settings = SparseSettings("auto", 0.2, 16)
    assert settings_of({**settings.additional_config(), "other": 1}) == settings
    assert settings_of({}) is settings_of(None) is None
    with pytest.raises(ValueError, match="page_tokens"):
        SparseSettings(page_tokens=24)

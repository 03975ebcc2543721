"""Which tokens are computed again, and how deep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_prefill.blending.token_selection import SelectionRule, offsets_of

LAYERS = 10
CHUNKS = [(5, 40), (60, 100)]
OFFSETS = offsets_of(170, CHUNKS)


def mass(at: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A question that looks at one position almost alone, in all layers."""
    found = np.full((LAYERS, len(OFFSETS)), 1e-6, np.float32)
    found[:, at] = 1.0
    return found


def test_offsets_begin_anew_with_each_chunk() -> None:
    assert OFFSETS[[4, 5, 44, 45, 60, 159, 160]].tolist() == [-1, 0, 39, -1, 0, 99, -1]


def test_tokens_of_no_chunk_are_computed_in_all_layers() -> None:
    depths = SelectionRule().depths(OFFSETS, None, LAYERS, 0.0)
    assert (depths[OFFSETS < 0] == LAYERS).all()
    assert (depths[OFFSETS >= 0] == 0).all()


def test_a_budget_of_one_computes_everything() -> None:
    assert (SelectionRule().depths(OFFSETS, mass(100), LAYERS, 1.0) == LAYERS).all()


def test_without_a_question_the_beginning_of_each_chunk_is_computed() -> None:
    depths = SelectionRule(decay=np.inf).depths(OFFSETS, None, LAYERS, 0.2)
    for first, length in CHUNKS:
        chunk = depths[first : first + length]
        assert (np.diff(chunk) <= 0).all()
        assert chunk[0] == LAYERS


def test_a_token_that_the_question_looks_at_is_computed_in_all_layers() -> None:
    assert SelectionRule().depths(OFFSETS, mass(150), LAYERS, 0.1)[150] == LAYERS
    assert SelectionRule().depths(OFFSETS, None, LAYERS, 0.1)[150] == 0


def test_what_only_early_layers_look_at_is_not_computed_later() -> None:
    early = mass(150)
    early[LAYERS // 2 :, 150] = 1e-9
    depths = SelectionRule(decay=4.0).depths(OFFSETS, early, LAYERS, 0.15)
    assert 0 < depths[150] <= LAYERS // 2


def test_the_share_falls_with_depth_at_the_rate_given() -> None:
    counts = SelectionRule(decay=5.0).counts(10_000, LAYERS, 0.1)
    assert counts[5] / counts[0] == pytest.approx(np.exp(-1), rel=0.01)
    flat = SelectionRule(decay=np.inf).counts(10_000, LAYERS, 0.1)
    assert set(flat.tolist()) == {1000}


@pytest.mark.parametrize("budget", [-0.1, 1.1, float("nan")])
def test_a_budget_that_is_no_share_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="must be 0 to 1"):
        SelectionRule().depths(OFFSETS, None, LAYERS, budget)


@given(
    budget=st.floats(0, 1),
    seed=st.integers(0, 1000),
    question=st.booleans(),
    decay=st.sampled_from([2.0, 30.0, np.inf]),
)
def test_the_budget_is_kept_and_nearly_spent(
    budget: float, seed: int, question: bool, decay: float
) -> None:
    draw = np.random.default_rng(seed)
    shown = draw.random((LAYERS, len(OFFSETS)), np.float32) if question else None
    depths = SelectionRule(decay=decay).depths(OFFSETS, shown, LAYERS, budget)
    chunk = OFFSETS >= 0
    computed = float(depths[chunk].mean() / LAYERS)
    assert budget - 1 / int(chunk.sum()) - 1e-6 <= computed <= budget + 1e-6

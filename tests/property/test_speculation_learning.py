"""Whatever is tested, chances stay chances, and the guard's bounds hold their mean."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_decode.speculative.planning.draft_guard import ALPHA, ControlDraw, DraftGuard
from headrace_decode.speculative.retrieval.acceptance import (
    AGREEMENTS,
    FAILURE_BUCKETS,
    MATCHES,
    POSITIONS,
    SOURCES,
    WEIGHTS,
    Acceptance,
    acceptance_probability,
    encode_features,
    learn,
    weight_rows,
)

CELLS = st.builds(
    encode_features,
    st.integers(0, SOURCES - 1),
    st.integers(0, MATCHES - 1),
    st.integers(0, AGREEMENTS - 1),
    st.integers(0, FAILURE_BUCKETS - 1),
    st.integers(0, POSITIONS - 1),
)


def test_every_kind_of_token_has_rows_of_its_own() -> None:
    kinds = np.ndindex(SOURCES, MATCHES, AGREEMENTS, FAILURE_BUCKETS, POSITIONS)
    rows = {kind: weight_rows(encode_features(*kind)) for kind in kinds}
    assert len(set(rows.values())) == len(rows)
    assert {row for each in rows.values() for row in each} == set(range(WEIGHTS))


@settings(max_examples=100)
@given(
    st.lists(st.tuples(CELLS, st.booleans(), st.integers(0, 3)), max_size=300),
    st.floats(0.0, 5.0),
)
def test_chances_stay_between_0_and_1(
    tokens: list[tuple[int, bool, int]], temperature: float
) -> None:
    learned = Acceptance()
    effects = [learned.initial_effect(temperature if number % 2 else 0.0) for number in range(4)]
    for cell, right, request in tokens:
        effect = effects[request]
        learn(learned.parameters, effect, cell, right)
        assert 0.0 <= acceptance_probability(learned.parameters, effect, cell) <= 1.0
    for effect in effects:
        learned.on_request_end(effect)
    learned.update_votes()
    for values in (*learned.parameters, learned.population):
        assert np.isfinite(values).all()
    assert learned.parameters.weights[:, 1].min() > 0.0
    assert learned.population[1] > 0.0


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(1e-3, 1 - 1e-3), st.floats(1.0, 17.0),
                  st.floats(1e-6, 1e6), st.floats(1e-4, 10.0)),
        max_size=100,
    )
)  # fmt: skip
def test_whatever_steps_last_the_guard_has_bounds_around_its_mean(
    steps: list[tuple[bool, float, float, float, float]],
) -> None:
    guard = DraftGuard()
    for control, share, tokens, seconds, undrafted_s in steps:
        guard.observe(ControlDraw(control, share), 1.0 if control else tokens, seconds, undrafted_s)
        lower, upper = guard.bounds
        assert math.isfinite(lower)
        assert lower < guard.saved < upper
        assert guard.is_on == (upper >= 0.0)
        assert guard.lost_s >= 0.0


def test_the_bounds_miss_the_mean_no_oftener_than_they_say() -> None:
    """Over 400 steps at once, not at each: 300 runs, in which drafting saves a tenth of a step."""
    missed = 0
    for seed in range(300):
        guard, rng, out = DraftGuard(), np.random.default_rng(seed), False
        for _ in range(400):
            control_draw = ControlDraw(rng.random() < 1 / 8, 1 / 8)
            noise = float(rng.normal(0.0, 0.2))
            if control_draw.is_control:
                guard.observe(control_draw, 1.0, max(1.0 + noise, 0.1), 1.0)
            else:
                guard.observe(control_draw, 1.5 + float(rng.normal(0.0, 0.3)), 1.4 + noise, 1.0)
            lower, upper = guard.bounds
            out |= not lower <= 0.1 <= upper
        missed += out
    assert missed <= 2 * ALPHA * 300

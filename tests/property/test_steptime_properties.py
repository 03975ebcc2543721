"""The step-time model, whatever was observed."""

import json
import warnings
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.step_time import StepTime

COUNT = st.integers(0, 100_000)
ANYTHING = st.floats(allow_nan=True, allow_infinity=True)
TIME = st.one_of(st.floats(1e-4, 100.0), ANYTHING)
STEPS = st.lists(st.tuples(COUNT, st.integers(0, 500), st.integers(0, 200), COUNT, COUNT, TIME),
                 max_size=40)  # fmt: skip
PADDED = st.sampled_from([(), (1, 2, 4, 8, 16, 24, 32)])
GRID = (0, 1, 2, 3, 7, 10, 33, 100, 1000, 10_000, 100_000)


def seen(steps: list[tuple[float, ...]], padded: tuple[int, ...] = ()) -> StepTime:
    model = StepTime(padded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in steps:
            model.observe(*step)
    return model


@settings(max_examples=150)
@given(STEPS, PADDED)
def test_more_work_never_takes_less_time(
    steps: list[tuple[float, ...]], padded: tuple[int, ...]
) -> None:
    model = seen(steps, padded)
    shapes = [(20, 3, 0, 500, 100), (0, 4, 5, 900, 0), (300, 0, 0, 0, 0)]
    for shape in shapes:
        for part in range(5):
            times = [
                model.seconds(*(n if i == part else held for i, held in enumerate(shape)))
                for n in GRID
            ]
            if part == 1 and shape[2]:
                # With drafts, more rows share the context that drafts attend to.
                times = [
                    model.seconds(shape[0], n, shape[2], shape[3] * max(n, 1), shape[4])
                    for n in GRID
                ]
            assert all(np.isfinite(times)) and times[0] > 0
            assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))


@settings(max_examples=100)
@given(STEPS, PADDED)
def test_no_step_breaks_the_fit_and_it_can_always_be_told(
    steps: list[tuple[float, ...]], padded: tuple[int, ...]
) -> None:
    model = seen(steps, padded)
    assert 0 <= model.relative_error < 1e3
    assert model.free_tokens() > 0
    told = StepTime.from_dict(json.loads(json.dumps(model.to_dict())))
    assert told.seconds(100, 3, 2, 1000, 500) == model.seconds(100, 3, 2, 1000, 500)


@settings(max_examples=25)
@given(
    st.floats(1e-3, 0.1), st.floats(1e-5, 0.1), st.floats(0, 2e-4), st.integers(0, 2**16)
)  # fmt: skip
def test_the_law_of_a_machine_is_found(
    base_s: float, token: float, context_token: float, seed: int
) -> None:
    """`token`, `context_token`: what they cost, as shares of a step."""
    rng, model = np.random.default_rng(seed), StepTime()

    def law(rows: int, context: int) -> float:
        return base_s * (1 + token * rows + context_token * context)

    for _ in range(400):
        rows, context = int(rng.integers(1, 65)), int(rng.integers(0, 20_000))
        noise = 1 + 0.03 * rng.standard_normal()
        model.observe(0, rows, 0, context, 0, law(rows, context) * noise)
    for rows, context in ((4, 10_000), (16, 10_000), (60, 15_000)):
        assert abs(model.seconds(0, rows, 0, context) / law(rows, context) - 1) < 0.2

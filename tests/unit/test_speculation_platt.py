"""What is made of promises to requests whose tokens are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from headrace_decode.speculation.platt import PlattScaling

SURVIVAL = np.array([[0.9, 0.45, 0.0], [0.9, 0.45, 0.0]], np.float32)
BOTH, SECOND = np.array([True, True]), np.array([False, True])


def taught(scaling: PlattScaling, drafts: int, seed: int = 0, *, a: float, b: float) -> None:
    """Drafts of one token, promised anything, that come true as `a` and `b` say."""
    rng = np.random.default_rng(seed)
    for _ in range(drafts // 50):
        promised = rng.uniform(0.02, 0.98, (50, 1)).astype(np.float32)
        logits = a + b * np.log(promised / (1 - promised))
        right = (rng.random((50, 1)) < 1 / (1 + np.exp(-logits)))[:, 0].astype(np.int32)
        tested = np.ones(50, np.int32)
        scaling.learn(promised, np.ones(50, bool), tested, right)


def test_promises_are_believed_until_something_came() -> None:
    assert PlattScaling().scaled(SURVIVAL, BOTH) == pytest.approx(SURVIVAL)


def test_what_came_is_learned_within_some_hundred_tokens() -> None:
    scaling = PlattScaling()
    taught(scaling, 1000, a=-0.7, b=0.6)
    assert scaling.line == pytest.approx((-0.7, 0.6), abs=0.2)
    taught(scaling, 3000, a=0.0, b=1.0)
    assert scaling.line == pytest.approx((0.0, 1.0), abs=0.2)


def test_a_token_behind_others_is_scaled_given_that_these_are_right() -> None:
    scaling = PlattScaling()
    taught(scaling, 2000, a=-0.7, b=0.6)
    a, b = scaling.line

    def scaled(chance: float) -> float:
        return float(1 / (1 + np.exp(-a - b * np.log(chance / (1 - chance)))))

    first = scaled(0.9)
    assert scaling.scaled(SURVIVAL, SECOND) == pytest.approx(
        np.array([[0.9, 0.45, 0.0], [first, first * scaled(0.5), 0.0]]), rel=1e-5
    )


def test_greedy_requests_and_untested_tokens_teach_nothing() -> None:
    scaling = PlattScaling()
    three, none = np.array([2, 2], np.int32), np.zeros(2, np.int32)
    scaling.learn(SURVIVAL, np.zeros(2, bool), three, none)
    scaling.learn(SURVIVAL, BOTH, none, none)
    assert scaling.line == (0.0, 1.0)


def test_the_first_wrong_token_is_a_test_and_those_behind_it_are_not() -> None:
    one, same = PlattScaling(), PlattScaling()
    tested, right = np.array([2], np.int32), np.array([1], np.int32)
    one.learn(np.array([[0.9, 0.45, 0.4]], np.float32), BOTH[:1], tested, right)
    same.learn(np.array([[0.9, 0.45, 0.1]], np.float32), BOTH[:1], tested, right)
    assert one.line == same.line != (0.0, 1.0)


def test_no_certainty_and_no_impossibility_breaks_it() -> None:
    scaling = PlattScaling()
    sure = np.array([[1.0, 1.0], [1e-9, 0.0]], np.float32)
    for right in ([0, 1], [2, 0]) * 20:
        scaling.learn(sure, BOTH, np.array([2, 2], np.int32), np.array(right, np.int32))
    found = scaling.scaled(sure, BOTH)
    assert np.isfinite(found).all()
    assert ((found >= 0) & (found <= 1)).all()

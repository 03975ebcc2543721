"""Which budget keeps to a target error."""

from __future__ import annotations

import pytest

from headrace_lab.blending.curve import Curve
from headrace_lab.models.exact import Score


def curve(**kls: float) -> Curve:
    """Of KL by budget in percent."""
    made = Curve()
    made.add((int(name[1:]) / 100, Score(kl, kl, 1.0, 1.0)) for name, kl in kls.items())
    return made


def test_the_budget_lies_between_those_measured() -> None:
    found = curve(b10=0.04, b20=0.01).budget_for(0.02)
    assert found == pytest.approx(0.1 * 2**0.5)


def test_a_measured_error_has_its_own_budget() -> None:
    assert curve(b10=0.04, b20=0.01).budget_for(0.01) == pytest.approx(0.2)


def test_the_least_budget_may_be_more_than_enough() -> None:
    assert curve(b10=0.04, b20=0.01).budget_for(0.5) == 0.1


def test_no_budget_keeps_to_an_error_below_all() -> None:
    assert curve(b10=0.04, b20=0.01).budget_for(0.001) is None
    assert curve(b10=0.04).budget_for(0.0) is None


def test_prompts_count_alike() -> None:
    made = curve(b10=0.04)
    made.add([(0.1, Score(0.02, 0.02, 1.0, 1.0))])
    assert made.kl(0.1) == pytest.approx(0.03)

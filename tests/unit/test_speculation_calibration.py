"""What a drafted token's rate begins at, and what moves it."""

from __future__ import annotations

import numpy as np
import pytest

from headrace_decode.speculation.calibration import (
    AGREEMENTS,
    FADE,
    FIRST_REFRESH,
    KNOWN,
    MATCHES,
    POSITIONS,
    REFRESH,
    Calibration,
    cell_of,
    count,
)
from headrace_decode.speculation.draft import Source

RESPONSE, PROMPT = int(Source.RESPONSE), int(Source.PROMPT)


def rate(calibration: Calibration, *cell: int) -> float:
    return float(calibration.rates[cell_of(*cell)])


def tell(calibration: Calibration, cell: tuple[int, ...], drafts: int, right: bool) -> None:
    """So many drafts of one token, all right or all wrong."""
    cells = np.array([cell_of(*cell)])
    for _ in range(drafts):
        count(calibration.counts, cells, 1, int(right))
        calibration.learned(1)


def test_before_anything_is_known_longer_and_more_agreed_on_is_better() -> None:
    fresh = Calibration()
    by_match = [rate(fresh, RESPONSE, match, 0, 0, 0) for match in range(MATCHES)]
    assert by_match == sorted(by_match)
    assert rate(fresh, RESPONSE, 4, 2, 0, 0) > rate(fresh, RESPONSE, 4, 0, 0, 0)
    assert rate(fresh, RESPONSE, 4, AGREEMENTS - 1, 0, 0) < rate(fresh, RESPONSE, 4, 0, 0, 0)
    assert rate(fresh, RESPONSE, 4, 0, 1, 0) > rate(fresh, RESPONSE, 4, 0, KNOWN - 1, 0)
    assert rate(fresh, RESPONSE, 4, 0, 0, 4) > rate(fresh, RESPONSE, 4, 0, 0, 0)
    assert ((fresh.rates > 0) & (fresh.rates < 1)).all()


def test_the_first_drafts_already_count() -> None:
    calibration = Calibration()
    cell = (RESPONSE, 4, 0, 0, 0)
    before = rate(calibration, *cell)
    tell(calibration, cell, FIRST_REFRESH - 1, right=False)
    assert rate(calibration, *cell) == before
    tell(calibration, cell, 1, right=False)
    assert rate(calibration, *cell) < before / 2


def test_what_many_cells_do_moves_those_beside_them_and_no_other_source() -> None:
    calibration, fresh = Calibration(), Calibration()
    for agreement in range(AGREEMENTS - 1):
        tell(calibration, (RESPONSE, 4, agreement, 0, 0), 64, right=False)
    untried = (4, AGREEMENTS - 1, 0, 0)
    assert rate(calibration, RESPONSE, *untried) < 0.8 * rate(fresh, RESPONSE, *untried)
    assert rate(calibration, PROMPT, *untried) == rate(fresh, PROMPT, *untried)


def test_a_cell_that_was_often_tried_says_what_came() -> None:
    calibration = Calibration()
    cells = np.array([cell_of(RESPONSE, 2, 0, 0, place) for place in range(POSITIONS)])
    random = np.random.default_rng(1)
    for _ in range(8 * REFRESH):
        right = int(np.argmin(np.append(random.random(POSITIONS) < 0.8, False)))
        count(calibration.counts, cells, POSITIONS, right)
        calibration.learned(1)
    assert calibration.rates[cells[:4]] == pytest.approx(0.8, abs=0.06)


def test_counts_fade_once_in_a_while_and_not_at_each_early_look() -> None:
    calibration = Calibration()
    tell(calibration, (RESPONSE, 4, 0, 0, 0), REFRESH - 1, right=True)
    assert calibration.counts.sum() == 2 * (REFRESH - 1)
    tell(calibration, (RESPONSE, 4, 0, 0, 0), 1, right=True)
    assert calibration.counts.sum() == pytest.approx(2 * FADE * REFRESH)


def test_one_that_does_not_learn_keeps_its_prior() -> None:
    calibration, fresh = Calibration(learn=False), Calibration()
    tell(calibration, (RESPONSE, 4, 0, 0, 0), 2 * REFRESH, right=False)
    assert (calibration.rates == fresh.rates).all()

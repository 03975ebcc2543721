"""What chance a draft token is given, and what is learned from those that were tested."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace_decode.speculative.draft_batch import DraftSource
from headrace_decode.speculative.retrieval.acceptance import (
    EFFECT_VARIANCE,
    MATCH_BUCKET,
    WEIGHT_VARIANCE,
    Acceptance,
    acceptance_probability,
    agreement_bucket,
    encode_features,
    failure_bucket,
    learn,
)

LONG = encode_features(int(DraftSource.PROMPT), int(MATCH_BUCKET[20]), 0, 0, 0)
SHORT = encode_features(int(DraftSource.PROMPT), int(MATCH_BUCKET[1]), 0, 0, 0)
REFUSED = encode_features(int(DraftSource.PROMPT), int(MATCH_BUCKET[20]), 0, 3, 0)


def given(learned: Acceptance, cell: int, effect: NDArray[np.float64] | None = None) -> float:
    effect = learned.initial_effect() if effect is None else effect
    return float(acceptance_probability(learned.parameters, effect, cell))


def taught(
    learned: Acceptance, cell: int, right: float, times: int, temperature: float = 0.0,
    requests: int = 1, seed: int = 0,
) -> NDArray[np.float64]:  # fmt: skip
    """So many tokens of each of so many requests; the last one's effect."""
    rng, effect = np.random.default_rng(seed), learned.initial_effect(temperature)
    for _ in range(requests):
        effect = learned.initial_effect(temperature)
        for _ in range(times):
            learn(learned.parameters, effect, cell, bool(rng.random() < right))
        learned.on_request_end(effect)
    return effect


def test_before_anything_was_learned_the_odds_of_a_token_are_the_length_of_its_match() -> None:
    assert given(Acceptance(), SHORT) == 0.5
    assert given(Acceptance(), LONG) == pytest.approx(20 / 21)


@pytest.mark.parametrize("right", [0.05, 0.5, 0.95])
def test_how_often_tokens_of_a_kind_were_right_is_learned(right: float) -> None:
    learned = Acceptance()
    taught(learned, LONG, right, 50, requests=40)
    assert given(learned, LONG) == pytest.approx(right, abs=0.08)


def test_different_features_have_their_own_weights_and_share_the_common_ones() -> None:
    learned = Acceptance()
    for seed in range(20):
        taught(learned, LONG, 0.9, 20, seed=seed)
        taught(learned, REFUSED, 0.1, 20, seed=seed)
    assert given(learned, LONG) > 0.8
    assert given(learned, REFUSED) < 0.2
    assert given(learned, SHORT) > 0.3


def test_a_request_that_is_refused_is_believed_less_and_no_other_as_much_less() -> None:
    learned = Acceptance()
    taught(learned, LONG, 0.9, 20, requests=100)
    before = given(learned, LONG)
    effect = learned.initial_effect()
    for _ in range(8):
        learn(learned.parameters, effect, LONG, False)
    assert given(learned, LONG, effect) < given(learned, LONG) < before


def test_the_spread_of_requests_is_learned_from_those_that_ended() -> None:
    alike, apart = Acceptance(), Acceptance()
    for seed in range(100):
        taught(alike, LONG, 0.5, 50, seed=seed)
        taught(apart, LONG, 0.95 if seed % 2 else 0.05, 50, seed=seed)
    assert apart.population[1] > 2 * alike.population[1]


def test_sampled_requests_get_less_certain_probabilities_than_greedy_ones() -> None:
    learned = Acceptance()
    taught(learned, LONG, 0.95, 20, requests=50)
    assert given(learned, LONG, learned.initial_effect(1.0)) == pytest.approx(given(learned, LONG))
    taught(learned, LONG, 0.6, 20, temperature=1.0, requests=50)
    assert given(learned, LONG, learned.initial_effect(1.0)) == pytest.approx(0.6, abs=0.1)
    assert given(learned, LONG) > 0.8


def test_variances_never_exceed_those_that_they_began_with() -> None:
    learned = Acceptance()
    effect = taught(learned, LONG, 0.5, 5000)
    assert learned.parameters.weights[:, 1].max() <= WEIGHT_VARIANCE
    assert learned.parameters.weights[:, 1].min() > 0.0
    assert 0.0 < effect[1] <= EFFECT_VARIANCE


def test_a_workload_that_changes_is_followed() -> None:
    learned = Acceptance()
    taught(learned, LONG, 0.95, 50, requests=100)
    taught(learned, LONG, 0.1, 50, requests=20)
    assert given(learned, LONG) < 0.3


def test_a_lone_candidates_vote_is_its_odds() -> None:
    learned = Acceptance()
    assert learned.parameters.votes[int(DraftSource.PROMPT), MATCH_BUCKET[20]] == pytest.approx(
        20.0
    )
    taught(learned, LONG, 0.95, 50, requests=20)
    learned.update_votes()
    votes = learned.parameters.votes[int(DraftSource.PROMPT)]
    assert votes[MATCH_BUCKET[20]] > 2.0 * votes[MATCH_BUCKET[1]]


@pytest.mark.parametrize(
    ("candidates", "share", "bucket"),
    [(1, 1.0, 0), (3, 1.0, 1), (4, 1.0, 2), (2, 0.9, 3), (2, 0.5, 4), (9, 0.1, 7)],
)
def test_agreement_is_how_many_and_how_much(candidates: int, share: float, bucket: int) -> None:
    assert agreement_bucket(candidates, share) == bucket


@pytest.mark.parametrize(
    ("refused", "accepted", "known"), [(0, 0, 0), (0, 1, 1), (2, 1, 2), (1, 0, 3), (5, 0, 4)]
)
def test_buckets_of_failure_counts(refused: int, accepted: int, known: int) -> None:
    assert failure_bucket(refused, accepted) == known

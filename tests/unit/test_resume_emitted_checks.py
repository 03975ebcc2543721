"""What a request is told to have said is checked before an engine gets it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.resume.emitted import EmittedChoice, EmittedOutput
from headrace_decode.resume.emitted_checks import check_outputs

VOCABULARY, MAX_TOKENS, CHOICES, LOGPROBS = 100, 6, 2, 1
TOKENS = st.integers(0, VOCABULARY - 1)


def judged(*outputs: EmittedOutput, logprobs: int | None = None) -> None:
    check_outputs(
        outputs, choices=CHOICES, max_tokens=MAX_TOKENS, vocabulary=VOCABULARY, logprobs=logprobs
    )


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), max_size=3), st.booleans())
def test_what_an_engine_can_have_said_passes(groups: list[tuple[int, ...]], ends: bool) -> None:
    outputs = [tuple(EmittedChoice(n, tokens) for n in range(CHOICES)) for tokens in groups]
    last = (EmittedChoice(0, (1,), finish="length"),)
    judged(*outputs, *([last] if ends else []))
    ranked = [
        (EmittedChoice(0, tokens, tuple(((t, -1.0, 2), (5, -0.5, 1)) for t in tokens)),)
        for tokens in groups
    ]
    judged(*ranked, logprobs=LOGPROBS)


@pytest.mark.parametrize(
    ("outputs", "logprobs", "why"),
    [
        ([(EmittedChoice(0, (100,)),)], None, "not in the vocabulary"),
        ([(EmittedChoice(2, (1,)),)], None, "choice 2 of 2"),
        ([(EmittedChoice(1, ()),)], None, "choice 1 has neither tokens nor an end"),
        ([(EmittedChoice(0, (1,) * 7),)], None, "over 6 tokens"),
        (
            [(EmittedChoice(1, (1,) * 4),), (EmittedChoice(1, (1,) * 4, finish="stop"),)],
            None,
            "over 7 tokens",
        ),
        (
            [(EmittedChoice(0, (), finish="stop"),), (EmittedChoice(0, (1,)),)],
            None,
            "after its end",
        ),
        ([(EmittedChoice(0, (1,), (((1, 0.0, 1),),)),)], None, "that the request does not ask for"),
        ([(EmittedChoice(0, (1,)),)], 1, "without their log-probabilities"),
        ([(EmittedChoice(0, (1, 2), (((1, 0.0, 1),),)),)], 1, "1 log-probabilities of 2"),
        ([(EmittedChoice(0, (1,), (((2, 0.0, 1),),)),)], 1, "of another token"),
        ([(EmittedChoice(0, (1,), ((),)),)], 1, "of another token"),
        ([(EmittedChoice(0, (1,), (((1, 0.0, 1),) * 3,)),)], 1, "of another token"),
        ([(EmittedChoice(0, (1,), (((1, 0.0, 1), (100, 0.0, 2)),)),)], 1, "not in the vocabulary"),
    ],
)
def test_what_no_engine_can_have_said_is_refused(
    outputs: list[EmittedOutput], logprobs: int | None, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        judged(*outputs, logprobs=logprobs)

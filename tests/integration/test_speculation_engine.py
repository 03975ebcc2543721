"""Real vLLM engines: greedy answers with drafts of every kind are those without.

100 prompts of text and noise, all handed over at once, up to 64 running, 1 to 40 tokens asked for.
The truth is an engine without drafting. One engine drafts junk, the true answer, nothing, or what
the memory finds; another has so few KV blocks that requests are preempted meanwhile. Among the
requests are some with two samples and some with a grammar.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from tests.support.prompts import TEXT, noise
from tests.support.speculating import Greedy, Run, speculating_runs
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = 100
LENGTHS = [3, 5, 9, 14, 20, 27, 35, 110, 120, 126, 127, 128]
"""Short, since prompts are what takes time; some end where a KV block does, or grow past it. The
longest come first, so that they outgrow a small cache together."""
TIE_NATS = 1e-3
"""A step that verifies drafts has another shape, and float32 sums in another order: two tokens
closer than this may change places (as in `tests/e2e/test_faults.py`)."""
FEW_BLOCKS = 40
"""Of 128 tokens: 40 requests fit until they grow out of their first block."""

_PLENTY = {"draft_tokens": 8, "blocks": None}
ARMS = {
    "truth": {"draft_tokens": 0, "blocks": None, "kind": "", "mode": ""},
    "junk": {**_PLENTY, "kind": "junk", "mode": "static:8"},
    "oracle": {**_PLENTY, "kind": "oracle", "mode": "auto"},
    "memory": {**_PLENTY, "kind": "memory", "mode": "auto"},
    "all that the memory finds": {**_PLENTY, "kind": "memory", "mode": "static:8"},
    "a drafter that raises": {**_PLENTY, "kind": "broken", "mode": "static:8"},
    "preempted": {"draft_tokens": 8, "blocks": FEW_BLOCKS, "kind": "oracle", "mode": "static:8"},
}


def lengths() -> list[int]:
    """Tokens of each prompt."""
    rng = random.Random(5)
    return sorted((rng.choice(LENGTHS) for _ in range(REQUESTS)), reverse=True)


def prompts(text_ids: list[int]) -> list[list[int]]:
    rng = random.Random(4)
    made = []
    for number, length in enumerate(lengths()):
        start = rng.randrange(len(text_ids))
        text = (text_ids * 4)[start : start + length]
        made.append(noise(length, number) if number % 4 == 3 else text)
    # One answer ends at the longest sequence: no step may be left without drafts for that.
    made[10] = (text_ids * 20)[: 1024 - 20]
    return made


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Run]]:
    from transformers import AutoTokenizer

    model = str(tiny_llama())
    text_ids = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"]
    rng = random.Random(7)
    max_tokens = [rng.choice([12, 40] if n >= 110 else [1, 2, 5, 12, 40]) for n in lengths()]
    max_tokens[10] = 40
    done = speculating_runs(model, prompts(text_ids), max_tokens, list(ARMS.values()))
    yield dict(zip(ARMS, done, strict=True))


def wrong_place(answer: Greedy, truth: Greedy) -> str | None:
    """Where an answer leaves the greedy one by more than a tie, or None."""
    if len(answer.tokens) != len(truth.tokens):
        return f"{len(answer.tokens)} tokens instead of {len(truth.tokens)}"
    for place, (token, true) in enumerate(zip(answer.tokens, truth.tokens, strict=True)):
        if token != true:
            top = truth.tops[place]
            behind = top[true] - top.get(token, -math.inf)
            return None if behind <= TIE_NATS else f"token {place} is {behind:.2g} nats behind"
    return None


@pytest.mark.parametrize("arm", list(ARMS)[1:])
def test_drafts_change_no_answer(runs: dict[str, Run], arm: str) -> None:
    truth, answers = runs["truth"].answers, runs[arm].answers
    wrong = {
        number: found
        for number, (answer, true) in enumerate(zip(answers, truth, strict=True))
        if (found := wrong_place(answer, true)) is not None
    }
    assert not wrong
    ties = sum(a.tokens != t.tokens for a, t in zip(answers, truth, strict=True))
    assert ties <= REQUESTS // 50, f"{ties} answers differ by ties"


def test_every_kind_of_draft_was_verified(runs: dict[str, Run]) -> None:
    for arm in ("junk", "oracle", "memory", "all that the memory finds", "preempted"):
        assert runs[arm].report["counts"]["drafted_tokens"] > 100, arm
        assert runs[arm].report["failures"] == 0, arm


def test_true_drafts_are_accepted_and_junk_is_not(runs: dict[str, Run]) -> None:
    def accepted(arm: str, before: str | None) -> float:
        counts = runs[arm].report["counts"]
        start = runs[before].report["counts"] if before else {}
        verified = counts["drafted_tokens"] - start.get("drafted_tokens", 0)
        return float((counts["accepted_tokens"] - start.get("accepted_tokens", 0)) / verified)

    assert accepted("junk", None) < 0.05
    assert accepted("oracle", "junk") > 0.95


def test_requests_were_preempted_while_drafts_were_verified(runs: dict[str, Run]) -> None:
    assert runs["preempted"].preemptions > 0


def test_a_drafter_that_raises_costs_drafts_only(runs: dict[str, Run]) -> None:
    before = runs["all that the memory finds"].report["counts"]["drafted_tokens"]
    report = runs["a drafter that raises"].report
    assert report["failures"] > 0
    assert report["counts"]["drafted_tokens"] == before

"""Hits that a gateway expects of an engine with several KV cache groups are those that vLLM finds,
whatever requests come, go on, end and are displaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cache_groups import BLOCK, FULL, STATE, Followed, Managed, sliding

TEXT = 24 * BLOCK
MODELS: dict[str, tuple[Sequence[Any], int]] = {
    "full attention": ([FULL], 60),
    "a window first": ([sliding(9), FULL], 90),
    "two groups with a window": ([FULL, sliding(14), sliding(14)], 110),
    "two windows": ([sliding(6), FULL, sliding(18)], 110),
    "several groups that keep all": ([FULL, sliding(10), FULL], 130),
    "a window of less than a block": ([sliding(2), FULL], 90),
    "a window of all": ([FULL, sliding(500)], 110),
    "recurrent": ([FULL, STATE], 90),
    "recurrent first": ([STATE, FULL, STATE], 90),
}
WITHOUT_FULL: dict[str, Sequence[Any]] = {
    "a window alone": [sliding(9)],
    "windows alone": [sliding(9), sliding(13)],
    "recurrent alone": [STATE],
    "a window and a state": [sliding(9), STATE],
}

prompts = st.tuples(
    st.integers(0, 2), st.integers(1, TEXT - 1), st.integers(0, TEXT), st.integers(1, TEXT)
)
"""Number of a text, the token at which it leaves the first text, tokens, and tokens of a chunk."""
actions = st.one_of(
    st.tuples(st.just("begin"), prompts),
    st.tuples(st.just("step"), st.integers(0, 7), st.integers(1, 40)),
    st.tuples(st.just("steps"), st.integers(0, 7), st.integers(1, 40)),
    st.tuples(st.just("end"), st.integers(0, 7)),
    st.tuples(st.just("resync")),
)


def tokens_of(text: int, leaves: int, count: int) -> list[int]:
    return [100 + n if n < leaves else 1000 * (text + 1) + n for n in range(max(1, count))]


def run(groups: Sequence[Any], blocks: int, history: list[Any], check: Any) -> None:
    engine, gateway = Managed(groups, blocks), Followed(groups)
    for kind, *rest in history:
        running = list(engine.running.values())
        if kind == "begin":
            text, leaves, count, chunk = rest[0]
            request = engine.begin(tokens_of(text, leaves, count), chunk)
            if request is None and running:
                engine.end(running[0])
        elif kind == "resync":
            gateway.resync()
        elif running:
            one = running[rest[0] % len(running)]
            if kind == "end":
                engine.end(one)
            for _ in range({"step": 1, "steps": 12}.get(kind, 0)):
                if not engine.step(one, rest[1]):
                    engine.end(one)
                    break
        gateway.apply(engine.events())
        for text, leaves, count in ((0, 40, TEXT), (1, 61, TEXT), (2, 3, 50), (0, 88, 89)):
            asked = engine.request(tokens_of(text, leaves, count))
            check(gateway.hit(asked), engine.hit(asked))
        for one in engine.running.values():
            asked = engine.request(list(one.all_token_ids))
            check(gateway.hit(asked), engine.hit(asked))


def equal(expected: int, found: int) -> None:
    assert expected == found


def no_more(expected: int, found: int) -> None:
    assert expected <= found


@pytest.mark.parametrize("model", MODELS)
@given(history=st.lists(actions, max_size=40))
@settings(max_examples=60)
def test_a_gateway_expects_the_hits_of_vllm(model: str, history: list[Any]) -> None:
    groups, blocks = MODELS[model]
    run(groups, blocks, history, equal)


@pytest.mark.parametrize("model", WITHOUT_FULL)
@given(history=st.lists(actions, max_size=40))
@settings(max_examples=60)
def test_without_full_attention_it_expects_no_more(model: str, history: list[Any]) -> None:
    run(WITHOUT_FULL[model], 60, history, no_more)

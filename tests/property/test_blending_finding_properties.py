"""Runs are found wherever they stand, hold equal tokens, and belong to the tenant that asks."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace_prefill.blending.finding.anchors import LEAST, anchors
from headrace_prefill.blending.finding.finder import Finder, Run

pytestmark = pytest.mark.timeout(300)
BLOCK = 16
Text = NDArray[np.int32]


def digests(tenant: str, text: Text) -> list[bytes]:
    chain, found = tenant.encode(), []
    for at in range(0, len(text) - BLOCK + 1, BLOCK):
        chain = hashlib.sha256(chain + text[at : at + BLOCK].tobytes()).digest()
        found.append(chain)
    return found


def text(words: int, alphabet: int, seed: int) -> Text:
    return np.random.default_rng(seed).integers(0, alphabet, words, dtype=np.int32)


class Model:
    """What was added, block by block."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[str, int, Text]] = {}

    def add(self, finder: Finder, tenant: str, tokens: Text) -> None:
        names = digests(tenant, tokens)
        finder.add(tenant, tokens, names)
        for number, name in enumerate(names):
            part = tokens[number * BLOCK : (number + 1) * BLOCK]
            self.blocks[name] = tenant, number, part

    def check(self, tenant: str, prompt: Text, runs: list[Run]) -> NDArray[np.bool_]:
        """All that a run says is so; which positions runs cover."""
        covered, end = np.zeros(len(prompt), bool), 0
        for run in runs:
            assert run.new >= end
            end = run.new + run.length
            stored = [self.blocks[name] for name in run.blocks]
            assert {whose for whose, _, _ in stored} == {tenant}
            numbers = [number for _, number, _ in stored]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert run.old == numbers[0] * BLOCK + run.offset
            assert 0 <= run.offset < BLOCK
            tokens = np.concatenate([part for _, _, part in stored])
            tokens = tokens[run.offset : run.offset + run.length]
            assert (tokens == prompt[run.new : end]).all()
            assert len(run.blocks) == -(-(run.offset + run.length) // BLOCK)
            covered[run.new : end] = True
        return covered


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(LEAST, 400),
    alphabet=st.sampled_from([2, 3, 1000]),
    before=st.integers(0, 300),
    there=st.integers(0, 300),
    seed=st.integers(0, 10_000),
)
def test_a_document_is_found_whole_at_any_place_in_any_prompt(
    length: int, alphabet: int, before: int, there: int, seed: int
) -> None:
    document = text(length, alphabet, seed)
    stored = np.concatenate([text(there, 1000, seed + 1), document, text(BLOCK, 1000, seed + 2)])
    prompt = np.concatenate([text(before, 1000, seed + 3), document, text(50, 1000, seed + 4)])
    finder, model = Finder(10_000, BLOCK), Model()
    model.add(finder, "a", text(500, alphabet, seed + 5))
    model.add(finder, "a", stored)
    covered = model.check("a", prompt, finder.find("a", prompt))
    assert covered[before : before + length].all()
    assert finder.find("b", prompt) == []


@settings(max_examples=100, deadline=None)
@given(
    period=st.integers(1, 40),
    length=st.integers(200, 600),
    before=st.integers(0, 100),
    seed=st.integers(0, 10_000),
)
def test_of_a_text_that_repeats_itself_all_but_its_edges_is_found(
    period: int, length: int, before: int, seed: int
) -> None:
    document = np.resize(text(period, 1000, seed), length)
    stored = np.concatenate([text(30, 1000, seed + 1), document, text(BLOCK, 1000, seed + 2)])
    prompt = np.concatenate([text(before, 1000, seed + 3), document])
    finder, model = Finder(10_000, BLOCK), Model()
    model.add(finder, "a", stored)
    covered = model.check("a", prompt, finder.find("a", prompt, least=1))
    assert covered[before + LEAST : before + length - LEAST].all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_found_is_true_while_prompts_come_and_the_oldest_are_dropped(
    data: st.DataObject,
) -> None:
    finder, model = Finder(40 * BLOCK, BLOCK), Model()
    prompts: list[tuple[str, Text]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        seed = data.draw(st.integers(0, 1000))
        tenant = data.draw(st.sampled_from(["a", "b"]))
        parts = [text(data.draw(st.integers(1, 200)), 2000, seed)]
        mine = [tokens for whose, tokens in prompts if whose == tenant]
        extends = bool(data.draw(st.booleans()))
        if mine and extends:
            base = data.draw(st.sampled_from(mine))
            parts.insert(data.draw(st.integers(0, 1)), base[data.draw(st.integers(0, 50)) :])
        tokens = np.concatenate(parts)
        model.check(tenant, tokens, finder.find(tenant, tokens))
        model.add(finder, tenant, tokens)
        prompts.append((tenant, tokens))
    assert finder.tokens <= 40 * BLOCK
    latest, tokens = prompts[-1]
    model.check(latest, tokens, finder.find(latest, tokens))


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(LEAST, 300),
    alphabet=st.sampled_from([2, 50]),
    seed=st.integers(0, 10_000),
)
def test_equal_runs_share_an_anchor(length: int, alphabet: int, seed: int) -> None:
    run = text(length, alphabet, seed)
    chosen = []
    for other in (1, 2):
        before = text(200, 1000, seed + other)
        ends, hashes = anchors(np.concatenate([before, run, before]), 7)
        inside = (ends >= 200 + 31) & (ends < 200 + length)
        chosen.append(set(zip(ends[inside].tolist(), hashes[inside].tolist(), strict=True)))
    assert chosen[0] & chosen[1]

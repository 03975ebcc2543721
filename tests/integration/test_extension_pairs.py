"""Every two features that one request can combine, on one engine that has them all."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import pytest

from headrace_decode.composition import APART, FEATURES
from tests.support import run
from tests.support.extension_pairs import ANSWER, LOSSY_ANSWER, REGEX, RESUMED
from tests.support.forked import told
from tests.support.program import IN_ONE_PROCESS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

PAIRS = [pair for pair in combinations(FEATURES, 2) if frozenset(pair) not in APART]
LOSSY = {"blending", "sparse", "compression"}
WORDS = re.compile(REGEX.replace("{8,200}", "*") + " ?[a-z]*")
"""What an answer that keeps to the grammar is so far."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    run.engine_started()
    folder = str(tmp_path_factory.mktemp("pairs"))
    answers = told("extension_pairs", folder, {"pairs": PAIRS}, timeout_s=850, **IN_ONE_PROCESS)
    return dict(zip(PAIRS, answers, strict=True))


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_request_can_use_both(found: dict[Any, dict[str, Any]], pair: tuple[str, str]) -> None:
    truth, answer = found[pair]["truth"], found[pair]["answer"]
    tokens, used = answer["tokens"], answer["used"]
    before = RESUMED if "resume" in pair else 0
    whole = LOSSY_ANSWER if {"sparse", "compression"} & set(pair) else ANSWER
    assert len(tokens) == whole - before
    if "grammars" in pair:
        assert WORDS.fullmatch(answer["text"]), answer["text"]
    # A lossy technique chooses again what it skips when a stream is resumed, and rows with drafts
    # attend to everything.
    if not LOSSY & set(pair) or set(pair) <= {"blending", "speculation", "store"}:
        assert tokens == truth["tokens"][before:]
    if "speculation" in pair:
        assert used["drafted"] > 0
    if "compression" in pair:
        assert used["read"] + truth["used"]["read"] > 0, "read again once, then remembered"
    if "sparse" in pair and "offload" not in pair:
        assert used["sparse_rows"] > 0 or "speculation" in pair
    if "blending" in pair and "offload" not in pair:
        assert answer["cached"] > 2000
    assert found[pair]["taken"] == 0, "blocks are held after the end"

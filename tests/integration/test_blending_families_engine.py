"""Rows of families with experts, or whose rotary embedding pairs neighbouring channels, are
recomputed in a real vLLM engine as vLLM itself computes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.blending_engine import ReusingEngine
from tests.support.families import SIZES, VOCABULARY, write_family
from tests.support.prompts import FIRST_TOKEN, noise

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

SAME = 1e-5
"""Largest difference of K and V between batches of other shapes."""
MOVED = 2e-4
"""And between keys that are moved and those that vLLM computes with float32 angles."""
LAYERS = int(SIZES["num_hidden_layers"])


def words(tokens: int, seed: int) -> list[int]:
    ordinary = VOCABULARY - FIRST_TOKEN
    return [FIRST_TOKEN + token % ordinary for token in noise(tokens, seed)]


DOCUMENT, PROMPT = words(700, 1), words(500, 3)


@pytest.fixture(scope="module", params=["ernie4_5", "mixtral", "qwen3_moe"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReusingEngine]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    engine = ReusingEngine(write_family(folder, request.param))
    try:
        engine.do("store", name="document", tokens=DOCUMENT)
        yield engine
    finally:
        engine.end()


@pytest.mark.parametrize("first", [0, 300])
def test_rows_behind_a_prefix_are_what_vllm_computes(engine: ReusingEngine, first: int) -> None:
    found = engine.do("against_vllm", tokens=PROMPT, first=first)
    assert max(found["keys"], found["values"]) < SAME
    assert found["tokens"][0] == found["tokens"][1]


@pytest.mark.parametrize(("first", "length", "new"), [(13, 300, 500), (250, 300, 7)])
def test_a_run_is_placed_wherever_it_stands(
    engine: ReusingEngine, first: int, length: int, new: int
) -> None:
    found = engine.do("placed", name="document", first=first, length=length, new=new)
    assert found["keys"] < MOVED and found["values"] == 0 and found["others"]


def test_all_rows_recomputed_answer_as_plain_vllm_does(engine: ReusingEngine) -> None:
    head, last = words(40, 5), words(25, 7)
    tokens = head + DOCUMENT[100:650] + last
    reuse: dict[str, Any] = {"runs": [["document", 100, 550, 40]], "depth": LAYERS}
    [plain] = engine.do("answers", requests=[{"tokens": tokens}])
    [reused] = engine.do("answers", requests=[{"tokens": tokens, "blending": reuse}])
    assert reused["tokens"] == plain["tokens"] and reused["cached"] == len(tokens) - 1
    reuse |= {"depth": 1, "last": len(tokens) - 9}
    [chosen] = engine.do("answers", requests=[{"tokens": tokens, "blending": reuse}])
    assert chosen["cached"] == len(tokens) - 1 and 0 < chosen["rows"] < reused["rows"]

"""Recomputing chosen rows in a real vLLM engine, against a plain Llama and against vLLM itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from headrace_prefill.blending.token_selection import DRAFT_TOKENS
from tests.support.blending_engine import ReusingEngine
from tests.support.prompts import noise
from tests.support.tiny import LAYERS, tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SAME = 1e-5
"""Largest difference of K and V, which are about 4 at most, between batches of other shapes."""
EXACT = 2e-4
"""And from a plain Llama: vLLM computes the angles of its rotation in float32."""
DOCUMENT, OTHER, PROMPT = noise(700, 1), noise(300, 2), noise(500, 3)


@pytest.fixture(scope="module")
def engine() -> Iterator[ReusingEngine]:
    """The only one of this file; it keeps two documents."""
    engine = ReusingEngine(tiny_llama())
    try:
        engine.do("store", name="document", tokens=DOCUMENT)
        engine.do("store", name="other", tokens=OTHER)
        yield engine
    finally:
        engine.end()


class TestRows:
    @pytest.mark.parametrize("first", [0, 300, 499])
    def test_rows_behind_a_prefix_are_what_vllm_computes(
        self, engine: ReusingEngine, first: int
    ) -> None:
        found = engine.do("against_vllm", tokens=PROMPT, first=first)
        assert max(found["keys"], found["values"]) < SAME
        assert found["tokens"][0] == found["tokens"][1]

    @pytest.mark.parametrize("seed", range(3))
    def test_nested_sets_are_what_a_plain_llama_computes(
        self, engine: ReusingEngine, seed: int
    ) -> None:
        depths = random.Random(seed).choices(range(LAYERS + 1), k=500)
        depths[-1] = LAYERS
        found = engine.do("recompute", tokens=PROMPT, depths=depths, stale=noise(500, 9))
        assert max(found["keys"], found["values"], found["logits"]) < EXACT

    def test_rows_may_be_computed_in_parts(self, engine: ReusingEngine) -> None:
        depths = [*random.Random(4).choices(range(LAYERS + 1), k=499), LAYERS]
        found = engine.do("recompute", tokens=PROMPT, depths=depths, stale=noise(500, 9), parts=7)
        assert max(found["keys"], found["values"], found["logits"]) < EXACT

    def test_prompts_of_one_batch_do_not_see_each_other(self, engine: ReusingEngine) -> None:
        assert engine.do("together", prompts=[PROMPT, OTHER]) < SAME


class TestProbe:
    @pytest.mark.parametrize("parts", [1, 5])
    @pytest.mark.parametrize("missing", [(0, 0), (130, 290), (400, 470)])
    def test_the_last_rows_attention_is_what_a_plain_llama_pays_to_what_has_kv(
        self, engine: ReusingEngine, parts: int, missing: tuple[int, int]
    ) -> None:
        found = engine.do("probe", tokens=PROMPT, last=470, parts=parts, missing=missing)
        assert found["error"] < 1e-6
        assert max(found["keys"], found["values"]) < EXACT

    def test_a_draft_is_what_a_plain_llama_would_answer(self, engine: ReusingEngine) -> None:
        found = engine.do("draft", tokens=PROMPT, last=470, missing=(130, 290))
        assert found["tokens"] == found["wanted"] and len(found["tokens"]) == DRAFT_TOKENS
        assert found["error"] < 1e-6 and found["kept"]

    def test_it_leaves_placed_kv_as_it_was(self, engine: ReusingEngine) -> None:
        found = engine.do("probe", tokens=PROMPT, last=470, parts=2)
        assert found["kept"]


class TestPlacing:
    @pytest.mark.parametrize(
        ("first", "length", "new"),
        [(0, 700, 0), (0, 128, 128), (13, 300, 500), (250, 300, 7), (127, 2, 999 - 2), (5, 1, 0)],
    )
    def test_a_run_is_placed_wherever_it_stands(
        self, engine: ReusingEngine, first: int, length: int, new: int
    ) -> None:
        found = engine.do("placed", name="document", first=first, length=length, new=new)
        assert found["keys"] < EXACT and found["values"] == 0 and found["others"]


def runs_prompt() -> tuple[list[int], list[list[Any]]]:
    """A prompt with both documents in it, and the runs that are in them."""
    head, between, last = noise(40, 5), noise(30, 6), noise(25, 7)
    tokens = head + OTHER[17:290] + between + DOCUMENT[100:650] + last
    second = 40 + 273 + 30
    return tokens, [["other", 17, 273, 40], ["document", 100, 550, second]]


def nested(seed: int) -> tuple[list[int], list[list[Any]], list[int]]:
    """`runs_prompt` but for its last token, and in how many layers each token is computed: many of
    those of runs in none."""
    tokens, runs = runs_prompt()
    depths = random.Random(seed).choices([0, 0, *range(1, LAYERS + 1)], k=len(tokens) - 1)
    at = {p for _, _, length, new in runs for p in range(new, new + length)}
    return tokens[:-1], runs, [d if p in at else LAYERS for p, d in enumerate(depths)]


class TestDrift:
    @pytest.mark.parametrize("seed", range(2))
    def test_tokens_that_are_not_computed_get_the_drift_that_plain_torch_sees(
        self, engine: ReusingEngine, seed: int
    ) -> None:
        tokens, runs, depths = nested(seed)
        found = engine.do("drifted", tokens=tokens, runs=runs, depths=depths, rows=10_000)
        assert max(found["keys"], found["values"]) < EXACT < 0.01 < found["moved"]

    def test_rows_that_come_in_parts_tell_as_much_by_the_end(self, engine: ReusingEngine) -> None:
        tokens, runs, depths = nested(2)
        found = engine.do("drifted", tokens=tokens, runs=runs, depths=depths, rows=100)
        assert max(found["keys"], found["values"]) < found["moved"] / 2


class TestRequests:
    def test_all_rows_recomputed_answer_as_plain_vllm_does(self, engine: ReusingEngine) -> None:
        tokens, runs = runs_prompt()
        reuse = {"runs": runs, "depth": LAYERS}
        plain, reused = (
            engine.do("answers", requests=[{"tokens": tokens}]),
            engine.do("answers", requests=[{"tokens": tokens, "blending": reuse}]),
        )
        assert reused[0]["tokens"] == plain[0]["tokens"]
        assert reused[0]["cached"] == len(tokens) - 1
        assert reused[0]["rows"] == LAYERS * (len(tokens) - 1)

    def test_only_what_no_run_covers_must_be_computed(self, engine: ReusingEngine) -> None:
        tokens, runs = runs_prompt()
        [found] = engine.do(
            "answers", requests=[{"tokens": tokens, "blending": {"runs": runs, "depth": 0}}]
        )
        assert found["rows"] == LAYERS * (40 + 30 + 25 - 1)

    def test_a_probe_computes_the_last_rows_and_a_draft_besides(
        self, engine: ReusingEngine
    ) -> None:
        tokens, runs = runs_prompt()
        reuse = {"runs": runs, "depth": 0, "last": len(tokens) - 9}
        [found] = engine.do("answers", requests=[{"tokens": tokens, "blending": reuse}])
        assert found["rows"] == LAYERS * (40 + 30 + 25 - 1 + 8 + 1 + DRAFT_TOKENS)

    def test_a_step_computes_no_more_rows_than_its_budget(self, engine: ReusingEngine) -> None:
        tokens, runs = runs_prompt()
        reuse = {"runs": runs, "depth": 1, "last": len(tokens) - 25}
        request = {"tokens": tokens, "blending": reuse}
        few, many = (
            engine.do("answers", requests=[request] * 2, rows_per_step=rows) for rows in (16, 256)
        )
        assert few[0]["longest"] <= 16 * LAYERS < many[0]["longest"] <= 256 * LAYERS
        assert few[0]["tokens"] == few[1]["tokens"] == many[0]["tokens"] == many[1]["tokens"]

    def test_exact_requests_beside_it_answer_as_ever(self, engine: ReusingEngine) -> None:
        tokens, runs = runs_prompt()
        exact = [{"tokens": noise(150 + 90 * n, 20 + n)} for n in range(3)]
        alone = engine.do("answers", requests=exact)
        reuse = {"tokens": tokens, "blending": {"runs": runs, "depth": 0}}
        mixed = engine.do("answers", requests=[reuse, *exact, reuse])
        assert [found["tokens"] for found in mixed[1:4]] == [found["tokens"] for found in alone]

    def test_nobody_comes_upon_its_blocks(self, engine: ReusingEngine) -> None:
        tokens, runs = runs_prompt()
        engine.do("answers", requests=[{"tokens": tokens, "blending": {"runs": runs, "depth": 0}}])
        fresh = noise(60, 30) + tokens
        plain = engine.do("answers", requests=[{"tokens": tokens}, {"tokens": fresh}])
        assert plain[1]["cached"] == 0

    def test_an_exact_prefix_and_then_reuse_serve_one_prompt(self, engine: ReusingEngine) -> None:
        tokens, runs = runs_prompt()
        head = noise(256, 31)
        moved = [[name, first, length, new + 256] for name, first, length, new in runs]
        whole = head + tokens
        request = {"tokens": whole, "blending": {"runs": moved, "depth": LAYERS}, "salt": "one"}
        engine.do(
            "answers",
            requests=[
                {
                    **request,
                    "tokens": [*head, 50],
                    "blending": {"runs": [["other", 0, 1, 256]], "depth": 0},
                }
            ],
        )
        [plain] = engine.do("answers", requests=[{"tokens": whole}])
        [found] = engine.do("answers", requests=[request])
        assert found["tokens"] == plain["tokens"]
        assert found["rows"] == LAYERS * (len(tokens) - 1)

    @pytest.mark.parametrize("after", [1, 2, 4])
    def test_an_aborted_request_gives_its_blocks_back(
        self, engine: ReusingEngine, after: int
    ) -> None:
        tokens, runs = runs_prompt()
        requests = [{"tokens": tokens, "blending": {"runs": runs, "depth": LAYERS}}] * 2
        found = engine.do("answers", requests=requests, rows_per_step=32, abort={"0": after})
        [plain] = engine.do("answers", requests=[{"tokens": tokens}])
        assert found[0]["tokens"] is None and found[1]["tokens"] == plain["tokens"]

    def test_more_requests_than_blocks_are_preempted_and_answer(
        self, engine: ReusingEngine
    ) -> None:
        tokens, runs = runs_prompt()
        reusing = [{"tokens": tokens, "blending": {"runs": runs, "depth": LAYERS}}] * 9
        exact = {"tokens": noise(400, 40)}
        plain, alone = (
            engine.do("answers", requests=[each], max_tokens=300)[0]
            for each in ({"tokens": tokens}, exact)
        )
        found = engine.do("answers", requests=[*reusing, exact], max_tokens=300, rows_per_step=256)
        assert found[0]["preemptions"] > 0
        assert [each["tokens"] for each in found] == [plain["tokens"]] * 9 + [alone["tokens"]]

    def test_lost_kv_is_computed(self, engine: ReusingEngine) -> None:
        tokens, runs = runs_prompt()
        [plain] = engine.do("answers", requests=[{"tokens": tokens}])
        engine.do("flip", name="document")
        [found] = engine.do(
            "answers", requests=[{"tokens": tokens, "blending": {"runs": runs, "depth": 0}}]
        )
        engine.do("flip", name="document")
        assert found["tokens"] == plain["tokens"]

    def test_a_rule_that_fails_costs_its_request_the_reuse_and_nobody_else_anything(
        self, engine: ReusingEngine
    ) -> None:
        tokens, runs = runs_prompt()
        [plain] = engine.do("answers", requests=[{"tokens": tokens}])
        good = {"tokens": tokens, "blending": {"runs": runs, "depth": LAYERS}}
        bad = {"tokens": tokens, "blending": {"runs": runs, "depth": None}}
        found = engine.do("answers", requests=[bad, good])
        assert [each["tokens"] for each in found] == [plain["tokens"]] * 2

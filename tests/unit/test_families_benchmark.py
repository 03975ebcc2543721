"""The benchmark of model families: when an answer differs, and when its KV came another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.families.__main__ import faults
from benchmarks.families.cases import (
    BY_NAME,
    CASES,
    CLOSE,
    TIE,
    Answer,
    Hit,
    Lengths,
    compare,
    full,
    half,
    prompts,
    verdict,
    why_another_way,
)
from benchmarks.families.models import FAMILIES
from scripts.generate.support_page import page, render
from tests.support import families as models

F32 = "float32"
TRUTH = Answer([1, 2, 3], [-0.1, -0.2, -0.3], [2.0, TIE[F32] / 2, 1.0])


class TestAnAnswer:
    def test_with_the_same_tokens_is_right(self) -> None:
        same = compare(Answer([1, 2, 3], [-0.1, -0.2001, -0.3]), TRUTH, F32)
        assert (same.differs, same.is_tie) == (False, False)
        assert same.error_nats == pytest.approx(1e-4)

    def test_with_another_token_differs(self) -> None:
        assert compare(Answer([1, 2, 4], [-0.1, -0.2, -0.3]), TRUTH, F32).differs

    def test_that_parts_where_two_tokens_tie_is_a_tie_whatever_follows(self) -> None:
        found = compare(Answer([1, 9, 9], [-0.1, -0.2, -5.0]), TRUTH, F32)
        assert (found.differs, found.is_tie) == (False, True)

    def test_with_another_log_probability_differs(self) -> None:
        off = -0.3 - 2 * CLOSE[F32]
        assert compare(Answer([1, 2, 3], [-0.1, -0.2, off]), TRUTH, F32).differs
        assert not compare(Answer([1, 2, 3], [-0.1, -0.2, off]), TRUTH, "bfloat16").differs

    def test_with_a_log_probability_that_is_no_number_differs(self) -> None:
        assert compare(Answer([1, 2, 3], [-0.1, float("nan"), -0.3]), TRUTH, F32).differs

    @pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 3, 4]])
    def test_of_another_length_differs(self, tokens: list[int]) -> None:
        assert compare(Answer(tokens, [-0.1, -0.2, -0.3, -0.4][: len(tokens)]), TRUTH, F32).differs

    def test_that_was_resumed_has_log_probabilities_for_its_last_tokens_only(self) -> None:
        assert not compare(Answer([1, 2, 3], [-0.3]), TRUTH, F32).differs
        assert compare(Answer([1, 2, 3], [-0.1]), TRUTH, F32).differs


def test_a_verdict_counts_answers() -> None:
    wrong, tied = Answer([7, 2, 3], [-0.1] * 3), Answer([1, 9, 9], [-0.1] * 3)
    found = verdict([TRUTH, wrong, tied], [TRUTH] * 3, F32)
    assert (found["answers"], found["differing"], found["ties"]) == (3, 1, 1)


class TestAWay:
    LENGTHS = (100, 33, 32)
    """Full blocks of 32 tokens that a cache can supply: 3, 1, 0."""

    def why(self, case: str, local: int, external: int, **events: float) -> str | None:
        return why_another_way(BY_NAME[case], self.LENGTHS, 32, Hit(local, external), events)

    def test_leaves_a_token_to_compute(self) -> None:
        assert [full(tokens, 32) for tokens in self.LENGTHS] == [96, 32, 0]
        assert [half(tokens, 32) for tokens in self.LENGTHS] == [32, 0, 0]

    def test_is_cold_if_nothing_was_found(self) -> None:
        assert self.why("cold", 0, 0) is None
        assert self.why("cold", 32, 0) is not None
        assert self.why("cold", 0, 32) is not None

    def test_is_a_store_hit_if_all_full_blocks_were_loaded(self) -> None:
        assert self.why("store hit", 0, 128, loaded_dram=4) is None
        assert self.why("store hit", 0, 0) == "0 tokens came from elsewhere, not 128"
        assert self.why("store hit", 128, 0, loaded_dram=4) is not None
        assert self.why("store hit", 0, 128) == "nothing was counted as loaded_dram"
        assert self.why("store hit", 0, 128, loaded_dram=4, lost_gone=1) is not None

    def test_is_half_and_half_if_each_source_gave_its_half(self) -> None:
        assert self.why("local prefix, store tail", 32, 96, loaded_dram=3) is None
        assert self.why("local prefix, store tail", 0, 128, loaded_dram=4) is not None

    def test_is_a_peer_s_if_its_node_pulled(self) -> None:
        assert self.why("peer", 0, 128, loaded_dram=4, pulled=4) is None
        assert self.why("peer", 0, 128, loaded_dram=4, pulled=0) is not None

    def test_is_a_remote_prefill_with_the_last_tokens_or_without(self) -> None:
        for external in (162, 165):
            assert self.why("remote prefill", 0, external, proved=3) is None
        assert self.why("remote prefill", 0, 128, proved=3) is not None
        assert self.why("remote prefill", 0, 165, proved=2, unproved_reference=1) is not None

    def test_is_a_failed_transfer_if_no_kv_was_believed(self) -> None:
        assert self.why("failed transfer", 0, 0, unproved_reference=3) is None
        assert self.why("failed transfer", 0, 0, unproved_reference=2, proved=1) is not None

    def test_is_no_hit_if_blocks_are_longer_than_prompts(self) -> None:
        found = why_another_way(BY_NAME["local hit"], self.LENGTHS, 512, Hit(), {})
        assert found == "no prompt has a block of 512 tokens"


def test_prompts_are_the_same_each_time_and_of_the_wanted_lengths() -> None:
    lengths = Lengths(40, 200, multiple=16)
    found = prompts(lengths, 50)
    assert found == prompts(lengths, 50)
    assert all(len(prompt) % 16 == 1 and 33 <= len(prompt) <= 201 for prompt in found)
    assert len({tuple(prompt[:8]) for prompt in found}) == 50


def test_each_family_is_a_model_that_can_be_made() -> None:
    assert {family.name for family in FAMILIES} == models.FAMILIES.keys()
    assert len(FAMILIES) >= 10
    for family in FAMILIES:
        config = models.FAMILIES[family.name]()
        assert config.max_position_embeddings >= family.lengths.longest + 64


def test_a_run_is_wrong_if_answers_differ_a_case_fails_or_blocks_leak() -> None:
    right: dict[str, Any] = {"answers": 100, "differing": 0}
    found: dict[str, Any] = {
        "cases": {"cold": right, "peer": {"refused": "no store"}},
        "leaked_blocks": {"prefill": 0, "decode": 0},
    }
    assert faults(found) == []
    found["cases"]["local hit"] = right | {"differing": 3}
    found["cases"]["store hit"] = right | {"error": "it ended"}
    found["leaked_blocks"]["decode"] = 2
    assert len(faults(found)) == 3
    found["plain"] = {"continued": {"differing": 3}}
    assert len(faults(found)) == 2, "as many differ in plain vLLM"


def test_cases_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(CASES)


class TestTheSupportPage:
    """`scripts.generate.support_page` over results as the benchmark writes them."""

    CASE: dict[str, Any] = {"answers": 100, "differing": 0, "ties": 1, "error_nats": 2e-5}

    def document(self, **changes: Any) -> dict[str, Any]:
        cases = {case.name: dict(self.CASE) for case in CASES} | changes.pop("cases", {})
        found = {
            "title": "Llama",
            "layers": "full attention",
            "dtype": F32,
            "limit": "",
            "facts": {
                "unsupported": {"sparse": "the model has a | window"},
                "lora": False,
                "groups": ["full_attention"],
            },
            "cases": cases,
            "leaked_blocks": {"prefill": 0, "decode": 0},
            "date": "2026-11-30",
        }
        return {
            "answer_tokens": 32,
            "environment": {"versions": {"vllm": "0.32.0"}},
            "families": {"llama": found | changes},
        }

    def row(self, **changes: Any) -> dict[str, str]:
        lines = render(self.document(**changes)).splitlines()
        heads = next(line for line in lines if line.startswith("| family | layers |"))
        cells = lines[lines.index(heads) + 2]
        return dict(zip(*(line.strip("| ").split(" | ") for line in (heads, cells)), strict=True))

    def test_says_tested_where_all_cases_are_right(self) -> None:
        row = self.row()
        for name in ("prefill and decode", "store", "tiers", "resume", "drafting"):
            assert row[name] == "tested"

    def test_says_by_construction_where_no_engine_refuses(self) -> None:
        row = self.row()
        assert (row["blending"], row["compression"]) == ("by construction", "by construction")
        assert row["sparse"] == "refused (1)" and row["LoRA"] == "refused (2)"
        assert "| 1 | the model has a \\| window |" in render(self.document())

    def test_says_failing_where_answers_differ_a_case_failed_or_blocks_leak(self) -> None:
        differing = {"peer": self.CASE | {"differing": 1}}
        assert self.row(cases=differing)["tiers"] == "**failing** (1)"
        failed = {"resume after kill": {"error": "it ended"}}
        assert self.row(cases=failed)["resume"] == "**failing** (1)"
        assert self.row(leaked_blocks={"prefill": 0, "decode": 3})["store"] == "**failing** (1)"

    def test_says_why_the_store_or_plain_vllm_is_no_choice(self) -> None:
        refused = {"store hit": {"refused": "states"}, "peer": {"refused": "states"}}
        row = self.row(cases=refused)
        assert (row["store"], row["tiers"]) == ("refused (1)", "refused (1)")
        assert self.row(cases={"drafting": {"plain_error": "no"}})["drafting"] == "plain vLLM (1)"

    def test_is_current(self) -> None:
        written = (Path(__file__).parents[2] / "docs" / "support.md").read_text("utf-8")
        assert written == page(), "run: python -m scripts.generate"

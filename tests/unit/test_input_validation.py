"""Requests that vLLM would take and its engine would not survive."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_decode.grammars.limits import MAX_BYTES, MAX_CHOICES, MAX_COUNT, MAX_NESTING
from headrace_decode.llm.input_validation import LARGEST, why_invalid

VOCABULARY = 100


def params(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "top_k": 0,
        "prompt_logprobs": None,
        "stop_token_ids": [],
        "logit_bias": None,
        "structured_outputs": None,
    }
    return SimpleNamespace(**{**values, **changes})


def grammar(**parts: Any) -> Any:
    fields = ("json", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern")
    values: dict[str, Any] = dict.fromkeys(fields)
    return params(structured_outputs=SimpleNamespace(**{**values, **parts}))


def test_an_ordinary_request_runs() -> None:
    assert why_invalid([0, 5, VOCABULARY - 1], params(top_k=-1), VOCABULARY) is None
    assert why_invalid(None, params(top_k=LARGEST), VOCABULARY) is None
    usual = params(stop_token_ids=[0, 99], logit_bias={1: -100.0, 2: 100.0})
    assert why_invalid([1], usual, VOCABULARY) is None


@pytest.mark.parametrize(
    ("token_ids", "wrong", "field"),
    [
        ([1, VOCABULARY], params(), "prompt"),
        ([1], params(top_k=LARGEST + 1), "top_k"),
        ([1], params(stop_token_ids=[VOCABULARY]), "stop_token_ids"),
        ([1], params(stop_token_ids=[-1]), "stop_token_ids"),
        ([1], params(logit_bias={1: 1e300}), "logit_bias"),
        ([1], params(logit_bias={1: -math.inf}), "logit_bias"),
        ([1], params(logit_bias={1: math.nan}), "logit_bias"),
    ],
)
def test_what_would_end_the_engine_is_refused(token_ids: Any, wrong: Any, field: str) -> None:
    refused = why_invalid(token_ids, wrong, VOCABULARY)
    assert refused is not None
    assert refused[1] == field


@pytest.mark.parametrize(
    "spec",
    [
        {"json": {"type": "array", "minItems": MAX_COUNT + 1}},
        {"json": {"type": "array", "maxItems": 1e9}},
        {"json": {"anyOf": [{"type": "string"}, {"type": "string", "maxLength": 10**9}]}},
        {"json": '{"type": "array", "minItems" : 1e9}'},
        {"regex": "a{1000000}"},
        {"regex": "(ab){3,1000000}"},
        {"grammar": 'root ::= "a"{1,1000000000}'},
        {"structural_tag": '{"schema": {"minLength": 10000000}}'},
        {"json": {"properties": {"enum": {"minItems": MAX_COUNT + 1}}}},
        {"json": {"items": {"pattern": "a{1000000}"}}},
        {"json": {"patternProperties": {"a{1000000}": {}}}},
        {"json": {"$defs": {"default": {"maxLength": 1e9}}}},
        {"structural_tag": '{"format": {"type": "regex", "pattern": "a{1000000}"}}'},
        {"structural_tag": '{"format": {"type": "grammar", "grammar": "root ::= x{1000000}"}}'},
        {"regex": r"\\{1000000}"},
        {"whitespace_pattern": " {1000000}"},
    ],
)
def test_vast_grammars_are_refused(spec: dict[str, Any]) -> None:
    refused = why_invalid([1], grammar(**spec), VOCABULARY)
    assert refused is not None
    assert refused[1] == "structured_outputs"


@pytest.mark.parametrize(
    "spec",
    [
        {"json": {"type": "array", "minItems": MAX_COUNT}},
        {"json": {"type": "integer", "maximum": 9_007_199_254_740_991}},
        {"json": {"enum": [1_700_000_000_000, "maxItems: 10000000"]}},
        {"json": {"enum": ["{1000000", "{1,1000000}"]}},
        {"json": {"properties": {"a": {"description": "at most {1000000} of {0,2000000}"}}}},
        {"json": '{"const": {"maxItems": 10000000}, "title": "{1000000}"}'},
        {"json": {"properties": {"maxItems": {"default": 10_000_000}}}},
        {"json": {"pattern": "\\{1000000"}},
        {"structural_tag": '{"structures": [{"begin": "<f {1000000>", "schema": {}}]}'},
        {"choice": ["{1000000", "{1,1000000}"]},
        {"grammar": 'root ::= "{1000000}" | "\\"{1000000}"'},
        {"regex": "[0-9]{1,999999}"},
        {"regex": "id-12345678"},
    ],
)
def test_grammars_with_large_numbers_that_count_nothing_run(spec: dict[str, Any]) -> None:
    assert why_invalid([1], grammar(**spec), VOCABULARY) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "{" + " " * 1_000_000,
        "{" * 1_000_000,
        "{ 1 , " * 200_000,
        "{" + "1" * 1_000_000 + "x",
        '"minItems"' + " " * 1_000_000,
        '"minItems":' + "1." * 500_000,
        '"minItems" : ' * 80_000,
        "{123456 " * 120_000,
    ],
    ids=lambda text: text[:12],
)
def test_a_grammar_is_read_once_whatever_it_holds(text: str) -> None:
    """Backtracking took minutes for 5,000 spaces; a million are read in milliseconds."""
    why_invalid(None, grammar(regex=text), VOCABULARY)


@pytest.mark.parametrize("regex", ["a{1234567}", "a{ 1234567", "a{1,1234567}", "a{ 12 , 1234567 }"])
def test_a_vast_repetition_is_refused_however_it_is_written(regex: str) -> None:
    assert why_invalid(None, grammar(regex=regex), VOCABULARY) is not None


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ({"json": nested(MAX_NESTING + 1)}, MAX_NESTING),
        ({"json": nested(100_000)}, MAX_NESTING),
        ({"json": {"enum": ["x" * 100] * (MAX_BYTES // 100)}}, MAX_BYTES),
        ({"json": {"properties": {f"k{n}": {} for n in range(MAX_BYTES // 2)}}}, MAX_BYTES),
        ({"json": "x" * (MAX_BYTES + 1)}, MAX_BYTES),
        ({"regex": "x" * (MAX_BYTES + 1)}, MAX_BYTES),
        ({"grammar": "x" * (MAX_BYTES + 1)}, MAX_BYTES),
        ({"choice": ["x"] * (MAX_CHOICES + 1)}, MAX_CHOICES),
        ({"choice": ["x" * MAX_BYTES, "x"]}, MAX_BYTES),
    ],
)
def test_a_grammar_over_a_limit_of_size_is_refused_by_name_of_the_limit(
    spec: dict[str, Any], limit: int
) -> None:
    refused = why_invalid(None, grammar(**spec), VOCABULARY)
    assert refused is not None
    assert str(limit) in refused[0]


@pytest.mark.parametrize(
    "spec",
    [
        {"json": nested(MAX_NESTING)},
        {"choice": ["x"] * MAX_CHOICES},
        {"regex": "x" * (MAX_BYTES - 100)},
    ],
)
def test_a_grammar_at_a_limit_of_size_is_tried(spec: dict[str, Any]) -> None:
    assert why_invalid(None, grammar(**spec), VOCABULARY) is None


@pytest.mark.parametrize("wanted", [0, 5])
def test_prompt_logprobs_are_refused_where_a_prompts_rows_end_early(wanted: int) -> None:
    asked = params(prompt_logprobs=wanted)
    assert why_invalid([1], asked, VOCABULARY) is None
    refused = why_invalid([1], asked, VOCABULARY, all_rows=False)
    assert refused is not None and refused[1] == "prompt_logprobs"
    assert why_invalid([1], params(), VOCABULARY, all_rows=False) is None

"""Keywords of a schema that xgrammar does not enforce are found; guidance enforces or refuses them.

The table is tried with the installed libraries: an instance that breaks its schema must be refused
by the backend that gets the schema.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from transformers import AutoTokenizer
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind
from vllm.v1.structured_output.backend_xgrammar import STRING_SUPPORTED_FORMATS

from headrace_decode.grammars.combined_backend import CombinedBackend
from headrace_decode.grammars.keywords import FORMATS, named, unenforced
from headrace_decode.grammars.trials import GrammarTrials
from headrace_decode.grammars.worker import Compiler
from headrace_engine.extensions.scheduler import ExtensibleScheduler
from tests.support.tiny import VOCABULARY, tiny_llama

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
A_OF = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}

ENFORCED_BY_XGRAMMAR: dict[str, tuple[Any, Any, Any]] = {
    "plain": (A, {}, {"a": 1}),
    "one branch": ({"allOf": [A]}, {}, {"a": 1}),
    "any of": ({"anyOf": [INTEGER, {"type": "null"}], "title": "x"}, "s", 1),
    "reference": ({"$defs": {"p": A}, "$ref": "#/$defs/p"}, {}, {"a": 1}),
    "pydantic's field": (
        {
            "$defs": {"p": {"enum": ["x", "y"], "type": "string", "title": "P"}},
            "properties": {"q": {"$ref": "#/$defs/p", "description": "d"}},
            "required": ["q"],
            "type": "object",
        },
        {"q": "z"},
        {"q": "x"},
    ),
    "lengths": ({"type": ["string", "null"], "minLength": 3}, "ab", "abc"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, "b", "aa"),
    "bounds": ({"type": "integer", "minimum": 5}, 3, 7),
    "items": ({"type": "array", "items": INTEGER, "minItems": 2}, [1], [1, 2]),
    "properties": (
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 2},
        {"a": 1},
        {"a": 1, "b": 2},
    ),
    "properties of any kind": ({"type": "object", "minProperties": 2}, {"a": 1}, {"a": 1, "b": 2}),
    "values": ({"type": ["string", "null"], "enum": ["a", None]}, "b", "a"),
}
ENFORCED_BY_GUIDANCE: dict[str, tuple[Any, Any, Any]] = {
    "allOf": ({"allOf": [A, B]}, {"a": 1}, {"a": 1, "b": 2}),
    "allOf beside": ({**A, "allOf": [{**B}]}, {"a": 1}, {"a": 1, "b": 1}),
    "allOf of one and a bound": ({"allOf": [INTEGER], "minimum": 5}, 1, 7),
    "anyOf beside": ({**A, "anyOf": [{"required": ["b"]}]}, {"a": 1}, {"a": 1, "b": 1}),
    "oneOf": ({"oneOf": [INTEGER, {"type": "string"}]}, True, 1),
    "$ref beside": (
        {"$defs": {"p": A}, "properties": {"x": {"$ref": "#/$defs/p", "required": ["b"]}}}
        | {"type": "object", "required": ["x"]},
        {"x": {"a": 1}},
        {"x": {"a": 1, "b": 1}},
    ),
    "no type": ({"minLength": 3}, "ab", "abc"),
    "pattern and length": (
        {"type": "string", "pattern": "^a+$", "maxLength": 2},
        "aaa",
        "aa",
    ),
    "required that is no property": ({**A, "required": ["a", "b"]}, {"a": 1}, {"a": 1, "b": 1}),
    "values of another type": ({"type": "string", "enum": ["a", 2]}, 2, "a"),
    "a value and a bound": ({"enum": [1, 9], "type": "integer", "maximum": 5}, 9, 1),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, 3, 5),
}
REFUSED: dict[str, tuple[Any, str, str]] = {
    "not": ({**A, "properties": {"a": {"not": INTEGER}}}, "not", "#/properties/a"),
    "if": ({**A, "if": A_OF, "then": {"required": ["b"]}}, "if", "#"),
    "oneOf that overlaps": ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf", "#"),
    "uniqueItems": (
        {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}},
        "uniqueItems",
        "#/properties/a~1b",
    ),
    "contains": ({"type": "array", "items": {"contains": {"const": 7}}}, "contains", "#/items"),
    "dependentRequired": ({**A, "dependentRequired": {"a": ["b"]}}, "dependentRequired", "#"),
    "propertyNames": ({"type": "object", "propertyNames": A}, "propertyNames", "#"),
}


@pytest.fixture(scope="module")
def config() -> Any:
    outputs = SimpleNamespace(
        backend="auto", disable_any_whitespace=False, disable_additional_properties=False
    )
    model = SimpleNamespace(
        get_vocab_size=lambda: VOCABULARY,
        skip_tokenizer_init=False,
        hf_config=SimpleNamespace(model_type="llama"),
    )
    scheduler = SimpleNamespace(get_scheduler_cls=lambda: ExtensibleScheduler)
    return SimpleNamespace(
        structured_outputs_config=outputs,
        model_config=model,
        scheduler_config=scheduler,
        speculative_config=None,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama())


@pytest.fixture(scope="module")
def backend(config: Any, tokenizer: Any) -> CombinedBackend:
    return CombinedBackend(config, tokenizer, VOCABULARY)


def takes(backend: CombinedBackend, tokenizer: Any, schema: Any, instance: Any) -> bool:
    """Whether a grammar of the schema takes the instance as a whole."""
    grammar = backend.compile_grammar(Kind.JSON, json.dumps(schema))
    ids = tokenizer.encode(json.dumps(instance), add_special_tokens=False)
    return bool(grammar.accept_tokens("r", [*ids, tokenizer.eos_token_id]))


@pytest.mark.parametrize("name", ENFORCED_BY_XGRAMMAR)
def test_what_xgrammar_enforces_is_left_to_it(
    backend: CombinedBackend, tokenizer: Any, name: str
) -> None:
    schema, bad, good = ENFORCED_BY_XGRAMMAR[name]
    assert unenforced(schema) == []
    assert takes(backend, tokenizer, schema, good)
    assert not takes(backend, tokenizer, schema, bad)


@pytest.mark.parametrize("name", ENFORCED_BY_GUIDANCE)
def test_what_xgrammar_ignores_is_enforced_by_guidance(
    backend: CombinedBackend, tokenizer: Any, name: str
) -> None:
    schema, bad, good = ENFORCED_BY_GUIDANCE[name]
    assert unenforced(schema)
    assert takes(backend, tokenizer, schema, good)
    assert not takes(backend, tokenizer, schema, bad)


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_enforces_is_named_with_its_place(name: str) -> None:
    schema, keyword, place = REFUSED[name]
    assert (keyword, place) in unenforced(schema)


def test_many_keywords_are_named_in_a_line() -> None:
    text = named([("not", f"#/properties/p{number}") for number in range(9)])
    assert text.startswith('"not" at #/properties/p0, ') and text.endswith("and 4 more")


def test_descriptions_and_values_are_no_schemas() -> None:
    schema = {"const": {"not": 1}, "default": {"if": 2}, "examples": [{"not": 1}], "x-not": {}}
    assert unenforced(schema) == []


def test_odd_schemas_are_left_to_the_compiler() -> None:
    for odd in (True, [], {"properties": []}, {"allOf": {}}, {"required": [1]}, {"type": 7}):
        unenforced(odd)


def test_the_formats_are_those_that_xgrammar_knows() -> None:
    assert FORMATS == STRING_SUPPORTED_FORMATS


def test_one_backend_takes_schemas_and_structural_tags_in_any_order(
    backend: CombinedBackend, tokenizer: Any
) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": A}}
    assert not takes(backend, tokenizer, {"allOf": [A, B]}, {"a": 1})
    grammar = backend.compile_grammar(Kind.STRUCTURAL_TAG, json.dumps(tag))
    mask = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    backend.compile_grammar(Kind.JSON, json.dumps({"allOf": [A, B]})).fill_bitmask(mask, 0)
    assert mask.shape == (1, VOCABULARY // 32)


def test_a_grammar_may_be_in_larks_syntax_or_in_ebnf(
    backend: CombinedBackend, tokenizer: Any
) -> None:
    for text in ('start: "yes" | "no"', 'root ::= "yes" | "no"'):
        for answer, right in (("yes", True), ("maybe", False)):
            grammar = backend.compile_grammar(Kind.GRAMMAR, text)
            ids = tokenizer.encode(answer, add_special_tokens=False)
            assert grammar.accept_tokens("r", [*ids, tokenizer.eos_token_id]) == right


def engine_config() -> Any:
    args = EngineArgs(model=str(tiny_llama()), dtype="float32", enforce_eager=True)
    config = args.create_engine_config()
    config.scheduler_config.scheduler_cls = (
        "headrace_engine.extensions.scheduler.ExtensibleScheduler"
    )
    return config


@pytest.mark.slow
async def test_the_first_schema_for_guidance_is_not_taken_for_a_slow_one() -> None:
    trials = GrammarTrials(cloudpickle.dumps(engine_config()))
    try:
        found = await trials.passed({"json": {"allOf": [A, B]}}, "")
    finally:
        await trials.aclose()
    assert found["backend"] == "guidance"


def test_a_refusal_names_the_keyword_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_decode.grammars.worker.limits.MASK_S", 5.0)
    config = engine_config()
    compiler = Compiler(config)
    for schema, keyword, place in REFUSED.values():
        answer = compiler({"json": schema})
        assert f'"{keyword}" at {place}' in answer["refused"]
    assert compiler({"json": {"allOf": [A, B]}})["backend"] == "guidance"
    assert compiler({"json": A})["backend"] == "xgrammar"
    config.scheduler_config.scheduler_cls = "vllm.v1.core.sched.scheduler.Scheduler"
    assert '"allOf" at #' in Compiler(config)({"json": {"allOf": [A, B]}})["refused"]

"""Requests that vLLM would answer with 500, or whose fields it ignores, are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_decode.apis.request_checks import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PATHS,
    RESPONSES,
    EngineAbilities,
    Refusal,
    fields_of,
    find_refusal,
)

TOOL = {"type": "function", "name": "f", "function": {"name": "f"}}
CUSTOM = {"type": "custom", "name": "f"}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
NO_PARSER = EngineAbilities(why_no_tools="its chat template does not show tools")


def refused(path: str, body: Any, can: EngineAbilities = EngineAbilities()) -> Refusal | None:
    fields = fields_of(json.dumps(body).encode())
    assert fields is not None
    return find_refusal(path, fields, can)


@pytest.mark.parametrize(
    ("path", "body", "param", "named"),
    [
        (RESPONSES, {"input": [{"role": "user"}, {"type": "item_reference"}]}, "input", "[1]"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "input", "computer_call"),
        (RESPONSES, {"input": [{"type": "compaction"}]}, "input", "compaction"),
        (RESPONSES, {"input": [{"type": ["x"]}]}, "input", "['x']"),
        (RESPONSES, {"input": [{"content": "x"}]}, "input", "role"),
        (RESPONSES, {"input": [{"role": "assistant", "content": []}]}, "input", "content"),
        (
            RESPONSES,
            {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
            "input",
            "output_text",
        ),
        (RESPONSES, {"input": "x", "tools": [TOOL, {"type": "web_search"}]}, "tools", "[1]"),
        (RESPONSES, {"tools": [{"type": "local_shell"}]}, "tools", "local_shell"),
        (
            RESPONSES,
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice",
            "allowed_tools",
        ),
        (CHAT, {"guided_json": {}}, "guided_json", "structured_outputs"),
        (COMPLETIONS, {"guided_choice": ["a"]}, "guided_choice", "structured_outputs"),
        (CHAT, {"priority": 5}, "priority", "scheduling_policy"),
        *((path, {"watermarking": True}, "watermarking", "watermark_config") for path in PATHS),
        (COMPLETIONS, {"request_id": "a b"}, "request_id", "letters"),
        (RESPONSES, {"request_id": "x" * 129}, "request_id", "128"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(
    path: str, body: Any, param: str, named: str
) -> None:
    refusal = refused(path, body)
    assert refusal is not None
    assert refusal.param == param
    assert named in refusal.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "x", "tools": [TOOL], "tool_choice": "required"}),
        (RESPONSES, {"input": [{"role": "user", "content": "x"}, SAID]}),
        (RESPONSES, {"input": [{"type": "message", "role": "user", "content": []}]}),
        (RESPONSES, {"input": [{"type": "reasoning"}, {"type": "function_call_output"}]}),
        (RESPONSES, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}),
        (RESPONSES, {"input": {"type": "wrong"}, "tools": "wrong"}),
        (RESPONSES, {"input": [{"type": "custom_tool_call"}, {"type": "custom_tool_call_output"}]}),
        (RESPONSES, {"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "f"}}),
        (CHAT, {"watermarking": False}),
        (CHAT, {"guided_json": None, "priority": 0, "request_id": None}),
        (CHAT, {"request_id": 7, "priority": "x", "tools": [1, 2]}),
        (CHAT, {"tools": [{"type": "web_search"}]}),  # vLLM's own check says so
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}]}),
        (COMPLETIONS, {"prompt": "x", "tools": [TOOL]}),
    ],
)
def test_what_is_served_or_told_by_vllm_passes(path: str, body: Any) -> None:
    assert refused(path, body) is None


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "name": "f"}])
def test_tools_of_a_model_without_a_parser_name_the_setting(path: str, choice: Any) -> None:
    refusal = refused(path, {"tools": [TOOL], "tool_choice": choice}, NO_PARSER)
    assert refusal is not None
    assert "does not show tools" in refusal.message
    assert "decode.engine: {enable_auto_tool_choice: true, tool_call_parser: " in refusal.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"tools": [TOOL], "tool_choice": "none"}),
        (MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "none"}}),
        (RESPONSES, {"tools": []}),
        (CHAT, {"messages": []}),
    ],
)
def test_tools_that_are_not_called_need_no_parser(path: str, body: Any) -> None:
    assert refused(path, body, NO_PARSER) is None


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        (CHAT, {"type": "function", "function": {"name": "f", "strict": True, "parameters": 0}}),
        (RESPONSES, {"type": "function", "name": "f", "strict": True, "parameters": 0}),
        (MESSAGES, {"name": "f", "strict": True, "input_schema": 0}),
    ],
)
def test_a_strict_tool_whose_schema_cannot_be_enforced_is_named(path: str, tool: Any) -> None:
    def with_schema(schema: Any, *, strict: bool) -> Any:
        text = json.dumps(tool).replace(": 0", f": {json.dumps(schema)}")
        return json.loads(text if strict else text.replace('"strict": true', '"strict": false'))

    wrong = {"type": "object", "properties": {"a": {"not": {}}}}
    refusal = refused(path, {"tools": [TOOL, with_schema(wrong, strict=True)]})
    assert refusal is not None and refusal.param == "tools"
    assert "tools[1]" in refusal.message and '"not" at #/properties/a' in refusal.message
    for schema, strict in (({"type": "object"}, True), (wrong, False), (None, True)):
        assert refused(path, {"tools": [with_schema(schema, strict=strict)]}) is None


def added(tool: Any) -> Any:
    """A message's body whose conversation adds a tool."""
    block = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
    said = [{"role": "user", "content": "x"}, {"role": "system", "content": [block]}]
    return {"messages": said}


def test_tools_that_a_conversation_adds_are_checked_as_those_of_the_request() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    strict = {"name": "f", "strict": True, "input_schema": schema}
    refusal = refused(MESSAGES, added(strict))
    assert refusal is not None and refusal.param == "messages"
    assert refusal.message.startswith("messages[1].content[0].tool.definition is strict")
    assert refused(MESSAGES, added({**strict, "strict": False})) is None
    refusal = refused(MESSAGES, added({"name": "f", "input_schema": {}}), NO_PARSER)
    assert refusal is not None and "does not show tools" in refusal.message
    for odd in ({"messages": "tool_addition"}, {"messages": [["tool_addition"]]}, added(7)):
        assert refused(MESSAGES, odd, NO_PARSER) is None, "vLLM says so"


def test_what_the_engine_can_do_passes() -> None:
    assert refused(CHAT, {"priority": 5}, EngineAbilities(priorities=True)) is None
    assert refused(CHAT, {"watermarking": True}, EngineAbilities(watermarks=True)) is None
    assert (
        refused(RESPONSES, {"tools": [{"type": "mcp"}]}, EngineAbilities(tool_server=True)) is None
    )


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"tools": ' + b"[" * 100_000])
def test_a_body_that_is_no_object_is_left_to_vllm(body: bytes) -> None:
    assert fields_of(body) is None

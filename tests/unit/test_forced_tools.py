"""A call that a request forces follows the tool's schema, unless the tool says otherwise."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headrace_decode.apis.forced_tools import with_strict_tools
from headrace_decode.apis.request_checks import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    RequestFields,
    fields_of,
)

NAMED = {"type": "function", "name": "tell"}
FORCED = [
    (CHAT, "required"),
    (CHAT, {"type": "function", "function": {"name": "tell"}}),
    (RESPONSES, "required"),
    (RESPONSES, NAMED),
    (MESSAGES, {"type": "any"}),
    (MESSAGES, {"type": "tool", "name": "tell"}),
]
FREE = [
    (CHAT, "auto"),
    (CHAT, None),
    (CHAT, {"type": "allowed_tools"}),
    (RESPONSES, "none"),
    (MESSAGES, {"type": "auto"}),
    (MESSAGES, "required"),
    (COMPLETIONS, "required"),
]


def tool(path: str, **more: Any) -> dict[str, Any]:
    if path == CHAT:
        return {"type": "function", "function": {"name": "tell", "parameters": {}, **more}}
    return {"type": "function", "name": "tell", **more}


def strict_after(path: str, choice: Any, tools: Any) -> Any:
    body = json.dumps({"tools": tools, "tool_choice": choice, "seed": 7}).encode()
    fields = fields_of(body)
    assert fields is not None
    after = json.loads(with_strict_tools(path, fields, body))
    assert after["seed"] == 7
    found = after["tools"]
    if not isinstance(found, list):
        return found
    return [each.get("function", each).get("strict") for each in found]


@pytest.mark.parametrize(("path", "choice"), FORCED)
def test_tools_that_say_nothing_are_strict(path: str, choice: Any) -> None:
    tools = [tool(path), tool(path, strict=None), tool(path, strict=False), tool(path, strict=True)]
    assert strict_after(path, choice, tools) == [True, True, False, True]


@pytest.mark.parametrize(("path", "choice"), FREE)
def test_where_no_call_is_forced_the_body_is_the_same(path: str, choice: Any) -> None:
    body = json.dumps({"tools": [tool(path)], "tool_choice": choice}).encode()
    fields = fields_of(body)
    assert fields is not None and with_strict_tools(path, fields, body) is body


def test_other_fields_keep_their_bytes_however_strange() -> None:
    strange = b'"x": 1.50e2, "y": ' + b"9" * 400
    body = b'{"tool_choice": "required", "tools": [{"type": "function", "function": {}}], %b}'
    fields = fields_of(body % strange)
    assert fields is not None
    after = with_strict_tools(CHAT, fields, body % strange)
    assert all(part in after for part in (b"1.50e2", b"9" * 400, b'"strict":true'))


def test_depth_is_left_to_vllm() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    body = b'{"tool_choice": "required", "tools": [{"type": "function", "x": %b}]}' % deep
    fields = RequestFields(tool_choice="required", tools=msgspec.Raw(b"[{}]"))
    assert with_strict_tools(CHAT, fields, body) is body


@pytest.mark.parametrize("tools", [None, "x", [], ["x", {}, {"type": "function"}], {"a": 1}])
def test_malformed_tools_are_left_to_vllm(tools: Any) -> None:
    body = json.dumps({"tools": tools, "tool_choice": "required"}).encode()
    fields = fields_of(body)
    assert fields is not None and with_strict_tools(CHAT, fields, body) is body

"""Holds the calls of forced tools to their schemas.

vLLM holds a call to the tool's schema only if the tool says `strict: true`. A model that is made to
call a tool may write any JSON then, and a small one does. So where a request forces a call, a tool
that says nothing about `strict` is strict. Pure: bytes in, bytes out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_decode.apis.request_checks import CHAT, MESSAGES, RESPONSES, RequestFields

_Fields = dict[str, msgspec.Raw]
_decode = msgspec.json.Decoder(_Fields).decode
_decode_tools = msgspec.json.Decoder(list[_Fields]).decode
_STRICT = msgspec.Raw(b"true")


def with_strict_tools(path: str, fields: RequestFields, body: bytes) -> bytes:
    """Return the body with the tools that its model must call made strict, or the body itself. All
    other fields keep their bytes; vLLM reports what is malformed."""
    if path not in (CHAT, RESPONSES, MESSAGES) or not _forces(path, fields.tool_choice):
        return body
    try:
        document, tools = _decode(body), _decode_tools(fields.tools)
        changed = [_made_strict(path, tool) for tool in tools]
    except (msgspec.DecodeError, RecursionError):
        return body
    if not any(changed):
        return body
    return msgspec.json.encode({**document, "tools": tools})


def _forces(path: str, choice: Any) -> bool:
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return kind in (("any", "tool") if path == MESSAGES else ("required", "function"))


def _made_strict(path: str, tool: _Fields) -> bool:
    """Make a tool strict if it is a function that says nothing about it; return whether it was."""
    if path != MESSAGES and bytes(tool.get("type", b"")) != b'"function"':
        return False
    if path == CHAT:
        function = _decode(tool.get("function", b"null"))
        changed = _made_strict(MESSAGES, function)
        tool["function"] = msgspec.Raw(msgspec.json.encode(function))
        return changed
    if bytes(tool.get("strict", b"null")) != b"null":
        return False
    tool["strict"] = _STRICT
    return True

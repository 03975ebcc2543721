"""Holds the calls of forced tools to their schemas.

vLLM holds a call to the tool's schema only if the tool says `strict: true`. A model that is made to
call a tool may write any JSON then, and a small one does. So where a request forces a call, a tool
that says nothing about `strict` is strict. Pure: bytes in, bytes out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_decode.apis.request_checks import CHAT, MESSAGES, RESPONSES, RequestFields


def with_strict_tools(path: str, fields: RequestFields, body: bytes) -> bytes:
    """Return the body with the tools that its model must call made strict, or the body itself."""
    if path not in (CHAT, RESPONSES, MESSAGES) or not _forces(path, fields.tool_choice):
        return body
    document = msgspec.json.decode(body)
    changed = [tool for tool in _functions(path, document.get("tools")) if _is_silent(tool)]
    for tool in changed:
        tool["strict"] = True
    return msgspec.json.encode(document) if changed else body


def _forces(path: str, choice: Any) -> bool:
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return kind in (("any", "tool") if path == MESSAGES else ("required", "function"))


def _functions(path: str, tools: Any) -> list[Any]:
    """Return what may have the field, for each function among the tools."""
    known = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if path == MESSAGES:
        return known
    functions = [tool for tool in known if tool.get("type") == "function"]
    return [tool.get("function") for tool in functions] if path == CHAT else functions


def _is_silent(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("strict") is None

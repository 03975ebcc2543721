"""Refuses requests that vLLM's application would answer with a 500, or whose fields it ignores.

If a field is ignored, the client gets another answer than it asked for, without any notice: a tool
that is never called, a schema that is not enforced, a priority that has no effect. Pure: the caller
sends the refusal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace_decode.grammars.keywords import named, unenforced

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})

REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
GUIDED = {
    "guided_json": "structured_outputs: {json: SCHEMA}, or response_format",
    "guided_regex": "structured_outputs: {regex: PATTERN}",
    "guided_choice": "structured_outputs: {choice: [TEXT, ...]}",
    "guided_grammar": "structured_outputs: {grammar: TEXT}",
}
"""Fields of earlier versions of vLLM, and their replacements (vLLM 0.32 ignores the old fields)."""
ITEM_TYPES = (
    *("message", "function_call", "function_call_output", "reasoning"),
    *("custom_tool_call", "custom_tool_call_output"),
)
"""Types of the items of `input` that vLLM renders."""
TOOL_TYPES = ("function", "namespace", "custom")
"""Tool types of `/v1/responses` that are shown to the model. Others run on OpenAI's servers."""
TEXT_TYPES = ("output_text", "input_text", "text")
"""Types of the parts of an assistant's message that vLLM renders."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a request is answered with 400.

    Attributes:
        message: the reason, in words.
        param: the field that is wrong.
    """

    message: str
    param: str


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """The abilities of an engine and its application.

    Attributes:
        why_no_tools: why tool calls cannot be parsed, in words; None if they can.
        tool_server: whether vLLM runs tools itself (`engine.tool_server`).
        priorities: whether the engine schedules by priority.
        watermarks: whether the engine marks the texts that it writes.
    """

    why_no_tools: str | None = None
    tool_server: bool = False
    priorities: bool = False
    watermarks: bool = False


class RequestFields(msgspec.Struct):
    """The fields of a request that are checked; long ones stay unparsed."""

    request_id: Any = None
    stream: Any = None
    priority: Any = 0
    watermarking: Any = None
    echo: Any = None
    max_tokens: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    input: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    tools: msgspec.Raw = msgspec.Raw(b"null")
    system: msgspec.Raw = msgspec.Raw(b"null")
    cache_control: msgspec.Raw = msgspec.Raw(b"null")
    prompt_cache_retention: Any = None
    tool_choice: Any = None
    guided_json: msgspec.Raw = msgspec.Raw(b"null")
    guided_regex: msgspec.Raw = msgspec.Raw(b"null")
    guided_choice: msgspec.Raw = msgspec.Raw(b"null")
    guided_grammar: msgspec.Raw = msgspec.Raw(b"null")


class _Part(msgspec.Struct):
    type: Any = None


class _Function(msgspec.Struct):
    strict: Any = None
    parameters: Any = None


class _Item(msgspec.Struct):
    """An item of `input`, or a tool of any API."""

    type: Any = None
    role: Any = None
    content: msgspec.Raw = msgspec.Raw(b"null")
    function: _Function | None = None
    strict: Any = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    input_schema: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def strict_schema(self) -> Any:
        """The schema that a strict tool's calls must follow; None for any other tool."""
        if self.function is not None:
            return self.function.parameters if self.function.strict is True else None
        if self.strict is not True:
            return None
        raw = self.parameters if bytes(self.parameters) != b"null" else self.input_schema
        return msgspec.json.decode(raw)


class _ToolChange(msgspec.Struct):
    definition: _Item | None = None


class _Block(msgspec.Struct):
    """A part of a message that may add a tool to those of the request."""

    type: Any = None
    tool: _ToolChange | None = None


class _Message(msgspec.Struct):
    content: list[_Block] | str | None = None


_decode_fields = msgspec.json.Decoder(RequestFields).decode
_decode_items = msgspec.json.Decoder(list[_Item]).decode
_decode_messages = msgspec.json.Decoder(list[_Message]).decode
_decode_parts = msgspec.json.Decoder(list[_Part]).decode


def fields_of(body: bytes) -> RequestFields | None:
    """Return the fields of a body; None if it is not a JSON object, which vLLM reports."""
    try:
        return _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def find_refusal(path: str, fields: RequestFields, abilities: EngineAbilities) -> Refusal | None:
    """Return why a request for one of `PATHS` is refused; None if it is not."""
    for rule in _RULES:
        for refusal in rule(path, fields, abilities):
            return refusal
    return None


def _request_id(path: str, fields: RequestFields, abilities: EngineAbilities) -> Iterator[Refusal]:
    request_id = fields.request_id
    if path == MESSAGES or request_id is None or not isinstance(request_id, str):
        return  # vLLM ignores the field, or reports its wrong type
    if not REQUEST_ID.fullmatch(request_id):
        yield Refusal(
            "request_id must be 1 to 128 letters, digits, '_', '.', ':' or '-'.", "request_id"
        )


def _guided(path: str, fields: RequestFields, abilities: EngineAbilities) -> Iterator[Refusal]:
    if path == MESSAGES:
        return
    for name, instead in GUIDED.items():
        if bytes(getattr(fields, name)) != b"null":
            yield Refusal(f"{name} is no longer a field of this API. Use {instead}.", name)


def _priority(path: str, fields: RequestFields, abilities: EngineAbilities) -> Iterator[Refusal]:
    if path == MESSAGES or abilities.priorities or not isinstance(fields.priority, int):
        return
    if fields.priority != 0:
        yield Refusal(
            "priority has no effect: this app does not schedule by priority. Leave it out, or set "
            "decode.engine: {scheduling_policy: priority}.",
            "priority",
        )


def _watermarking(
    path: str, fields: RequestFields, abilities: EngineAbilities
) -> Iterator[Refusal]:
    if fields.watermarking is True and not abilities.watermarks:
        yield Refusal(
            "watermarking has no effect: this app does not mark its texts. Leave it out, or set "
            "decode.engine: {watermark_config: {...}}.",
            "watermarking",
        )


def _tools(path: str, fields: RequestFields, abilities: EngineAbilities) -> Iterator[Refusal]:
    if path == COMPLETIONS or fields.tool_choice == "none":
        return
    choice = fields.tool_choice.get("type") if isinstance(fields.tool_choice, dict) else None
    if path == MESSAGES and choice == "none":
        return
    tools = {f"tools[{number}]": tool for number, tool in enumerate(_list(fields.tools))}
    if path == MESSAGES:
        tools |= _added_tools(fields.messages)
    if not tools:
        return
    if path == RESPONSES and not abilities.tool_server:
        for name, tool in tools.items():
            if tool.type not in TOOL_TYPES:
                yield Refusal(
                    f"{name} is of type {str(tool.type)[:100]!r}, which only OpenAI's own "
                    "service runs. This app has tools of the types 'function' and 'custom'.",
                    "tools",
                )
        if choice not in (None, "function", "custom"):
            yield Refusal(
                f"tool_choice of type {str(choice)[:100]!r} is not supported. Use 'auto', "
                "'required', 'none' or {type: function, name: NAME}.",
                "tool_choice",
            )
    for name, tool in tools.items():
        if found := unenforced(tool.strict_schema):
            yield Refusal(
                f"{name} is strict, and calls cannot be held to {named(found)} of its "
                "schema. Leave that out, or send strict: false.",
                name.partition("[")[0],
            )
    if abilities.why_no_tools is not None:
        yield Refusal(
            f"This app cannot read tool calls of its model: {abilities.why_no_tools}. Send "
            "tool_choice 'none', or have the operator set decode.engine: "
            "{enable_auto_tool_choice: true, tool_call_parser: NAME}, where NAME is vLLM's parser "
            "for the model, such as hermes.",
            "tools",
        )


def _items(path: str, fields: RequestFields, abilities: EngineAbilities) -> Iterator[Refusal]:
    for number, item in enumerate(_list(fields.input) if path == RESPONSES else ()):
        where = f"input[{number}]"
        if item.type is not None and item.type not in ITEM_TYPES:
            known = ", ".join(ITEM_TYPES)
            yield Refusal(
                f"{where} is of type {str(item.type)[:100]!r}, which this app cannot give to a "
                f"model. Possible are {known}.",
                "input",
            )
        elif item.type in (None, "message") and item.role is None:
            yield Refusal(f"{where} has no role.", "input")
        elif item.role == "assistant" and bytes(item.content)[:1] == b"[":
            parts = _parts(item.content)
            if parts is not None and (not parts or parts[0].type not in TEXT_TYPES):
                yield Refusal(
                    f"{where}.content must begin with a part of type output_text.", "input"
                )


def _list(raw: msgspec.Raw) -> list[_Item]:
    """Return the objects of a list; an empty list for other values, which vLLM reports."""
    try:
        return _decode_items(raw) if bytes(memoryview(raw)[:1]) == b"[" else []
    except (msgspec.DecodeError, RecursionError):
        return []


def _added_tools(raw: msgspec.Raw) -> dict[str, _Item]:
    """Return the tools that messages define, by their place; none for other values, which vLLM
    reports."""
    if b"tool_addition" not in bytes(raw):
        return {}
    try:
        messages = _decode_messages(raw)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return {
        f"messages[{number}].content[{place}].tool.definition": block.tool.definition
        for number, message in enumerate(messages)
        if isinstance(message.content, list)
        for place, block in enumerate(message.content)
        if block.tool is not None and block.tool.definition is not None
    }


def _parts(raw: msgspec.Raw) -> list[_Part] | None:
    try:
        return _decode_parts(raw)
    except msgspec.DecodeError:
        return None


_RULES: tuple[Callable[[str, RequestFields, EngineAbilities], Iterator[Refusal]], ...] = (
    *(_request_id, _guided, _priority, _watermarking, _tools, _items),
)

"""The parts of vLLM's responses API on which conversation state rests, in the same shape.

Each test names the file to mend when an upgrade moves what it pins.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items,
    construct_input_messages,
)

from headrace.gateway.conversations import items
from headrace.gateway.conversations.state_ids import new_response_id

TURN = "platform/headrace/gateway/conversations/turn.py"
ITEMS = "platform/headrace/gateway/conversations/items.py"
TOOLS: list[Any] = [
    {"type": "function", "name": "f", "parameters": {}},
    {"type": "custom", "name": "g"},
]


def made(**parts: Any) -> list[dict[str, Any]]:
    """The items that vLLM makes of an answer, as its clients get them."""
    request = ResponsesRequest(input="x", tools=TOOLS)
    output = build_response_output_items(
        parts.get("reasoning"), parts.get("content"), parts.get("calls"), tools=request.tools
    )
    return [json.loads(item.model_dump_json(by_alias=True)) for item in output]


CALLS = [
    FunctionCall(id="call_1", name="f", arguments='{"a": 1}'),
    FunctionCall(id="call_2", name="g", arguments='{"input": "text"}'),
]


@pytest.mark.parametrize(
    "parts",
    [
        {"content": "Hello."},
        {"reasoning": "Hm.", "content": "Hello."},
        {"reasoning": "Hm.", "calls": CALLS},
        {"content": "I call.", "calls": CALLS},
    ],
)
def test_the_items_of_an_answer_are_input_of_the_next_request(parts: dict[str, Any]) -> None:
    """They are rendered as when a client sends them again, to the same messages."""
    output = made(**parts)
    stored = items.split_items(msgspec.json.encode(output))
    own = items.split_input(b'"And now?"')
    assert own is not None
    body = msgspec.json.encode({"input": items.joined([*stored, *own]), "tools": TOOLS})
    request = ResponsesRequest.model_validate_json(body)
    messages: list[Any] = construct_input_messages(request_input=request.input)
    assert [message["role"] for message in messages] == ["assistant", "user"], f"mend {ITEMS}"
    assert messages[1]["content"] == "And now?"
    said = messages[0]
    assert said.get("content") == parts.get("content")
    assert said.get("reasoning") == parts.get("reasoning")
    names = [call["function"]["name"] for call in said.get("tool_calls") or ()]
    assert names == [call.name for call in parts.get("calls", ())]


def test_a_text_and_the_message_of_it_render_alike() -> None:
    own = items.split_input(b'"Hello."')
    assert own is not None
    listed = ResponsesRequest.model_validate_json(b'{"input": ' + bytes(items.joined(own)) + b"}")
    text = ResponsesRequest.model_validate_json(b'{"input": "Hello."}')
    assert construct_input_messages(request_input=listed.input) == construct_input_messages(
        request_input=text.input
    ), f"mend {ITEMS}"


def test_an_image_renders_alike_alone_and_after_earlier_items() -> None:
    """Its part reaches vLLM's processing of media as a client's own part does."""
    image = {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AAAA"}
    own = msgspec.json.encode([{"role": "user", "content": [image]}])
    alone = ResponsesRequest.model_validate_json(b'{"input": ' + own + b"}")
    earlier = [*items.split_items(own), *items.split_items(msgspec.json.encode(made(content="A")))]
    whole = items.joined([*earlier, b'{"role": "user", "content": "And now?"}'])
    longer = ResponsesRequest.model_validate_json(b'{"input": ' + bytes(whole) + b"}")
    [expected] = construct_input_messages(request_input=alone.input)
    messages: list[Any] = construct_input_messages(request_input=longer.input)
    assert messages[0] == expected, f"mend {ITEMS}"
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]


def test_the_request_id_becomes_the_id_of_the_response() -> None:
    """So the gateway knows it before the answer, and a resumed stream keeps it."""
    given = new_response_id()
    request = ResponsesRequest(input="x", request_id=given, max_output_tokens=1)
    response = ResponsesResponse.from_request(
        request,
        request.to_sampling_params(1),
        model_name="m",
        created_time=1,
        output=[],
        status="completed",
        usage=None,
    )
    assert response.id == given, f"mend {TURN}"
    document = json.loads(response.model_dump_json(by_alias=True))
    assert {"id", "status", "output", "previous_response_id", "background"} <= document.keys()

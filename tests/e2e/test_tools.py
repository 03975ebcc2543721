"""Tools, schemas and usage work with the default settings, on every API and for its own client."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.app import MODEL, App

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("same_replicas")]

QUESTION = "What is the weather in Rome?"
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]
CITIES = ("Rome", "Paris")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
TOOL: Any = {"name": "weather", "input_schema": SCHEMA}


@pytest.fixture
def claude(app: App) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=app.url, api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_response_calls_a_tool_and_gets_its_result(client: openai.OpenAI, choice: Any) -> None:
    answer = client.responses.create(
        model=MODEL, input=QUESTION, tools=[FUNCTION], tool_choice=choice, max_output_tokens=128
    )
    for call in answer.output:
        assert call.type == "function_call"
        assert json.loads(call.arguments)["city"] in CITIES
    call, *more = answer.output
    assert not more or choice == "required", "it may call several times"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(
        model=MODEL,
        input=[*CHAT, call.to_dict(), result],  # type: ignore[list-item]
        tools=[FUNCTION],
        max_output_tokens=16,
    )
    assert again.output


def test_a_tool_that_may_be_called_is_shown_to_the_model(client: openai.OpenAI) -> None:
    def tokens(**more: Any) -> int:
        answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=4, **more)
        assert answer.usage is not None
        return answer.usage.input_tokens

    assert tokens(tools=[FUNCTION]) > tokens() + 30


def test_a_cut_response_ends_its_stream_as_incomplete(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=3) as stream:
        found = list(stream)
    assert found[-1].type == "response.incomplete"
    names = {
        getattr(event, "item_id", None) or event.item.id  # type: ignore[union-attr]
        for event in found
        if hasattr(event, "item_id") or hasattr(event, "item")
    }
    assert names == {item.id for item in found[-1].response.output}
    assert len(names) == 1


def test_anthropics_client_calls_a_tool_and_gets_its_result(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "tools": [TOOL], "max_tokens": 128}
    answer = claude.messages.create(messages=CHAT, tool_choice={"type": "any"}, **asked)
    [call] = answer.content
    assert call.type == "tool_use" and answer.stop_reason == "tool_use"
    assert call.input["city"] in CITIES  # type: ignore[index]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [
        *CHAT,
        {"role": "assistant", "content": [call.to_dict()]},
        {"role": "user", "content": [result]},
    ]
    with claude.messages.stream(messages=messages, **asked) as stream:
        message = stream.get_final_message()
    assert message.id.startswith("msg_") and message.content
    assert "stop_sequence" in message.model_fields_set


def test_anthropics_client_knows_each_error(claude: anthropic.Anthropic) -> None:
    wrong: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str]] = [
        ({"model": "nope"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [{"role": "x", "content": ""}]}, anthropic.BadRequestError, "invalid_"),
    ]
    for more, kind, name in wrong:
        asked: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 1, **more}
        with pytest.raises(kind) as caught:
            claude.messages.create(**asked)
        body: Any = caught.value.body
        assert body["type"] == "error" and body["error"]["type"].startswith(name), body
        assert "ValueError(" not in body["error"]["message"]


def of_chat(app: App, text: str, salt: str) -> tuple[int, int, str]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return usage(app, "/v1/chat/completions", body, salt, "prompt_tokens")


def of_completion(app: App, text: str, salt: str) -> tuple[int, int, str]:
    body = {"prompt": text, "max_tokens": 2}
    tokens, cached, name = usage(app, "/v1/completions", body, salt, "prompt_tokens")
    return tokens, cached, name.removeprefix("cmpl-")


def of_response(app: App, text: str, salt: str) -> tuple[int, int, str]:
    body = {"input": text, "max_output_tokens": 2}
    return usage(app, "/v1/responses", body, salt, "input_tokens")


def of_message(app: App, text: str, salt: str) -> tuple[int, int, str]:
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = app.client.post("/v1/messages", json={"model": MODEL, "cache_salt": salt, **asked})
    told = answer.json()
    used = told["usage"]
    cached = used["cache_read_input_tokens"]
    created = used.get("cache_creation_input_tokens") or 0
    return used["input_tokens"] + cached + created, cached, told["id"]


def usage(app: App, path: str, body: Any, salt: str, name: str) -> tuple[int, int, str]:
    answer = app.client.post(path, json={"model": MODEL, "cache_salt": salt, **body})
    assert answer.status_code == 200, answer.text[:500]
    told = answer.json()
    return told["usage"][name], told["usage"][f"{name}_details"]["cached_tokens"], told["id"]


@pytest.mark.parametrize(
    ("ask", "way"),
    [
        *((of_chat, "local"), (of_chat, "remote"), (of_completion, "remote")),
        *((of_response, "local"), (of_message, "remote")),
    ],
)
def test_cached_tokens_are_those_that_no_engine_computed(
    app: App, ask: Callable[[App, str, str], tuple[int, int, str]], way: str
) -> None:
    text, salt = "One, two, three. " * 64, uuid.uuid4().hex
    with app.policy(way):
        first, second = ask(app, text, salt), ask(app, text, salt)
        plans = [app.plan(name) for _, _, name in (first, second)]
    assert [plan["kind"] for plan in plans] == [way, way]
    tokens, cached, _ = first
    assert tokens > 280 and cached == 0
    assert second[0] == tokens and second[1] >= 256
    for (_, told, _), plan in zip((first, second), plans, strict=True):
        assert plan["measured"]["cached_tokens"] == told


def test_streamed_usage_is_the_same(app: App, client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Four, five, six. " * 64}],
        "max_tokens": 2,
        "extra_body": {"cache_salt": uuid.uuid4().hex},
    }
    told = []
    with app.policy("remote"):
        for _ in range(2):
            stream = client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            used = [chunk.usage for chunk in stream][-1]
            assert used is not None and used.prompt_tokens_details is not None
            told.append(used.prompt_tokens_details.cached_tokens)
    assert told[0] == 0 and told[1] is not None and told[1] >= 256

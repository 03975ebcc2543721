"""Every API of vLLM's for text generation, through the app: responses, messages, tokens, ..."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import openai
import pytest

from tests.support.app import MODEL, App

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("same_replicas")]

QUESTION = "What is the capital of France?"
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]
SHORT: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
MESSAGE: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 16, "temperature": 0}


def post(app: App, path: str, body: dict[str, Any]) -> Any:
    """The JSON answer to a request that must succeed."""
    response = app.client.post(path, json=body)
    assert response.status_code == 200, response.text[:500]
    return response.json()


def events(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """The named events of a stream."""
    found = []
    for event in response.text.strip().split("\n\n"):
        name, _, data = event.partition("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=16
    )
    response = client.responses.create(input=QUESTION, **SHORT)
    assert response.status == "completed"
    assert response.output_text == chat.choices[0].message.content
    assert "Paris" in response.output_text
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_streamed_response_says_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(input=QUESTION, **SHORT)
    stream = list(client.responses.create(input=QUESTION, stream=True, **SHORT))
    kinds = [event.type for event in stream]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert kinds.count("response.output_text.delta") > 3


@pytest.mark.parametrize("way", ["local", "remote"])
def test_a_response_is_planned_like_any_request(app: App, client: openai.OpenAI, way: str) -> None:
    salt = {"cache_salt": uuid.uuid4().hex}
    with app.policy(way):
        response = client.responses.create(input="One, two. " * 60, extra_body=salt, **SHORT)
    assert app.plan(response.id)["kind"] == way


def test_a_message_says_what_a_chat_says(app: App, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=16)
    message = post(app, "/v1/messages", MESSAGE)
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    assert message["stop_reason"] == "end_turn"
    count = post(app, "/v1/messages/count_tokens", {"model": MODEL, "messages": CHAT})
    assert count["input_tokens"] == message["usage"]["input_tokens"]


def test_a_streamed_message_says_the_same(app: App) -> None:
    whole = post(app, "/v1/messages", MESSAGE)
    response = app.client.post("/v1/messages", json={**MESSAGE, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response)
    assert (found[0][0], found[-1][0]) == ("message_start", "message_stop")
    texts = [data["delta"]["text"] for name, data in found if name == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"]


def test_a_text_becomes_tokens_and_a_text_again(app: App) -> None:
    tokens = post(app, "/tokenize", {"model": MODEL, "prompt": QUESTION})
    assert tokens["count"] == len(tokens["tokens"])
    text = post(app, "/detokenize", {"model": MODEL, "tokens": tokens["tokens"]})
    assert text == {"prompt": QUESTION}


def test_a_rendered_prompt_is_what_the_engine_gets(app: App, client: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": CHAT, "max_tokens": 1, "temperature": 0}
    rendered = post(app, "/v1/chat/completions/render", request)
    answered = client.chat.completions.create(**request, extra_body={"return_token_ids": True})
    assert rendered["token_ids"] == answered.prompt_token_ids  # type: ignore[attr-defined]
    assert (
        post(app, "/tokenize", {"model": MODEL, "messages": CHAT})["tokens"]
        == (rendered["token_ids"])
    )
    [completion] = post(app, "/v1/completions/render", {"model": MODEL, "prompt": QUESTION})
    again = post(app, "/detokenize", {"model": MODEL, "tokens": completion["token_ids"]})
    assert again == {"prompt": QUESTION}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {**SHORT, "input": QUESTION}), ("/v1/messages", MESSAGE)],
)
def test_transfer_parameters_of_a_client_name_no_memory(
    app: App, path: str, body: dict[str, Any]
) -> None:
    forged = {
        "do_remote_prefill": True,
        "remote_engine_id": "x",
        "remote_request_id": "x",
        "remote_block_ids": [[0, 1, 2]],
        "remote_host": "192.0.2.1",
        "remote_port": 1,
        "tp_size": 1,
    }
    plain = post(app, path, body)
    asked = post(app, path, {**body, "kv_transfer_params": forged, "ec_transfer_params": forged})
    assert said(asked) == said(plain)


def said(answer: dict[str, Any]) -> str:
    """The text of a response or of a message."""
    block = answer["output"][0]["content"][0] if "output" in answer else answer["content"][0]
    return str(block["text"])


HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {**SHORT, "input": "x", "temperature": 1, "top_k": 2**40}),
    ("/v1/responses", {**SHORT, "input": "x", "logit_bias": {"99999999": 1}}),
    (
        "/v1/responses",
        {
            **SHORT,
            "input": "x",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 10**9,
        },
    ),
    (
        "/v1/responses",
        {**SHORT, "input": "x", "structured_outputs": {"regex": "a{1,9999999}"}},
    ),
    ("/v1/messages", {**MESSAGE, "temperature": 1, "top_k": 2**40}),
    (
        "/v1/messages",
        {
            **MESSAGE,
            "output_config": {
                "format": {"type": "json_schema", "schema": {"type": "array", "minItems": 10**9}}
            },
        },
    ),
    (
        "/generative_scoring",
        {"model": MODEL, "query": [10**9], "items": [[1]], "label_token_ids": [5]},
    ),
    ("/detokenize", {"model": MODEL, "tokens": [2**62]}),
    ("/tokenize", {"messages": CHAT, "chat_template": "{{ 1 }}"}),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": [{"role": "x", "content": ""}]}),
]


@pytest.mark.parametrize(("path", "body"), HOSTILE)
def test_what_an_engine_would_not_survive_is_refused_on_each_way(
    app: App, path: str, body: dict[str, Any]
) -> None:
    response = app.client.post(path, json=body, timeout=20)
    assert response.status_code == 400, response.text[:500]
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/inference/v1/generate",
        "/scale_elastic_ep",
        "/start_profile",
        "/invocations",
        "/sleep",
        "/pause",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
    ],
)
def test_what_is_for_vllms_operator_is_not_found(app: App, path: str) -> None:
    response = app.client.post(path, json={"model": MODEL})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_afterwards_nothing_is_left(app: App) -> None:
    app.wait_idle(limit_s=40)

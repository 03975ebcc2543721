"""Malformed requests to vLLM's own application cost milliseconds and are answered in some KiB."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from headrace_engine.serving.validation import (
    MAX_ERRORS,
    bound_validation,
    failing_fast,
    message_of,
)
from headrace_engine.vllm.openai_app import application_without_engine

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": 1}]}
VALID: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"5": 1.5}}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "n": 2}),
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "tool", "tool_call_id": "1", "content": "x"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        },
    ),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "stop": ["a"]}),
    ("/v1/completions", {"prompt": "a", "logprobs": 2}),
    (RESPONSES, {"input": "hi"}),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "id": "a", "summary": []},
            ]
        },
    ),
    (MESSAGES, {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}),
    ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [1, 2]}),
]
MALFORMED: list[tuple[str, dict[str, Any]]] = [
    *((RESPONSES, {"input": [IMAGE] * count}) for count in (1, 40, 16_000)),
    (RESPONSES, {"input": [{}] * 16_000}),
    (RESPONSES, {"input": [{"role": "user", "content": [{}] * 16_000}]}),
    (RESPONSES, {"input": "x", "tools": [{}] * 16_000}),
    (RESPONSES, {"input": [{"role": "user", "content": "x" * 50_000}, IMAGE]}),
    *((CHAT, {"messages": [{"role": "user", "content": None}] * n}) for n in (1, 40, 16_000)),
    (CHAT, {"messages": [{}], "tools": [{}] * 16_000}),
    (CHAT, {"messages": [], "logit_bias": dict.fromkeys(map(str, range(30_000)), "x")}),
    (CHAT, {"messages": [], "x" * 400_000: 1, "logit_bias": {"y" * 400_000: "x"}}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * 16_000}]}),
    ("/v1/completions", {"prompt": [{}] * 1_000}),
    ("/v1/completions", {"prompt": "x", "stop": [1] * 100_000}),
    (
        MESSAGES,
        {"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "x"}]}] * 16_000},
    ),
    ("/detokenize", {"tokens": ["x"] * 60_000}),
    ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": None}] * 100] * 160}),
]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    made: FastAPI = application_without_engine()
    return made


@pytest.fixture(scope="module")
def bounded() -> FastAPI:
    made: FastAPI = application_without_engine()
    bound_validation(made)
    return made


def validate(app: FastAPI, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What FastAPI finds in a body: a model, or faults."""
    route = next(r for r in app.routes if isinstance(r, APIRoute) and r.path == path)
    (field,) = route.dependant.body_params
    return field.validate(body, {}, loc=("body",))


@pytest.mark.parametrize("path, body", VALID, ids=lambda value: str(value)[:40])
def test_a_valid_body_gives_the_same_request(
    app: FastAPI, bounded: FastAPI, path: str, body: dict[str, Any]
) -> None:
    found = [validate(each, path, {"model": "m", **body}) for each in (app, bounded)]
    before, after = (re.sub(r"[0-9a-f-]{16,}|0x[0-9a-f]+", "", repr(one)) for one in found)
    assert before == after


@pytest.mark.parametrize("number", range(len(MALFORMED)))
async def test_a_malformed_body_is_answered_at_once_and_briefly(
    bounded: FastAPI, number: int
) -> None:
    path, body = MALFORMED[number]
    sent = httpx.Request("POST", "http://x/", json={"model": "m", **body}).content
    transport = httpx.ASGITransport(bounded)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        headers = {"content-type": "application/json"}
        began_s = time.thread_time()
        answer = await client.post(path, content=sent, headers=headers)
        took_s = time.thread_time() - began_s
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 8_000
    error = answer.json()["error"]
    assert error["code"] == 400 and "validation error" in error["message"]
    assert len(error["message"].splitlines()) <= MAX_ERRORS + 1
    assert took_s < 3, "0.1 s and less; half a minute without a bound"


async def test_the_answer_names_the_place_and_the_fault(bounded: FastAPI) -> None:
    transport = httpx.ASGITransport(bounded)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.post(CHAT, json={"messages": [], "n": "many"})
        error = answer.json()["error"]
        assert "n: Input should be a valid integer" in error["message"]
        assert error["param"] == "n"
        answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": 3}]})
        assert "messages.0." in answer.json()["error"]["message"]
        answer = await client.post(CHAT, content=b"{", headers={"content-type": "application/json"})
        assert answer.status_code == 400
        answer = await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
        assert "Unsupported Media Type" in answer.json()["error"]["message"]


def test_faults_are_counted_and_the_first_are_told() -> None:
    faults = [{"loc": ("body", "a", n), "msg": "wrong"} for n in range(30)]
    lines = message_of(faults).splitlines()
    assert lines[:2] == ["30 validation errors, the first 20:", "  a.0: wrong"]
    assert len(lines) == 21
    assert message_of(["only text"]) == "1 validation error:\n  only text"


def test_only_lists_of_a_schema_are_changed() -> None:
    schema = {"type": "list", "items_schema": {"type": "int"}, "metadata": {"type": "list"}}
    assert failing_fast({"type": "model", "cls": dict, "schema": schema}) == {
        "type": "model",
        "cls": dict,
        "schema": {**schema, "fail_fast": True},
    }

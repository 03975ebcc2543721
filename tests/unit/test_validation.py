"""Malformed requests to vLLM's own application cost milliseconds and are answered in some KiB."""

import asyncio
import inspect
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware import Middleware

from headrace_engine.asgi_body import read_body, with_body
from headrace_engine.serving.long_validation import FOUND, SLICE_S, TimeSlicer
from headrace_engine.serving.validation import (
    MAX_ERRORS,
    FailFastAdapter,
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
    return body_field(app, path).validate(body, {}, loc=("body",))


def body_field(app: FastAPI, path: str) -> Any:
    route = next(r for r in app.routes if isinstance(r, APIRoute) and r.path == path)
    (field,) = route.dependant.body_params
    return field


def without_ids(request: Any) -> str:
    return re.sub(r"[0-9a-f-]{16,}|0x[0-9a-f]+", "", repr(request))


@pytest.mark.parametrize("path, body", VALID, ids=lambda value: str(value)[:40])
def test_a_valid_body_gives_the_same_request(
    app: FastAPI, bounded: FastAPI, path: str, body: dict[str, Any]
) -> None:
    found = [validate(each, path, {"model": "m", **body}) for each in (app, bounded)]
    assert without_ids(found[0]) == without_ids(found[1])


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


LONG: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
    (MESSAGES, {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}),
]
"""Bodies whose first list is repeated."""


def repeated(body: dict[str, Any], count: int) -> dict[str, Any]:
    return {"model": "m"} | {
        name: value * count if isinstance(value, list) else value for name, value in body.items()
    }


async def asked(app: Any, path: str, body: dict[str, Any]) -> tuple[httpx.Response, int]:
    """The answer, and how often the event loop turned while it was made."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    turning = asyncio.create_task(turn())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        answer = await client.post(path, json=body)
    turning.cancel()
    return answer, turns


@pytest.mark.parametrize("path, body", LONG)
def test_validation_that_rests_finds_the_same_request(
    app: FastAPI, path: str, body: dict[str, Any]
) -> None:
    resting = FailFastAdapter(body_field(app, path)._type_adapter, lambda item: item)
    found = resting.validate_resting(repeated(body, 50))
    expected, faults = validate(app, path, repeated(body, 50))
    assert not faults
    assert without_ids(found) == without_ids(expected)


@pytest.mark.parametrize("path, body", LONG[:2])
async def test_the_event_loop_turns_while_a_long_body_is_validated(
    app: FastAPI, path: str, body: dict[str, Any]
) -> None:
    made, seen = FastAPI(), list[Any]()

    @made.post(path)
    async def answer_one(request: body_field(app, path).field_info.annotation) -> None:  # type: ignore[valid-type]
        seen.append(request)
        assert not FOUND.get(), "tasks that start here would keep the request"

    bound_validation(made)
    answer, turns = await asked(made, path, repeated(body, 4_000))
    assert answer.status_code == 200, answer.text
    expected, _ = validate(app, path, repeated(body, 4_000))
    assert without_ids(seen[0]) == without_ids(expected)
    assert turns > 10


@pytest.mark.parametrize("before", [True, False])
async def test_other_middleware_sees_a_long_body(app: FastAPI, before: bool) -> None:
    made, seen = FastAPI(), list[bytes | None]()
    path, body = LONG[0]

    class Reader:
        def __init__(self, app: Any) -> None:
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            seen.append(body := await read_body(receive))
            await self._app(*with_body(scope, body or b"", receive), send)

    @made.post(path)
    async def answer_one(request: body_field(app, path).field_info.annotation) -> None:  # type: ignore[valid-type]
        assert len(request.input) == 200  # type: ignore[attr-defined]

    if before:
        made.user_middleware.insert(0, Middleware(Reader))
    bound_validation(made)
    if not before:
        made.user_middleware.insert(0, Middleware(Reader))
    answer, _ = await asked(made, path, repeated(body, 200))
    assert answer.status_code == 200, answer.text
    assert json.loads(seen[0] or b"") == repeated(body, 200)


async def test_a_fault_behind_many_items_is_answered_while_the_event_loop_turns(
    bounded: FastAPI,
) -> None:
    body = {"model": "m", "input": [*LONG[0][1]["input"] * 4_000, {}]}
    answer, turns = await asked(bounded, RESPONSES, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("input")
    assert turns > 10


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"input": ' + b"{" * 200, b"{}" * 200])
async def test_a_long_body_that_is_no_json_is_answered_as_a_short_one(
    bounded: FastAPI, body: bytes
) -> None:
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(bounded), base_url="http://x"
    ) as client:
        answer = await client.post(RESPONSES, content=body, headers=headers)
    assert answer.status_code == 400


def test_threads_work_one_at_a_time_and_in_slices() -> None:
    slicer, working, order = TimeSlicer(), [0], list[int]()

    def piece(name: int) -> None:
        for _ in range(5):
            working[0] += 1
            assert working[0] == 1
            order.append(name)
            time.sleep(2 * SLICE_S)
            working[0] -= 1
            slicer.rest(None)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: slicer.work(lambda: piece(name)), (1, 2)))
    assert sorted(order) == [1] * 5 + [2] * 5
    assert order not in ([1] * 5 + [2] * 5, [2] * 5 + [1] * 5)


def test_outside_of_its_slice_a_thread_does_not_rest() -> None:
    item = object()
    assert TimeSlicer().rest(item) is item


def test_contract_routes_read_their_body_from_the_request_alone(app: FastAPI) -> None:
    """A body that was validated in a thread is replaced by an empty one."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path.startswith("/v1/") and route.body_field:
            assert len(route.dependant.body_params) == 1, route.path
            code = inspect.getsource(route.endpoint)
            assert ".json()" not in code and ".body()" not in code, route.path


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

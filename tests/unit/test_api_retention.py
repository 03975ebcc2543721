"""How long a request asks that its prompt is retained, by the fields of each API."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from headrace_decode.apis.middleware import ApiMiddleware
from headrace_decode.apis.prompt_usage import CachedTokens
from headrace_decode.apis.request_checks import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    EngineAbilities,
    Refusal,
    fields_of,
)
from headrace_decode.apis.retention import RETENTION, requested_s
from headrace_decode.http.internal_port import (
    INTERNAL_HEADER,
    MAX_RETENTION_HEADER,
    InternalPort,
)
from headrace_decode.llm.engine_request import EngineRequest
from headrace_decode.llm.plan_execution import PlanExecution
from headrace_decode.llm.planned_llm import PlannedLLM
from headrace_engine.connector.retention import RequestRetention
from headrace_engine.kv_transfer.handoff import PrefillRequest, PrefillResult
from headrace_prefill.server import PrefillServer
from tests.support.contracts import find
from tests.support.prefill_executor import FakePlan

OPENAI = (CHAT, COMPLETIONS, RESPONSES)


def requested(path: str, body: Any) -> float | Refusal:
    fields = fields_of(json.dumps(body).encode())
    assert fields is not None
    return requested_s(path, fields)


def mark(ttl: Any = None) -> dict[str, Any]:
    ends = {} if ttl is None else {"ttl": ttl}
    return {"cache_control": {"type": "ephemeral", **ends}}


def text(ttl: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": "x", **mark(ttl)}


def said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "first"}, {"role": "user", "content": blocks}]}


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("value", "seconds"), [(None, 0), ("in_memory", 0), ("in-memory", 0), ("24h", 86_400)]
)
def test_openais_field_names_a_day_or_nothing(path: str, value: Any, seconds: float) -> None:
    assert requested(path, {"prompt_cache_retention": value}) == seconds
    assert requested(path, {}) == 0
    assert requested(path, {"messages": said(text("1h"))["messages"]}) == 0, "Anthropic's field"


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("value", ["48h", "", "1h", 24, True, ["24h"], {"ttl": "24h"}])
def test_another_value_of_openais_field_is_refused_by_name(path: str, value: Any) -> None:
    refusal = requested(path, {"prompt_cache_retention": value})
    assert isinstance(refusal, Refusal) and refusal.param == "prompt_cache_retention"
    assert repr(value) in refusal.message and "'24h'" in refusal.message


@pytest.mark.parametrize(
    "body",
    [
        {"system": [text("1h")]},
        {"tools": [{"name": "f", "input_schema": {}}, {"name": "g", **mark("1h")}]},
        said(text("1h")),
        said({"type": "tool_result", "content": [text("1h")]}),
        mark("1h"),
        {"system": [text("5m")], **said(text(), text("1h"), text("5m"))},
    ],
)
def test_anthropics_marks_count_wherever_they_are_and_the_longest_wins(body: Any) -> None:
    assert requested(MESSAGES, body) == 3600


def test_a_mark_without_a_time_is_five_minutes() -> None:
    assert requested(MESSAGES, said(text())) == requested(MESSAGES, mark("5m")) == 300
    more = {"cache_control": {"type": "ephemeral", "ttl": None, "scope": "global"}}
    assert requested(MESSAGES, more) == 300


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"cache_control": None, **said({"type": "text", "text": "x", "cache_control": None})},
        {"system": '"cache_control"', "messages": [{"role": "user", "content": "cache_control"}]},
        said({"type": "tool_use", "input": mark("9h")}),  # a tool's argument of that name
        {"tools": [{"name": "f", "input_schema": {"properties": mark("9h")}}]},
        {"prompt_cache_retention": "24h"},
        {"messages": [5, {"content": 5}, {"content": [5, {"content": mark("9h")}]}]},
        {"system": mark("9h"), "tools": 5},
    ],
)
def test_without_a_mark_nothing_is_asked(body: Any) -> None:
    assert requested(MESSAGES, body) == 0


@pytest.mark.parametrize(
    ("body", "place", "param"),
    [
        (mark("2h"), "cache_control.ttl is '2h'", "cache_control"),
        (mark(3600), "cache_control.ttl is 3600", "cache_control"),
        ({"cache_control": "1h"}, "cache_control is '1h'", "cache_control"),
        ({"system": [text("2h")]}, "system.0.cache_control.ttl is '2h'", "system"),
        (
            {"tools": [{}, {"cache_control": {"type": "persistent"}}]},
            "tools.1.cache_control.type is 'persistent'",
            "tools",
        ),
        (
            said(text(), {"cache_control": {"ttl": "1h"}}),
            "messages.1.content.1.cache_control.type is None",
            "messages",
        ),
        (
            said({"type": "tool_result", "content": [text(["1h"])]}),
            "messages.1.content.0.content.0.cache_control.ttl is ['1h']",
            "messages",
        ),
    ],
)
def test_a_wrong_mark_is_refused_with_its_place(body: Any, place: str, param: str) -> None:
    refusal = requested(MESSAGES, body)
    assert isinstance(refusal, Refusal) and refusal.param == param
    assert refusal.message.startswith(f"{place}. Possible: ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just("1h"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cache_control", "type", "ttl", "content", "x"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)
FIELDS = ("system", "tools", "messages", "cache_control", "prompt_cache_retention")


@given(
    body=st.dictionaries(st.sampled_from(FIELDS), JSON),
    path=st.sampled_from([*OPENAI, MESSAGES]),
)
def test_any_body_is_understood_or_refused(body: Any, path: str) -> None:
    asked = requested(path, body)
    assert isinstance(asked, Refusal) or asked in (0, 300, 3600, 86_400)


@pytest.mark.parametrize("content", [b"[" * 5000 + b"]" * 5000, b'[{"content":' * 900])
def test_a_deep_body_is_left_to_vllm(content: bytes) -> None:
    body = b'{"cache_control": ' + content
    fields = fields_of(body + b"}")
    assert fields is None or requested_s(MESSAGES, fields) is not None


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("openai.chat_completion.protocol:ChatCompletionRequest", {"messages": []}),
        ("openai.completion.protocol:CompletionRequest", {"prompt": "x"}),
        ("openai.responses.protocol:ResponsesRequest", {"input": "x"}),
        ("anthropic.protocol:AnthropicMessagesRequest", {"max_tokens": 1, **said(text("1h"))}),
    ],
)
def test_vllm_accepts_the_fields(model: str, body: Any) -> None:
    own = {"system": [text()], "tools": [{"name": "f", "input_schema": {}, **mark()}], **mark()}
    own = own if "anthropic" in model else {"prompt_cache_retention": "24h"}
    request = find(f"vllm.entrypoints.{model}", "decode/headrace_decode/apis/retention.py")
    assert request.model_validate({"model": "m", **body, **own}).model == "m"


# From the port to the engine


class Application:
    """Keeps for how long the prompt of its request is to be retained."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(RETENTION.get())
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: {}\n\n"})


async def ask(path: str, body: Any, *headers: tuple[bytes, bytes]) -> tuple[int, Any, list[float]]:
    """The status and body of an answer at a replica's port, and what its application has seen."""
    app, sent = Application(), list[Any]()
    layer = ApiMiddleware(app, EngineAbilities(), lambda: False)

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    known = [(INTERNAL_HEADER, b"token"), *headers]
    scope = {"type": "http", "method": "POST", "path": path, "headers": known}
    await InternalPort(layer, "token")(scope, receive, send)
    assert RETENTION.get() == 0
    return sent[0]["status"], b"".join(each["body"] for each in sent[1:]), app.seen


@pytest.mark.parametrize(
    ("allowed", "seconds"),
    [(b"3600", 3600), (b"86400", 86_400), (b"60", 60), (b"0", 0), (b"-1", 0), (b"1e9", 0)],
)
async def test_a_request_gets_what_it_asks_for_within_what_it_may(
    allowed: bytes, seconds: float
) -> None:
    limit = (MAX_RETENTION_HEADER, allowed)
    assert (await ask(CHAT, {"prompt_cache_retention": "24h"}, limit))[2] == [seconds]
    assert (await ask(MESSAGES, said(text()), limit))[2] == [min(300, seconds)]
    assert (await ask(MESSAGES, said(), limit))[2] == [0]


async def test_without_the_gateways_leave_nothing_is_retained() -> None:
    assert (await ask(CHAT, {"prompt_cache_retention": "24h"}))[2] == [0]


async def test_each_api_refuses_in_its_own_form() -> None:
    status, body, seen = await ask(RESPONSES, {"prompt_cache_retention": "48h"})
    error = json.loads(body)["error"]
    assert (status, error["param"], seen) == (400, "prompt_cache_retention", [])
    status, body, seen = await ask(MESSAGES, said(text("2h")))
    document = json.loads(body)
    assert (status, document["type"], seen) == (400, "error", [])
    assert document["error"]["type"] == "invalid_request_error"
    assert "messages.1.content.0.cache_control.ttl" in document["error"]["message"]


async def test_the_engine_gets_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[EngineRequest] = []

    async def planned(self: Any, request: EngineRequest) -> Any:
        given.append(request)
        for output in ():
            yield output

    llm: Any = PlannedLLM.__new__(PlannedLLM)
    monkeypatch.setattr(PlannedLLM, "shutdown", lambda *args, **kwargs: None)
    monkeypatch.setattr(PlannedLLM, "_planned", planned)
    llm.fanout = SimpleNamespace(admit=_nothing)
    for seconds in (0.0, 60.0):
        token = RETENTION.set(seconds)
        try:
            async for _ in llm.generate({}, SamplingParams(), "r", priority=1):
                pass
        finally:
            RETENTION.reset(token)
    without, with_hint = (request.options for request in given)
    assert without == {"priority": 1} and with_hint["priority"] == 1
    assert _seconds(with_hint) == 60


async def test_a_prefill_replica_retains_the_prompt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PrefillRequest] = []

    async def prefill(request: PrefillRequest) -> PrefillResult:
        asked.append(request)
        return PrefillResult({}, 0.0, 0.0, 0, 3)

    parts: Any = SimpleNamespace(turn=None, verification=frozenset())
    execution = PlanExecution(parts, prefill, parts, parts)
    request = EngineRequest({"prompt_token_ids": [1, 2, 3]}, SamplingParams(), "r", {})
    token = RETENTION.set(60.0)
    try:
        work = execution.work(request, parts, parts, CachedTokens(None), None)
    finally:
        RETENTION.reset(token)
    await work.prefill(FakePlan("prefill", replica="x"))
    assert asked[0].retain_s == 60

    started: list[dict[str, Any]] = []

    async def generate(llm: Any, prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
        started.append(options)
        for output in ():
            yield output

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    engine = SimpleNamespace(llm=None)
    server: Any = SimpleNamespace(engine=engine, _blending_of=lambda request: None)
    for each in (asked[0], PrefillRequest("r", b"")):
        await PrefillServer._compute(server, each, [1, 2, 3], None, None)
    assert _seconds(started[0]) == 60
    assert "kv_hints" not in started[1]


class _nothing:
    async def __aenter__(self) -> None: ...
    async def __aexit__(self, *_: object) -> None: ...


def _seconds(options: dict[str, Any]) -> float:
    """What the engine's connector reads."""
    request = SimpleNamespace(kv_hints=options["kv_hints"])
    return RequestRetention(lambda *_: None).seconds(request)

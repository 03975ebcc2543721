"""Answers of vLLM's application reach clients in the shape of the API that they called."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_decode.apis.middleware import ApiMiddleware
from headrace_decode.apis.prompt_usage import USAGE, CachedTokens, PromptUsage
from headrace_decode.apis.request_checks import EngineAbilities

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HEX = "0123456789abcdef0123456789abcdef"
OTHER = "f" * 32


def event(kind: str, **data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"


class Application:
    """Answers as told; keeps what it was asked."""

    def __init__(self, status: int, kind: str, *parts: str, prompts: int = 1) -> None:
        self.status, self.kind, self.parts = status, kind, parts
        self.prompts = prompts
        self.asked: list[tuple[dict[bytes, bytes], bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.asked.append((dict(scope["headers"]), message["body"]))
        usage = USAGE.get()
        for number in range(self.prompts if usage is not None else 0):
            assert usage is not None
            usage.record(usage.begin(), 100 * (number + 1))
        headers = [(b"content-type", self.kind.encode()), (b"content-length", b"7")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for number, part in enumerate(self.parts):
            more = number < len(self.parts) - 1
            await send({"type": "http.response.body", "body": part.encode(), "more_body": more})


async def ask(
    app: Any, path: str, body: Any, *, died: bool = False
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of an answer through the layer."""
    layer = ApiMiddleware(app, EngineAbilities(), lambda: died)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"x-request-id", b"a")]}
    await layer(scope, receive, send)
    assert not sent[-1].get("more_body", False)
    whole = b"".join(one["body"] for one in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), whole


def events_of(body: bytes) -> list[tuple[str, Any]]:
    found = []
    for one in body.decode().split("\n\n")[:-1]:
        name, _, data = one.partition("\ndata: ")
        found.append((name.removeprefix("event: "), json.loads(data)))
    return found


# /v1/responses


def message(name: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}] if text else []
    return {"id": name, "type": "message", "status": status, "content": content}


def stream(status: str, *, output: Any = None) -> list[str]:
    """As vLLM streams an answer of one message."""
    done = message(HEX, "hi", "completed")
    final = output if output is not None else [message(f"msg_{OTHER}", "hi", "completed")]
    response = {"id": f"resp_{HEX}", "status": status, "output": final}
    return [
        event("response.created", response={"id": f"resp_{HEX}", "status": "in_progress"}),
        event("response.output_item.added", item=message(HEX, "", "in_progress")),
        event("response.output_text.delta", item_id=HEX, delta="hi"),
        event("response.output_text.done", item_id=HEX, text="hi"),
        event("response.output_item.done", item=done),
        event("response.completed", response=response),
    ]


async def streamed(*parts: str) -> list[tuple[str, Any]]:
    app = Application(200, "text/event-stream; charset=utf-8", *parts, "")
    _, _, body = await ask(app, RESPONSES, {"input": "x", "stream": True})
    return events_of(body)


async def test_an_item_keeps_its_id_from_its_first_event_to_the_last() -> None:
    found = await streamed(*stream("completed"))
    assert [name for name, _ in found] == [
        "response.created",
        "response.output_item.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.output_item.done",
        "response.completed",
    ]
    item = f"msg_{HEX}"
    assert found[1][1]["item"]["id"] == found[4][1]["item"]["id"] == item
    assert found[2][1]["item_id"] == found[3][1]["item_id"] == item
    assert [one["id"] for one in found[5][1]["response"]["output"]] == [item]
    assert found[5][1]["response"]["id"] == f"resp_{HEX}"


async def test_a_cut_answer_ends_as_incomplete() -> None:
    found = await streamed(*stream("incomplete"))
    name, last = found[-1]
    assert name == last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert found[-2][1]["item"]["status"] == "incomplete"


async def test_a_whole_cut_answer_marks_its_last_item() -> None:
    first, second = message("rs_1", "", "completed"), message("msg_1", "x", "completed")
    body = json.dumps({"status": "incomplete", "output": [first, second]})
    app = Application(200, "application/json", body)
    _, headers, answer = await ask(app, RESPONSES, {"input": "x"})
    assert [item["status"] for item in json.loads(answer)["output"]] == ["completed", "incomplete"]
    assert headers[b"content-length"] == b"%d" % len(answer)


async def test_calls_keep_their_ids_in_the_last_event() -> None:
    call = {"type": "function_call", "id": HEX, "call_id": "call_1", "arguments": ""}
    done = {**call, "arguments": "{}", "status": "completed"}
    final = {**done, "id": f"fc_{OTHER}", "call_id": "call_2"}
    found = await streamed(
        event("response.output_item.added", item=call),
        event("response.function_call_arguments.delta", item_id=HEX, delta="{}"),
        event("response.output_item.done", item=done),
        event("response.completed", response={"status": "completed", "output": [final]}),
    )
    [item] = found[-1][1]["response"]["output"]
    assert (item["id"], item["call_id"]) == (f"fc_{HEX}", "call_1")
    assert found[1][1]["item_id"] == f"fc_{HEX}"


async def test_the_last_event_has_the_items_that_came() -> None:
    found = await streamed(*stream("completed", output=[]))
    assert found[-1][1]["response"]["output"] == [message(f"msg_{HEX}", "hi", "completed")]


async def test_an_items_end_is_sent_also_where_nothing_follows() -> None:
    assert [name for name, _ in await streamed(*stream("completed")[:-1])][-1] == (
        "response.output_item.done"
    )


async def test_events_may_come_in_any_pieces() -> None:
    whole = "".join(stream("incomplete"))
    pieces = [whole[at : at + 17] for at in range(0, len(whole), 17)]
    assert await streamed(*pieces) == await streamed(*stream("incomplete"))


# /v1/messages


async def test_a_message_has_anthropics_fields() -> None:
    body = json.dumps({"id": "chatcmpl-7", "content": [], "stop_reason": "end_turn"})
    _, _, answer = await ask(Application(200, "application/json", body), MESSAGES, {})
    assert json.loads(answer) == {
        "id": "msg_7",
        "content": [],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }


async def test_a_streamed_message_has_anthropics_fields() -> None:
    app = Application(
        *(200, "text/event-stream"),
        event("message_start", message={"id": "chatcmpl-7", "content": []}),
        event("content_block_delta", delta={"type": "text_delta", "text": "chatcmpl-7"}),
        event("message_delta", delta={"stop_reason": "max_tokens"}),
        event("error", error={"type": "internal_error", "message": "no"}),
        "",
    )
    _, _, body = await ask(app, MESSAGES, {"stream": True})
    found = events_of(body)
    assert found[0][1]["message"]["id"] == "msg_7"
    assert found[0][1]["message"]["stop_sequence"] is None
    assert found[1][1]["delta"]["text"] == "chatcmpl-7"
    assert found[2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[3][1]["error"] == {"type": "api_error", "message": "no"}


@pytest.mark.parametrize("path", [MESSAGES, MESSAGES + "/count_tokens"])
@pytest.mark.parametrize(
    ("status", "told", "kind"),
    [
        (400, {"error": {"message": "bad", "type": "BadRequestError"}}, "invalid_request_error"),
        (404, {"type": "error", "error": {"type": "NotFoundError", "message": "bad"}}, "not_found"),
        (422, {"error": {"message": "bad"}}, "invalid_request_error"),
        (500, {"error": {"message": "bad"}}, "api_error"),
        (503, {"error": {"message": "bad"}}, "overloaded_error"),
    ],
)
async def test_every_error_has_anthropics_shape(
    path: str, status: int, told: Any, kind: str
) -> None:
    app = Application(status, "application/json", json.dumps(told))
    got, _, body = await ask(app, path, {"model": "m"})
    document = json.loads(body)
    assert (got, document["type"], document["error"]["message"]) == (status, "error", "bad")
    assert document["error"]["type"].startswith(kind)


async def test_an_error_of_anthropics_holds_no_pythons_notation() -> None:
    told = (
        "2 validation errors:\n  {'type': 'value_error', 'loc': ('body', 'max_tokens'), 'msg': "
        "'Value error, max_tokens must be positive', 'input': 0, 'ctx': {'error': ValueError('x')}}"
        "\n  {'type': 'missing', 'loc': ('body', 'messages', 0, 'role'), 'msg': \"isn't there\"}"
    )
    app = Application(400, "application/json", json.dumps({"error": {"message": told}}))
    error = json.loads((await ask(app, MESSAGES, {}))[2])["error"]
    assert error["message"] == (
        "max_tokens: max_tokens must be positive; messages.0.role: isn't there"
    )


# Errors and requests


async def test_what_no_prompt_came_of_is_the_requests_fault() -> None:
    told = json.dumps({"error": {"message": "'role'", "code": 500}})
    app = Application(500, "application/json", told, prompts=0)
    status, _, body = await ask(app, CHAT, {})
    assert (status, json.loads(body)["error"]["code"]) == (400, 400)
    assert "'role'" in json.loads(body)["error"]["message"]
    assert (await ask(app, CHAT, {}, died=True))[0] == 500, "the engine is to blame"
    app.prompts = 1
    assert (await ask(app, CHAT, {}))[0] == 500


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_bodys_request_id_names_the_answer(path: str) -> None:
    app = Application(200, "application/json", "{}")
    await ask(app, path, {"request_id": "mine"})
    await ask(app, path, {})
    assert [headers[b"x-request-id"] for headers, _ in app.asked] == [b"mine", b"a"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_refusal_of_the_engines_is_no_stream(path: str) -> None:
    class Refusing(Application):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            usage = USAGE.get()
            assert usage is not None
            usage.refusal = "no such grammar", "structured_outputs"
            await super().__call__(scope, receive, send)
            if path == RESPONSES:
                raise ValueError("as vLLM's generator does")

    early = [event("response.created", response={}), event("response.in_progress", response={})]
    parts = [*early, "more"] if path == RESPONSES else ["data: {}\n\n", ""]
    status, headers, body = await ask(Refusing(200, "text/event-stream", *parts), path, {})
    assert (status, headers[b"content-type"]) == (400, b"application/json")
    assert json.loads(body)["error"]["message"] == "no such grammar"


async def test_a_stream_begins_with_the_engines_first_output() -> None:
    sent: list[int] = []

    class Watched(Application):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def watching(message: Any) -> None:
                await send(message)
                sent.append(len(found))

            await super().__call__(scope, receive, watching)

    found: list[Any] = []
    layer = ApiMiddleware(
        Watched(200, "text/event-stream", *stream("completed"), ""),
        EngineAbilities(),
        lambda: False,
    )

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        found.append(message)

    scope = {"type": "http", "method": "POST", "path": RESPONSES, "headers": []}
    await layer(scope, receive, send)
    assert sent[:3] == [0, 0, 2], "the start and the first event wait for the engine"


async def test_a_refusal_does_not_reach_the_application() -> None:
    app = Application(200, "application/json", "{}")
    status, _, body = await ask(app, CHAT, {"priority": 3})
    assert status == 400 and not app.asked
    assert json.loads(body)["error"]["param"] == "priority"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_other_answers_pass_as_they_are(path: str) -> None:
    app = Application(200, "application/json", "{ }", "")
    assert await ask(app, path, {}) == (
        200,
        {b"content-type": b"application/json", b"content-length": b"7"},
        b"{ }",
    )


# Usage


@dataclass
class Output:
    """What is read of vLLM's `RequestOutput`."""

    num_cached_tokens: int | None
    request_id: str = "r"


def completion(**usage: Any) -> str:
    told = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, **usage}
    return json.dumps({"choices": [{"text": "x", "token_ids": [1]}], "usage": told})


async def test_an_echo_alone_counts_no_answer() -> None:
    app = Application(200, "application/json", completion())
    asked = {"prompt": "x", "echo": True, "max_tokens": 0}
    told = json.loads((await ask(app, COMPLETIONS, asked))[2])
    assert (told["usage"]["completion_tokens"], told["usage"]["total_tokens"]) == (0, 9)
    assert told["choices"][0]["token_ids"] == []


@pytest.mark.parametrize("wrap", [str, lambda body: f"data: {body}\n\ndata: [DONE]\n\n"])
async def test_cached_tokens_of_several_prompts_are_summed(wrap: Callable[[str], str]) -> None:
    body = completion(prompt_tokens_details={"cached_tokens": 100})
    kind = "application/json" if wrap is str else "text/event-stream"
    app = Application(200, kind, wrap(body), "", prompts=3)
    _, _, answer = await ask(app, COMPLETIONS, {"prompt": ["a", "b", "c"]})
    assert b'"cached_tokens":600' in answer
    assert answer.endswith(b"data: [DONE]\n\n") == (wrap is not str)


@pytest.mark.parametrize("prompt", ["a", [1, 2, 3], [" 1"][0]])
async def test_one_prompts_usage_is_vllms(prompt: Any) -> None:
    body = completion(prompt_tokens_details={"cached_tokens": 7})
    app = Application(200, "application/json", body)
    assert (await ask(app, COMPLETIONS, {"prompt": prompt}))[2] == body.encode()


def test_what_another_engine_computed_is_not_cached() -> None:
    usage = PromptUsage()
    cached, output = CachedTokens(usage), Output(1847)
    cached.limit(512)
    cached.correct(output)
    assert output.num_cached_tokens == usage.cached_tokens == 512
    CachedTokens(usage).correct(Output(1847))
    assert usage.cached_tokens == 512 + 1847


def test_what_the_first_sample_computed_is_not_cached() -> None:
    usage, output = PromptUsage(), Output(512)
    states = [(256, False), (512, False), (0, True)]
    usage.samples["r"] = [
        SimpleNamespace(num_cached_tokens=tokens, is_prefilling=early) for tokens, early in states
    ]
    CachedTokens(usage).correct(output)
    assert output.num_cached_tokens == 256


def test_a_request_of_nobodys_is_corrected_as_well() -> None:
    cached, output = CachedTokens(None), Output(None)
    cached.correct(output)
    assert output.num_cached_tokens == 0

"""On vLLM's routes the gateway answers with the bytes of vLLM's own server, in the shapes of
`headrace_decode.apis`; and a replica tells the keys of the prompts that vLLM renders."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.model import resolve
from headrace_kvstore.identity.salts import tenant_salt
from tests.support.prompt_keys import PromptKeys
from tests.support.rest_clients import ASKED_AGAIN, Servers, rest_clients
from tests.support.rest_requests import (
    ANSWERS,
    CALL,
    CHAT,
    CHAT_PATH,
    COMPLETION_PATH,
    INPUT,
    REFUSALS,
    SHAPE,
    STREAMS,
    TOOL,
    shaped,
)
from tests.support.rest_servers import BLOCK_TOKENS, NAME

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TEXTS = ("delta", "text", "content", "arguments", "reasoning")
_VARIES = re.compile(r'(?<=[_"-])[0-9a-f]{16,32}\b|(?<="created":)\d+|(?<="created_at":)\d+')


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with rest_clients(str(resolve("smollm2-135m-instruct"))) as clients:
        yield clients


def assert_alike(vllm: httpx.Response, gateway: httpx.Response) -> None:
    """Same status, kind and bytes, but for random ids and the time. What is wrong with a malformed
    request is said in other words (`headrace_engine.serving.validation`)."""
    assert vllm.status_code == gateway.status_code, gateway.text[:500]
    assert vllm.headers["content-type"] == gateway.headers["content-type"]
    if "validation error" in vllm.text:
        expected, told = json.loads(shaped(vllm)), gateway.json()
        assert told["error"].keys() == expected["error"].keys() and told["error"]["message"]
        return
    assert _VARIES.sub("*", shaped(vllm)) == _VARIES.sub("*", gateway.text)


def answered_alike(servers: Servers, path: str, body: dict[str, Any] | None) -> httpx.Response:
    """vLLM's answer, which is the gateway's too. vLLM makes one event of the tokens that came while
    a busy machine did something else: a stream that was cut otherwise is asked for again, and all
    but the cuts must be the same each time."""
    vllm, gateway = servers.ask(path, body)
    for _ in range(ASKED_AGAIN):
        if "event-stream" not in vllm.headers["content-type"]:
            break
        assert pieces(shaped(vllm).encode()) == pieces(gateway.content)
        with suppress(AssertionError):
            assert_alike(vllm, gateway)
            break
        vllm, gateway = servers.ask(path, body)
    assert_alike(vllm, gateway)
    return vllm


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_vllms_bytes(servers: Servers, name: str) -> None:
    vllm = answered_alike(servers, *ANSWERS[name])
    assert vllm.status_code == 200, vllm.text[:500]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_of_vllms_has_vllms_bytes(servers: Servers, name: str) -> None:
    vllm, gateway = servers.ask(*REFUSALS[name])
    assert 400 <= vllm.status_code < 500 or vllm.status_code == 501, vllm.text[:500]
    assert_alike(vllm, gateway)


def test_a_response_that_is_not_there_cannot_be_cancelled(servers: Servers) -> None:
    path = "/v1/responses/resp_1/cancel"
    assert_alike(servers.vllm.post(path), servers.gateway.post(path))


def test_pages_of_other_sites_are_answered_as_by_vllm(servers: Servers) -> None:
    origin = {"origin": "https://chat.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}

    def cors(response: httpx.Response) -> dict[str, str]:
        return {k: v for k, v in response.headers.items() if k.startswith("access-control-")}

    for method, path, headers in (
        ("OPTIONS", "/v1/messages", {**origin, **asked}),
        ("GET", "/v1/models", origin),
    ):
        vllm = servers.vllm.request(method, path, headers=headers)
        gateway = servers.gateway.request(method, path, headers=headers)
        assert cors(vllm) and cors(vllm) == cors(gateway)
        assert vllm.status_code == gateway.status_code


@pytest.mark.parametrize(
    "path",
    [
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/inference/v1/generate",
        "/invocations",
        "/ping",
        "/start_profile",
        "/sleep",
        "/collective_rpc",
        "/v1/load_lora_adapter",
    ],
)
def test_what_is_for_vllms_operator_is_not_found(servers: Servers, path: str) -> None:
    response = servers.gateway.post(path, json={"model": NAME})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_the_schema_is_vllms_own_for_what_it_answers(servers: Servers) -> None:
    ours = servers.gateway.get("/openapi.json").json()
    theirs = servers.vllm.get("/openapi.json").json()
    for path, _ in ANSWERS.values():
        for method, operation in theirs["paths"][path].items():
            body = operation.get("requestBody")
            assert ours["paths"][path][method].get("requestBody") == body
    for name, schema in ours["components"]["schemas"].items():
        assert theirs["components"]["schemas"].get(name, schema) == schema
    assert "/scale_elastic_ep" not in ours["paths"]


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, "yes|no"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 9}},
                }
            },
            r"\s*-?\d+",
        ),
    ],
)
def test_an_answer_keeps_to_its_grammar(
    servers: Servers, asked: dict[str, Any], pattern: str
) -> None:
    for stream in (False, True):
        body = {**CALL, **asked, "stream": stream}
        answered_alike(servers, "/v1/chat/completions", body)
    answer = servers.gateway.post("/v1/chat/completions", json={**CALL, **asked}).json()
    assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"]), answer


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"regex": "{" + " " * 1600}},
        {"structured_outputs": {"regex": "x" * 300_000}},
        {"structured_outputs": {"choice": ["x"] * 20_000}},
        {"structured_outputs": {"grammar": "root ::= ((("}},
        {"structured_outputs": {"json": '{"a":' * 40_000}},
        {"structured_outputs": {"regex": "a{9999999}"}},
    ],
)
def test_a_grammar_that_costs_too_much_is_refused_before_the_engine(
    servers: Servers, asked: dict[str, Any]
) -> None:
    for stream in (False, True):
        refused = servers.gateway.post(
            "/v1/chat/completions", json={**CALL, **asked, "stream": stream}
        )
        assert refused.status_code == 400, refused.text[:500]
        error = refused.json()["error"]
        assert (error["code"], bool(error["message"])) == (400, True)


SCHEMAS: dict[str, Any] = {
    "two branches": {
        "allOf": [
            {
                "type": "object",
                "properties": {"a": {"enum": ["x"]}, "b": {"enum": ["y"]}},
                "required": ["a"],
                "additionalProperties": False,
            },
            {"type": "object", "required": ["b"]},
        ]
    },
    "plain": SHAPE | {"properties": {"name": {"enum": ["x", "y"]}}, "additionalProperties": False},
}


@pytest.mark.parametrize("name", [*SCHEMAS, *SCHEMAS])
def test_a_schema_is_enforced_whichever_came_first(servers: Servers, name: str) -> None:
    schema = {"name": "x", "schema": SCHEMAS[name], "strict": True}
    body = {**CALL, "response_format": {"type": "json_schema", "json_schema": schema}}
    answer = servers.gateway.post(CHAT_PATH, json={**body, "max_tokens": 64}).json()
    said = json.loads(answer["choices"][0]["message"]["content"])
    assert said in ({"a": "x", "b": "y"}, {"name": "x"}, {"name": "y"})
    assert ("a" in said) == (name == "two branches")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/responses", "/v1/messages"])
def test_a_schema_that_nothing_enforces_is_refused_by_name(
    servers: Servers, path: str, stream: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    body: dict[str, Any] = {
        CHAT_PATH: {
            **CALL,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            },
        },
        "/v1/responses": {
            **INPUT,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        },
        "/v1/messages": {
            **CALL,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    }[path]
    refused = servers.gateway.post(path, json={**body, "stream": stream})
    assert refused.status_code == 400, refused.text[:500]
    assert '"not" at #/properties/a' in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "tell"}])
def test_a_forced_tool_of_responses_is_called(servers: Servers, choice: Any, stream: bool) -> None:
    tool = {"type": "function", "name": "tell", "parameters": SCHEMAS["plain"], "strict": True}
    body = {**INPUT, "tools": [tool], "tool_choice": choice, "stream": stream}
    answer = servers.gateway.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text[:500]
    last = answer.text.strip().rpartition("data: ")[2]
    told = json.loads(last)["response"] if stream else answer.json()
    [call] = told["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "tell", "completed")
    assert json.loads(call["arguments"])["name"] in "xy"


def test_cached_tokens_of_all_prompts_and_samples_are_told(servers: Servers) -> None:
    prompts = [uuid.uuid4().hex + LONG * 2 for _ in range(2)]

    def cached(path: str, body: dict[str, Any]) -> list[int]:
        told = []
        for stream in (False, True):
            more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = servers.gateway.post(path, json={"max_tokens": 2, **body, **more})
            assert answer.status_code == 200, answer.text[:500]
            told.append(int(re.findall(r'"cached_tokens":(\d+)', answer.text)[-1]))
        return told

    completion = {"model": NAME, "prompt": prompts}
    tokens = len(servers.keys(COMPLETION_PATH, {**completion, "prompt": prompts[0]})["keys"])
    assert tokens
    first, again = cached(COMPLETION_PATH, completion)
    assert (first, again > 2 * BLOCK_TOKENS) == (0, True)
    one = cached(COMPLETION_PATH, {**completion, "prompt": prompts[0]})
    assert one[0] == one[1] and again <= 2 * one[0] + BLOCK_TOKENS
    story = [{"role": "user", "content": uuid.uuid4().hex + LONG}]
    samples = cached(CHAT_PATH, {"model": NAME, "messages": story, "n": 3})
    assert samples[0] == 0, "the first sample computed the prompt"
    assert samples[1] > 0


# The keys of a prompt


LONG = "The quick brown fox jumps over the lazy dog. " * 20
TOOLS = [{"type": "function", "function": TOOL}]
SYSTEM = [{"role": "system", "content": LONG}]


def keys_in(told: dict[str, Any]) -> list[int]:
    return np.frombuffer(base64.b64decode(told["keys"]), "<u8").tolist()


@pytest.mark.parametrize("more", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("/v1/chat/completions", {**CALL, "messages": SYSTEM + CHAT}),
        ("/v1/chat/completions", {**CALL, "messages": SYSTEM + CHAT, "cache_salt": "mine"}),
        ("/v1/chat/completions", {**CALL, "messages": CHAT, "tools": TOOLS, "tool_choice": "none"}),
        ("/v1/completions", {"model": NAME, "prompt": LONG, "max_tokens": 12}),
        ("/v1/completions", {"model": NAME, "prompt": [LONG * 5], "max_tokens": 12}),
        ("/v1/completions", {"model": NAME, "prompt": list(range(300)), "max_tokens": 12}),
        ("/v1/messages", {**CALL, "system": LONG}),
    ],
)
def test_keys_are_those_of_the_tokens_that_vllm_renders(
    servers: Servers, target: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    read = servers.tokens_read()
    more = {} if target == "/v1/messages" and more else more
    told = servers.keys(target, {**body, **more})
    rendered = servers.vllm.post(f"{target}/render", json=body).json()
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    expected = PromptKeys(BLOCK_TOKENS).keys(rendered["token_ids"], body.get("cache_salt", ""))
    assert keys_in(told) == expected.tolist()
    assert told["prompt_tokens"] == len(rendered["token_ids"])
    assert told["local_only"] is None
    assert servers.tokens_read() == read, "the engine was asked"


def test_a_response_has_the_keys_of_its_prompt(servers: Servers) -> None:
    body = {**INPUT, "input": CHAT, "instructions": LONG, "max_output_tokens": 8}
    told = servers.keys("/v1/responses", {**body, "stream": True})
    as_chat = {**CALL, "messages": [*SYSTEM, *CHAT]}
    assert keys_in(told) == keys_in(servers.keys("/v1/chat/completions", as_chat)) != []
    answered = servers.vllm.post("/v1/responses", json=body).json()
    assert told["prompt_tokens"] == answered["usage"]["input_tokens"]


def test_keys_are_a_tenants_own(servers: Servers) -> None:
    body = {"model": NAME, "prompt": list(range(300)), "cache_salt": "own"}
    hashed = PromptKeys(BLOCK_TOKENS)
    for tenant, salt in ((None, "own"), ("acme", tenant_salt("acme", "own"))):
        told = servers.keys("/v1/completions", body, tenant)
        assert keys_in(told) == hashed.keys(range(300), salt).tolist()


def test_what_binds_a_prompt_to_one_engine_is_told_with_its_keys(servers: Servers) -> None:
    told = servers.keys("/v1/chat/completions", {**CALL, "n": 2, "temperature": 1})
    assert told["local_only"].startswith("n > 1")


@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("/v1/chat/completions", {**CALL, "model": "other"}),
        ("/v1/chat/completions", {**CALL, "messages": "nonsense"}),
        ("/v1/chat/completions", {**CALL, "temperature": -1}),
        ("/v1/chat/completions", {**CALL, "messages": [{"role": "user", "content": LONG * 100}]}),
        ("/v1/completions", {"model": NAME, "prompt": ["a", "b"]}),
        ("/v1/completions", {"model": NAME, "prompt": [2**40]}),
        ("/v1/completions", {"model": NAME, "prompt": []}),
        ("/v1/responses", {**INPUT, "background": True}),
        ("/tokenize", {"model": NAME, "prompt": "a"}),
        ("/nowhere", {}),
        ("/v1/chat/completions", None),
        ({}, {}),
    ],
)
def test_what_vllm_refuses_has_no_keys(servers: Servers, target: Any, body: Any) -> None:
    assert servers.keys(target, body)["keys"] is None


def test_only_the_replicas_own_port_tells_keys_and_only_to_gateways(servers: Servers) -> None:
    asked = {"target": "/v1/chat/completions", "body": CALL}
    assert servers.gateway.post("/headrace/internal/keys", json=asked).status_code == 404
    assert servers.replica.post("/headrace/internal/keys", json=asked).status_code == 403


def pieces(body: bytes) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """A stream, however its texts were cut into events: for each place in its events the texts in a
    row, the values that stood there, or the last of the counts of tokens, which never fall; and
    apart from that the log-probabilities of each place."""
    texts: dict[str, Any] = {}
    logprobs: dict[str, list[float]] = {}

    def take(value: Any, place: str, choice: Any) -> None:
        if isinstance(value, dict):
            choice = value.get("index", choice)
            for name, inner in value.items():
                if name not in ("created", "created_at", "sequence_number", "logprob"):
                    take(inner, f"{place}.{name}", choice)
                elif name == "logprob":
                    logprobs.setdefault(place, []).append(inner)
        elif isinstance(value, list):
            for inner in value:
                take(inner, place, choice)
        elif isinstance(value, float):
            logprobs.setdefault(place, []).append(value)
        elif isinstance(value, str) and place.endswith(TEXTS):
            texts[f"{place} {choice}"] = texts.get(f"{place} {choice}", "") + value
        elif value is not None and place.endswith("_tokens"):
            assert value >= texts.get(f"{place} {choice}", 0), place
            texts[f"{place} {choice}"] = value
        elif value is not None:
            texts.setdefault(f"{place} {choice}", {})[value] = None

    for event in body.split(b"\n\n"):
        for one in event.split(b"\n"):
            if one.startswith(b"data: {"):
                take(json.loads(_VARIES.sub("0", one[6:].decode())), "", None)
    return texts, logprobs


def streamed(servers: Servers, name: str, cuts: str) -> bytes:
    path, body = STREAMS[name]
    headers = {"x-request-id": uuid.uuid4().hex, **({"x-cut-after": cuts} if cuts else {})}
    gateway = servers.reasoning.get(name.removeprefix("reasoning "), servers.gateway)
    answer = gateway.post(path, json={**body, "stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.content


def assert_goes_on(servers: Servers, name: str, cuts: str) -> None:
    whole, cut = streamed(servers, name, ""), streamed(servers, name, cuts)
    texts, logprobs = pieces(whole)
    again, logprobs_again = pieces(cut)
    assert again == texts
    if name.startswith("reasoning"):
        assert {".choices.delta.reasoning 0", ".choices.delta.content 0"} <= texts.keys()
    assert logprobs_again.keys() == logprobs.keys()
    for place, values in logprobs.items():  # another order of arithmetic
        assert logprobs_again[place] == pytest.approx(values, abs=1e-3), place
    assert cut.count(b"[DONE]") == whole.count(b"[DONE]")
    for item in set(re.findall(rb'"item_id":"([a-z]+_[0-9a-f]+)"', cut)):
        assert b'"id":"%s"' % item in cut, "what later events refer to has come before"


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_loses_its_replica_several_times_is_the_same(
    servers: Servers, name: str
) -> None:
    assert_goes_on(servers, name, "1,3,7")


@pytest.mark.soak
@pytest.mark.parametrize("name", STREAMS)
def test_a_hundred_streams_that_lose_their_replica_are_the_same(
    servers: Servers, name: str
) -> None:
    for cut in range(50):  # each is cut twice
        assert_goes_on(servers, name, f"{cut % 13},{cut % 7 + 1}")


def test_a_stream_of_several_prompts_ends_with_an_error_that_says_why(servers: Servers) -> None:
    body = {"model": NAME, "prompt": ["One, two,", "Red, green,"], "stream": True}
    answer = servers.gateway.post(COMPLETION_PATH, json=body, headers={"x-cut-after": "4"})
    error = json.loads(answer.content.split(b"data: ")[-1])["error"]
    assert error["code"] == "replica_lost"
    assert "one request has several prompts" in error["message"]

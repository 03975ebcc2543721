"""On vLLM's routes the gateway answers with the bytes of vLLM's own server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from headrace.model import resolve
from tests.support.rest_servers import NAME, rest_servers

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
CALL: dict[str, Any] = {"model": NAME, "messages": CHAT, "temperature": 0, "max_tokens": 12}
INPUT: dict[str, Any] = {"model": NAME, "input": "One, two, three,", "temperature": 0}
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
GENERATED = {"request_id": "r", "choices": [{"index": 0, "token_ids": [504, 3575]}]}

ANSWERS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "chat": ("/v1/chat/completions", CALL),
    "chat stream": ("/v1/chat/completions", {**CALL, "stream": True}),
    "completion": ("/v1/completions", {"model": NAME, "prompt": "One, two,", "temperature": 0}),
    "batch": ("/v1/chat/completions/batch", {**CALL, "messages": [CHAT, CHAT]}),
    "response": ("/v1/responses", {**INPUT, "max_output_tokens": 12}),
    "response stream": ("/v1/responses", {**INPUT, "max_output_tokens": 12, "stream": True}),
    "response of messages": (
        "/v1/responses",
        {**INPUT, "input": CHAT, "instructions": "Be brief.", "max_output_tokens": 8},
    ),
    "response, stored": ("/v1/responses", {**INPUT, "store": True, "max_output_tokens": 1}),
    "message": ("/v1/messages", CALL),
    "message stream": ("/v1/messages", {**CALL, "stream": True, "system": "Be brief."}),
    "message tokens": ("/v1/messages/count_tokens", {"model": NAME, "messages": CHAT}),
    "tokens": ("/tokenize", {"prompt": "Hello there", "return_token_strs": True}),
    "chat tokens": ("/tokenize", {"model": NAME, "messages": CHAT}),
    "text": ("/detokenize", {"model": NAME, "tokens": [504, 3575, 282]}),
    "chat rendered": ("/v1/chat/completions/render", CALL),
    "completion rendered": ("/v1/completions/render", {"model": NAME, "prompt": ["a", "b"]}),
    "message rendered": ("/v1/messages/render", CALL),
    "chat derendered": (
        "/v1/chat/completions/derender",
        {"model": NAME, "generate_response": GENERATED},
    ),
    "scores": (
        "/generative_scoring",
        {"model": NAME, "query": "Is it?", "items": ["yes", "no"], "label_token_ids": [504, 3575]},
    ),
    "models": ("/v1/models", None),
}
REFUSALS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "no such model": ("/v1/responses", {**INPUT, "model": "other"}),
    "no such model for a message": ("/v1/messages", {**CALL, "model": "other"}),
    "a message without messages": ("/v1/messages", {"model": NAME, "max_tokens": 1}),
    "in the background": ("/v1/responses", {**INPUT, "background": True}),
    "a response before": ("/v1/responses", {**INPUT, "previous_response_id": "resp_1"}),
    "a stored response": ("/v1/responses/resp_1", None),
    "a stored response's stream": ("/v1/responses/resp_1?stream=true&starting_after=3", None),
    "a token id that is none": ("/detokenize", {"tokens": [2**62]}),
    "a template of the client's": ("/tokenize", {"messages": CHAT, "chat_template": "{{ 1 }}"}),
    "a temperature below 0": ("/v1/messages", {**CALL, "temperature": -1}),
    "a stream with a wrong field": ("/v1/responses", {**INPUT, "stream": True, "top_p": 7}),
    "a prompt that is too long": ("/v1/responses", {**INPUT, "input": "word " * 4000}),
    "nothing to score": ("/generative_scoring", {"model": NAME, "query": "Is it?"}),
}
_VARIES = re.compile(r'(?<=[_"-])[0-9a-f]{16,32}\b|(?<="created":)\d+|(?<="created_at":)\d+')


@dataclass
class Servers:
    """Clients of both."""

    vllm: httpx.Client
    gateway: httpx.Client

    def ask(self, path: str, body: dict[str, Any] | None) -> tuple[httpx.Response, httpx.Response]:
        """The answers of vLLM's server and of the gateway."""
        method = "GET" if body is None else "POST"
        headers = {"x-request-id": "0123456789abcdef"}
        vllm, gateway = (
            client.request(method, path, json=body, headers=headers)
            for client in (self.vllm, self.gateway)
        )
        return vllm, gateway


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with (
        rest_servers(str(resolve("smollm2-135m-instruct"))) as (vllm, gateway),
        httpx.Client(base_url=vllm, timeout=60) as plain,
        httpx.Client(base_url=gateway, timeout=60) as ours,
    ):
        yield Servers(plain, ours)


def assert_alike(vllm: httpx.Response, gateway: httpx.Response) -> None:
    """Same status, kind and bytes, but for random ids and the time."""
    assert vllm.status_code == gateway.status_code, gateway.text[:500]
    assert vllm.headers["content-type"] == gateway.headers["content-type"]
    assert _VARIES.sub("*", vllm.text) == _VARIES.sub("*", gateway.text)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_vllms_bytes(servers: Servers, name: str) -> None:
    vllm, gateway = servers.ask(*ANSWERS[name])
    assert vllm.status_code == 200, vllm.text[:500]
    assert_alike(vllm, gateway)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_of_vllms_has_vllms_bytes(servers: Servers, name: str) -> None:
    vllm, gateway = servers.ask(*REFUSALS[name])
    assert 400 <= vllm.status_code < 500, vllm.text[:500]
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
        vllm, gateway = servers.ask("/v1/chat/completions", body)
        assert_alike(vllm, gateway)
    answer = servers.gateway.post("/v1/chat/completions", json={**CALL, **asked}).json()
    assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"]), answer


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"regex": "{" + " " * 1600}},
        {"structured_outputs": {"regex": "|".join("a" * n for n in range(700))}},
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
        # vLLM begins a stream before it looks at a grammar.
        assert refused.status_code == (200 if stream else 400), refused.text[:500]
        text = refused.text.partition("data: ")[2].partition("\n\n")[0] if stream else refused.text
        error = json.loads(text)["error"]
        assert (error["code"], bool(error["message"])) == (400, True)

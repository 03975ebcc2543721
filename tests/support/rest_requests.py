"""Requests of every API that vLLM serves: what is answered, what is refused, what streams; and
vLLM's answers as clients of these APIs expect them."""

from __future__ import annotations

from typing import Any

import httpx

from headrace_decode.apis import messages, responses
from tests.support.rest_servers import NAME

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
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
    "response rendered": ("/v1/responses/render", INPUT),
    "chat derendered": (
        "/v1/chat/completions/derender",
        {"model": NAME, "generate_response": GENERATED, "chat_request": CALL},
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
    "a decision, which this model does not take": (
        "/v1/systemone",
        {"model": NAME, "state": "It rains.", "questions": {"wet": {"type": "noul"}}},
    ),
}
STORY: dict[str, Any] = {**CALL, "messages": [{"role": "user", "content": "Tell me a story."}]}
SHAPE = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
NAMED = {"type": "function", "function": {"name": "tell"}}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT_PATH, STORY),
    "completion": (COMPLETION_PATH, {"model": NAME, "prompt": "One, two,", "temperature": 0}),
    "log-probabilities": (CHAT_PATH, {**STORY, "logprobs": True, "top_logprobs": 3}),
    "a completion's log-probabilities": (
        COMPLETION_PATH,
        {"model": NAME, "prompt": "One, two,", "temperature": 0, "logprobs": 2},
    ),
    "seed": (CHAT_PATH, {**STORY, "temperature": 1.0, "seed": 7}),
    "n = 2": (CHAT_PATH, {**STORY, "temperature": 1.0, "seed": 3, "n": 2}),
    "stop string": (CHAT_PATH, {**STORY, "max_tokens": 40, "stop": ["upon a time, there"]}),
    "usage": (
        CHAT_PATH,
        {**STORY, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "penalties": (
        CHAT_PATH,
        {**STORY, "presence_penalty": 1.5, "repetition_penalty": 1.3, "min_tokens": 12},
    ),
    "JSON": (
        CHAT_PATH,
        {
            **STORY,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "one", "schema": SHAPE},
            },
        },
    ),
    "tool": (
        CHAT_PATH,
        {
            **STORY,
            "tools": [{"type": "function", "function": {"name": "tell", "parameters": SHAPE}}],
            "tool_choice": NAMED,
        },
    ),
    "message": ("/v1/messages", STORY),
    "response": ("/v1/responses", {**INPUT, "max_output_tokens": 12}),
    "reasoning by tokens": (CHAT_PATH, STORY),
    "reasoning by phrases": (
        CHAT_PATH,
        {
            **STORY,
            "max_tokens": 60,
            "structured_outputs": {
                "regex": "Here is my thought process: [a-z ]{20,40}[.] "
                "Here is my response: [A-Za-z ]{20,40}[.]"
            },
        },
    ),
}


def shaped(vllm: httpx.Response) -> str:
    """An answer of vLLM's as the API's clients expect it."""
    path, body = vllm.request.url.path, vllm.content
    if path.startswith("/v1/messages") and vllm.status_code != 200:
        return messages.error(vllm.status_code, body).decode()
    if path not in ("/v1/messages", "/v1/responses") or vllm.status_code != 200:
        return vllm.text
    if vllm.headers["content-type"].startswith("application/json"):
        answer = messages.answer if path == "/v1/messages" else responses.answer
        return answer(body).decode()
    change = messages.event if path == "/v1/messages" else responses.EventRewriter().rewrite
    return b"".join(change(one + b"\n\n") for one in body.split(b"\n\n")[:-1]).decode()

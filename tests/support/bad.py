"""200 requests that must be refused: what is sent, and which statuses are right.

Pure data; `tests/e2e/test_bad_requests.py` sends them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.app import MODEL

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
JSON = {"Content-Type": "application/json"}
MAX_MODEL_LEN = 8192
VOCABULARY = 49_152
HUGE = 10**30


@dataclass(frozen=True)
class Bad:
    """One request."""

    name: str
    path: str
    body: bytes
    statuses: frozenset[int] = frozenset({400})
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))
    chunked: bool = False


def bad_requests() -> list[Bad]:
    """All of them, each under a name of its own."""
    found = [
        *_malformed(),
        *_not_utf8(),
        *_content_types(),
        *_wrong_types(),
        *_wrong_numbers(),
        *_wrong_tokens(),
        *_unknown_models(),
        *_too_long(),
        *_too_big(),
        *_no_such_route(),
        *_unusable_grammars(),
        *_hostile(),
    ]
    names = [bad.name for bad in found]
    assert len(names) == len(set(names)), "two have one name"
    return found


def _malformed() -> Iterator[Bad]:
    bodies = {
        "empty": b"",
        "brace": b"{",
        "bracket": b"[",
        "word": b"hello",
        "half-null": b"nul",
        "single-quotes": b"{'model': 'x'}",
        "trailing-comma": b'{"model": "x",}',
        "no-colon": b'{"model" "x"}',
        "two-objects": b"{}{}",
        "cut": json.dumps({"model": MODEL, **HELLO}).encode()[:-7],
        "nan": b'{"model": "x", "temperature": NaN}',
        "infinity": b'{"model": "x", "temperature": Infinity}',
        "control": b'{"model": "a\x01b"}',
        "newline": b'{"model": "a\nb"}',
        "escape": b'{"model": "\\q"}',
        "lone-surrogate": b'{"model": "\\ud800", "prompt": "x"}',
        "bom": b"\xef\xbb\xbf" + json.dumps({"model": MODEL}).encode(),
        "deep": b"[" * 100_000,
        "deep-object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "null": b"null",
        "true": b"true",
        "number": b"12",
        "string": b'"prompt"',
        "list": b"[]",
        "form": b"model=x&prompt=y",
    }
    for name, body in bodies.items():
        yield Bad(f"malformed-{name}-chat", CHAT, body)
        yield Bad(f"malformed-{name}-completion", COMPLETE, body)


def _not_utf8() -> Iterator[Bad]:
    for name, text in {
        "byte": b"\xff",
        "cut-sequence": b"\xe2\x82",
        "overlong": b"\xc0\xaf",
        "surrogate": b"\xed\xa0\x80",
        "latin-1": "Grüße".encode("latin-1"),
    }.items():
        body = b'{"model": "%s", "prompt": "' % MODEL.encode() + text + b'"}'
        yield Bad(f"utf8-{name}", COMPLETE, body)
    utf16 = json.dumps({"model": MODEL, **HELLO}).encode("utf-16")
    yield Bad("utf8-half-utf16", CHAT, utf16[:-1])
    unknown = {**JSON, "content-encoding": "gzip"}
    yield Bad("utf8-unknown-encoding", CHAT, b"{}", frozenset({415}), headers=unknown)


def _content_types() -> Iterator[Bad]:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    for kind in ("text/plain", "application/xml", "multipart/form-data; boundary=x", ""):
        headers = {"Content-Type": kind} if kind else {}
        right = frozenset({400, 415})
        yield Bad(f"type-{kind or 'none'}", COMPLETE, body, right, headers=headers)


def _chat(name: str, *statuses: int, **fields: Any) -> Bad:
    body = {"model": MODEL, "max_tokens": 2, **HELLO, **fields}
    return Bad(name, CHAT, json.dumps(body).encode(), frozenset(statuses or (400,)))


def _completion(name: str, *statuses: int, **fields: Any) -> Bad:
    body = {"model": MODEL, "max_tokens": 2, "prompt": "Hello", **fields}
    return Bad(name, COMPLETE, json.dumps(body).encode(), frozenset(statuses or (400,)))


def _wrong_types() -> Iterator[Bad]:
    both: dict[str, list[Any]] = {
        "max_tokens": ["many", [], {}],
        "temperature": ["hot", {}, []],
        "top_p": ["x", {}],
        "n": ["x", [1], 1.5],
        "stream": ["perhaps", {}, []],
        "stop": [{}, [{}], 7],
        "seed": ["x", {}],
        "presence_penalty": ["x", []],
        "logit_bias": ["x", [1], {"1": "x"}],
        "stream_options": ["x", 1],
        "cache_salt": [1, {}, ""],
        "priority": ["x"],
    }
    for name, values in both.items():
        for number, value in enumerate(values):
            make = _completion if number % 2 else _chat
            yield make(f"types-{name}-{number}", **{name: value})
    chat: dict[str, list[Any]] = {
        "messages": [
            None,
            "",
            1,
            {},
            [],
            [1],
            [None],
            [{}],
            [{"role": 1, "content": "x"}],
            [{"content": "x"}],
            [{"role": "user", "content": 7}],
            [{"role": "user", "content": [{"type": "hologram"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ],
        "tools": ["x", [1], [{}], [{"type": "function"}]],
        "tool_choice": ["perhaps", {"type": "function"}, 7],
        "response_format": ["json", {"type": "poem"}, {"type": "json_schema"}],
        "logprobs": ["x", {}],
        "top_logprobs": ["x", {}],
    }
    for name, values in chat.items():
        for number, value in enumerate(values):
            yield _chat(f"types-chat-{name}-{number}", **{name: value})
    named = {"type": "function", "function": {"name": "absent"}}
    tool = {"type": "function", "function": {"name": "present"}}
    yield _chat("types-tool-choice-without-tools", tool_choice=named)
    yield _chat("types-tool-choice-of-an-absent-tool", tool_choice=named, tools=[tool])
    for number, prompt in enumerate([None, {}, 7, [], [[]], [{}], ["a", 1], [None]]):
        yield _completion(f"types-prompt-{number}", prompt=prompt)
    yield Bad("types-no-prompt", COMPLETE, json.dumps({"model": MODEL}).encode())
    yield Bad("types-no-messages", CHAT, json.dumps({"model": MODEL}).encode())


def _wrong_numbers() -> Iterator[Bad]:
    both: dict[str, list[float]] = {
        "max_tokens": [-1, -HUGE, HUGE],
        "temperature": [-0.1, -1e300],
        "top_p": [0, -1, 1.01, 1e300],
        "top_k": [-7, HUGE],
        "min_p": [-1, 2],
        "n": [0, -1, HUGE],
        "presence_penalty": [-2.1, 99],
        "frequency_penalty": [-99, 2.1],
        "repetition_penalty": [0, -1],
        "min_tokens": [-1, HUGE],
        "seed": [HUGE, -HUGE],
        "priority": [HUGE, -HUGE],
        "truncate_prompt_tokens": [-2, HUGE],
    }
    for name, values in both.items():
        for number, value in enumerate(values):
            make = _chat if number % 2 else _completion
            yield make(f"number-{name}-{number}", **{name: value})
    for number, value in enumerate([-1, 10_000, HUGE]):
        yield _completion(f"number-logprobs-{number}", logprobs=value)
        yield _chat(f"number-top-logprobs-{number}", logprobs=True, top_logprobs=value)
    yield _chat("number-n-greedy", n=2, temperature=0, best_of=-1, use_beam_search="x")
    yield _completion("number-min-over-max", min_tokens=9, max_tokens=2)


def _wrong_tokens() -> Iterator[Bad]:
    prompts: dict[str, Any] = {
        "negative": [-1],
        "over": [VOCABULARY],
        "last-is-over": [1, 2, 3, VOCABULARY],
        "huge": [2**31],
        "vast": [HUGE],
        "float": [1.5],
        "true-and-text": [1, "a"],
        "nested": [[1, 2], [3, -4]],
        "too-deep": [[[1]]],
    }
    for name, prompt in prompts.items():
        yield _completion(f"tokens-prompt-{name}", prompt=prompt)
    for name, bias in {
        "over": {str(VOCABULARY): 1},
        "word": {"x": 1},
        "negative": {"-1": 1},
    }.items():
        yield _completion(f"tokens-bias-{name}", logit_bias=bias)
    yield _completion("tokens-allowed-none", allowed_token_ids=[])
    yield _completion("tokens-allowed-over", allowed_token_ids=[VOCABULARY + 7])
    yield _completion("tokens-allowed-vast", allowed_token_ids=[HUGE])
    yield _completion("tokens-stop-text", stop_token_ids=["x"])
    yield _completion("tokens-stop-over", stop_token_ids=[10**9], min_tokens=2)


def _unknown_models() -> Iterator[Bad]:
    for name in ("gpt-4o", MODEL.upper(), "../" + MODEL, "x" * 10_000, "模型"):
        label, right = name[:24], frozenset({404})
        body = {"max_tokens": 1, "model": name}
        yield Bad(f"model-chat-{label}", CHAT, json.dumps({**body, **HELLO}).encode(), right)
        prompt = json.dumps({**body, "prompt": "x"}).encode()
        yield Bad(f"model-completion-{label}", COMPLETE, prompt, right)


def _too_long() -> Iterator[Bad]:
    words = "word " * (MAX_MODEL_LEN + 100)
    yield _completion("long-text", prompt=words)
    yield _completion("long-tokens", prompt=[100] * (MAX_MODEL_LEN + 1))
    yield _completion("long-full", prompt=[100] * MAX_MODEL_LEN)
    yield _completion("long-second-prompt", prompt=["Hello", words])
    yield _completion("salt-with-nul", prompt="Hello", cache_salt="a\0")
    yield _completion("long-million", prompt="a b " * 500_000)
    yield _chat("long-chat", messages=[{"role": "user", "content": words}])
    turns = [{"role": "user", "content": "word " * 100}] * 100
    yield _chat("long-chat-turns", messages=turns)
    yield _chat("long-chat-answer", max_tokens=MAX_MODEL_LEN + 1)


def _too_big() -> Iterator[Bad]:
    body = json.dumps({"model": MODEL, "prompt": "x" * 10_000_000}).encode()
    right = frozenset({413})
    yield Bad("big-announced", COMPLETE, body, right)
    yield Bad("big-announced-chat", CHAT, body, right)
    yield Bad("big-chunked", COMPLETE, body, right, chunked=True)
    yield Bad("big-noise", COMPLETE, bytes(range(256)) * 40_000, right)


def _no_such_route() -> Iterator[Bad]:
    right = frozenset({404})
    for path in (
        "/v1/embeddings",
        "/v1/realtime",
        "/v1/audio/speech",
        "/v2/chat/completions",
        "/v1/chat/completions/x/",
        "/v1/chat/completions/x",
        "/pause",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/scale_elastic_ep",
        "/inference/v1/generate",
        "/%00",
        "/..%2f..%2fetc%2fpasswd",
    ):
        yield Bad(f"route-{path}", path, b"{}", right)
    for method, path in (
        ("GET", CHAT),
        ("PUT", CHAT),
        ("DELETE", COMPLETE),
        ("PATCH", COMPLETE),
        ("POST", "/v1/models"),
        ("DELETE", f"/v1/models/{MODEL}"),
        ("POST", "/health"),
        ("POST", "/headrace/v1/status"),
        ("OPTIONS", CHAT),
    ):
        yield Bad(f"method-{method}-{path}", path, b"", frozenset({405}), method=method)


def _unusable_grammars() -> Iterator[Bad]:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hologram"}}}
    yield _chat("grammar-schema-type", response_format=schema)
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}
    yield _chat("grammar-schema-ref", response_format=broken)
    counts = {"type": "array", "minItems": 10**9}
    vast = {"type": "json_schema", "json_schema": {"name": "x", "schema": counts}}
    yield _chat("grammar-schema-vast", response_format=vast)
    for name, value in {
        "vast-regex": {"regex": "a{1000000000}"},
        "endless": {"json": {"$ref": "#"}},
        "left-recursion": {"grammar": "root ::= root"},
        "impossible": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        "regex": {"regex": "(["},
        "grammar": {"grammar": "root ::= ::="},
        "choice-none": {"choice": []},
        "two": {"regex": "a", "choice": ["b"]},
        "json-text": {"json": "{not json"},
        "none": {},
        "type": "x",
    }.items():
        yield _completion(f"grammar-{name}", structured_outputs=value)


def _hostile() -> Iterator[Bad]:
    """Bodies that name the engine's memory, each with a fault that gets it refused on the way."""
    pull = {"do_remote_prefill": True}
    where = {
        **pull,
        "remote_engine_id": "x",
        "remote_request_id": "x",
        "remote_block_ids": [[1]],
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "tp_size": 1,
    }
    yield _completion("hostile-pull-refused", kv_transfer_params=pull, top_p=7)
    yield _chat("hostile-pull-refused-chat", kv_transfer_params=pull, top_p=7)
    yield _completion("hostile-pull-too-long", kv_transfer_params=pull, prompt=[1] * 9000)
    yield _completion("hostile-pull-from-refused", kv_transfer_params=where, prompt=[1] * 9000)
    yield _chat("hostile-pull-unknown-model", 404, kv_transfer_params=pull, model="x")
    yield _completion("hostile-transfer-text", kv_transfer_params="x")

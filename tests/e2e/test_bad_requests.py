"""Bad requests: each gets the right 4xx in OpenAI's shape or is cleaned up; nothing is left."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.app import MODEL, App
from tests.support.bad import CHAT, COMPLETE, Bad, bad_requests
from tests.support.prompts import noise

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("same_replicas"),
    pytest.mark.timeout(120),
]

REQUESTS = bad_requests()
WAYS_TO_DROP = ("head", "body", "prefill", "stream", "answer", "reset")
DROPS = 2
"""Of each way."""
ANSWER_LIMIT_S = 20.0


def connect(app: App) -> socket.socket:
    url = urlsplit(app.url)
    return socket.create_connection((url.hostname, url.port), timeout=ANSWER_LIMIT_S)


def post(body: dict[str, Any], path: str = COMPLETE, length: int | None = None) -> bytes:
    """A request as bytes on the wire."""
    payload = json.dumps({"model": MODEL, **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload) if length is None else length}\r\n\r\n"
    )
    return head.encode() + payload


def assert_openai_error(status: int, text: str) -> None:
    error = json.loads(text)["error"]
    assert set(error) >= {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"]
    assert error["code"] is None or isinstance(error["code"], str | int)
    assert "Traceback" not in text


def test_there_are_two_hundred() -> None:
    assert len(REQUESTS) + DROPS * len(WAYS_TO_DROP) + len(BAD_HTTP) >= 200


@pytest.mark.parametrize("bad", REQUESTS, ids=lambda bad: bad.name)
def test_a_bad_request_is_refused(app: App, bad: Bad) -> None:
    def chunks() -> Iterator[bytes]:
        for start in range(0, len(bad.body), 65_536):
            yield bad.body[start : start + 65_536]

    try:
        response = app.client.request(
            bad.method,
            bad.path,
            content=chunks() if bad.chunked else bad.body,
            headers=bad.headers,
            timeout=ANSWER_LIMIT_S,
        )
    except (httpx.WriteError, httpx.ReadError):
        # The server may answer and hang up while a body that it does not want is still coming.
        assert bad.statuses == {413}
        return
    assert response.status_code in bad.statuses, response.text[:300]
    assert response.headers["x-request-id"]
    assert_openai_error(response.status_code, response.text)


BAD_HTTP: dict[str, bytes] = {
    "no-http": b"hello\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
    "method": b"G@T / HTTP/1.1\r\nhost: x\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    "length-word": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
    "length-negative": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    "two-lengths": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "long-head": b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n",
    "chunk-size": (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n"
    ),
    "tls": bytes.fromhex("160301020001000001fc0303") + b"\x00" * 64,
}


@pytest.mark.parametrize("name", BAD_HTTP)
def test_bad_http_is_refused(app: App, name: str) -> None:
    with closing(connect(app)) as sock:
        answer = b""
        try:
            sock.sendall(BAD_HTTP[name])
            while part := sock.recv(65_536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        except TimeoutError:
            pytest.fail(f"no answer, and the connection stays open: {answer[:200]!r}")
    if answer:
        status = int(answer.split(b" ", 2)[1])
        assert 400 <= status < 500, answer[:200]
    assert app.get("/health")["status"] == "ok"


LONG_STREAM = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
LONG_ANSWER = {**LONG_STREAM, "stream": False}


def read_some(sock: socket.socket) -> None:
    data = b""
    while b"data: " not in data:
        part = sock.recv(65_536)
        assert part, data
        data += part


@pytest.mark.parametrize("when", WAYS_TO_DROP)
@pytest.mark.parametrize("number", range(DROPS))
def test_a_dropped_connection_is_cleaned_up(app: App, when: str, number: int) -> None:
    """Answered in full, each of these would keep its engine busy for minutes."""
    computed = app.replica("decode")["prompt_tokens_computed"]
    with closing(connect(app)) as sock:
        if when == "head":
            sock.sendall(post(LONG_STREAM)[: 20 + number])
        elif when == "body":
            sock.sendall(post(LONG_STREAM, length=100_000))
        elif when == "prefill":
            sock.sendall(post({**LONG_STREAM, "prompt": noise(1500, number)}))
            time.sleep(0.2 * number)
        elif when == "stream":
            sock.sendall(post(LONG_STREAM))
            read_some(sock)
        elif when == "answer":
            sock.sendall(post(LONG_ANSWER))
            time.sleep(0.3 * (1 + number))
        else:
            sock.sendall(post(LONG_STREAM))
            read_some(sock)
            # SO_LINGER 0: the kernel sends a reset, as for a client that crashed.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00" + b"\x00" * 4)
    app.wait_idle(limit_s=15)
    if when in ("head", "body"):
        assert app.replica("decode")["prompt_tokens_computed"] == computed, "half a request ran"


def test_a_hostile_transfer_that_is_not_refused_is_ignored(app: App) -> None:
    for hostile in (
        {"do_remote_prefill": True},
        {"do_remote_decode": True},
        {"do_remote_prefill": True, "remote_block_ids": [[0]], "remote_engine_id": "x"},
    ):
        answer = app.complete("One, two, three, four,", kv_transfer_params=hostile)
        assert "five" in answer["choices"][0]["text"]
        assert not answer.get("kv_transfer_params")
        chat = {"messages": [{"role": "user", "content": "Hi"}], "kv_transfer_params": hostile}
        response = app.client.post(CHAT, json={"model": MODEL, "max_tokens": 2, **chat})
        assert response.status_code == 200


def test_a_client_cannot_name_itself_internal(app: App) -> None:
    headers = {"x-headrace-internal": "guess", "x-headrace-anything": "x"}
    named = app.complete("Hello", headers=headers)["choices"]
    assert named == app.complete("Hello")["choices"]


def test_afterwards_nothing_is_left(app: App) -> None:
    app.wait_idle(limit_s=40)
    assert "Paris" in app.complete("The capital of France is")["choices"][0]["text"]

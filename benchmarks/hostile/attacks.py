"""Requests of a hostile client. The end-to-end tests and the benchmark send the same.

A `Request` is a whole HTTP request. A `Wire` is a way to misuse a connection. Each lists its
correct answers. An answer with status 500 or higher, or none within its `limit_s`, is never
correct.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MEGABYTE = 1_000_000
ANSWER_LIMIT_S = 120.0
"""Four grammars may stand in a queue, and each may be tried for 30 s."""
REFUSED = range(400, 500)
ANSWERED = range(200, 500)
MAX_ERROR_BYTES = 64 * 1024
"""Maximum size of an answer that is an error."""
FLOOD_BYTES = 50 * MEGABYTE
BOMB_BYTES = 300 * MEGABYTE

TROUBLE: dict[str, str] = {
    "letters": "a",
    "spaces": " ",
    "newlines": "\n",
    "braces": "{",
    "brackets": "[",
    "quotes": '"',
    "backslashes": "\\",
    "NUL": "\0",
    "digits": "9",
    "emoji": "\U0001f600",
    "joined emoji": "\U0001f468\u200d",
    "combining": "e\u0301",
    "right to left": "\u202e\u05d0",
    "markup": "<|im_start|>",
    "percent": "%s",
}
"""Byte classes that have troubled tokenizers, parsers, templates and patterns."""


@dataclass(frozen=True)
class Request:
    """One request and the statuses that are right."""

    name: str
    body: bytes
    statuses: range = REFUSED
    path: str = COMPLETE
    headers: dict[str, str] = field(default_factory=dict)
    limit_s: float = ANSWER_LIMIT_S


@dataclass(frozen=True)
class Wire:
    """One misuse of a connection; `act` gets a connected socket and may return the answer."""

    name: str
    act: Callable[[socket.socket], bytes | None]


def requests(model: str, kinds: Collection[str] | None = None) -> Iterator[Request]:
    """Yield all requests, or those of some of `KINDS`; there are about 180."""
    for kind, made in KINDS.items():
        if kinds is None or kind in kinds:
            yield from made(model)


def _strings(model: str) -> Iterator[Request]:
    """Every field that takes text, with a megabyte of each byte class."""
    for kind, unit in TROUBLE.items():
        text = unit * (MEGABYTE // len(unit.encode()))
        asked: dict[str, Any] = {"model": model, "prompt": "Hi", "max_tokens": 1}
        said = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        yield Request(f"prompt: {kind}", _json({**asked, "prompt": text}))
        yield Request(f"content: {kind}", _json(said), path=CHAT)
        yield Request(f"model: {kind}", _json({**asked, "model": text}))
        yield Request(f"cache_salt: {kind}", _json({**asked, "cache_salt": text}), ANSWERED)
        yield Request(f"user: {kind}", _json({**asked, "user": text}), ANSWERED)
        yield Request(f"stop: {kind}", _json({**asked, "stop": [text]}), ANSWERED)
        grammar = {"structured_outputs": {"regex": text}}
        yield Request(f"regex: {kind}", _json({**asked, **grammar}))
        yield Request(f"role: {kind}", _json({**said, "messages": [{"role": text}]}), path=CHAT)


def _shapes(model: str) -> Iterator[Request]:
    """Deep and wide JSON."""
    asked = {"model": model, "prompt": "Hi", "max_tokens": 1}
    head = _json(asked)[:-1]
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        for deep in (100, 1_000, 100_000):
            value = opening * deep + "1" + closing * deep
            statuses = ANSWERED if deep < 1_000 else range(200, 500)
            yield Request(
                f"depth {deep} of {opening}", head + f', "x": {value}}}'.encode(), statuses
            )
    yield Request("many fields", _json({**asked, **{f"k{n}": n for n in range(200_000)}}), ANSWERED)
    yield Request("one field 200,000 times", head + b', "x": 1' * 200_000 + b"}", ANSWERED)
    yield Request("many messages", _json({"model": model, "messages": [{}] * 500_000}), path=CHAT)
    yield Request("many prompts", _json({**asked, "prompt": ["a"] * 500_000}))
    # Beside a neighbour each of these prompts may wait for a step of its own.
    yield Request(
        "1,024 prompts", _json({**asked, "prompt": ["a"] * 1_024}), ANSWERED, limit_s=240.0
    )
    yield Request("many stops", _json({**asked, "stop": ["ab"] * 500_000}), ANSWERED)
    bias = {str(n): 1 for n in range(400_000)}
    yield Request("many biases", _json({**asked, "logit_bias": bias}), ANSWERED)
    yield Request("a long number", head + b', "seed": ' + b"9" * MEGABYTE + b"}")
    yield Request(
        "a long fraction", head + b', "temperature": 0.' + b"1" * MEGABYTE + b"}", ANSWERED
    )
    yield Request("not UTF-8", head + b', "user": "' + b"\xff" * MEGABYTE + b'"}')
    yield Request("half a character", head + b', "user": "' + b"\xf0\x9f" * 400_000 + b'"}')
    yield Request("escapes", head + b', "user": "' + b"\\u0000" * 160_000 + b'"}', ANSWERED)
    yield Request("lone surrogates", head + b', "user": "' + b"\\ud800" * 160_000 + b'"}')
    yield Request("too large", head + b', "user": "' + b"a" * 9 * MEGABYTE + b'"}')


def _grammars(model: str) -> Iterator[Request]:
    """Grammars that cost much to compile or to follow."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"k{n}": {} for n in range(30_000)}}
    ambiguous = 'root ::= x x x | "a"\nx ::= root root | root | "b" x | x "b"\n'
    specs: dict[str, dict[str, Any]] = {
        "a brace and spaces": {"regex": "{" + " " * 1600},
        "alternatives": {"regex": "|".join("a" * n for n in range(700))},
        "parentheses": {"regex": "(" * 50_000 + "a" + ")" * 50_000},
        "a deep schema": {"json": deep},
        "a wide schema": {"json": wide},
        "many choices": {"choice": ["x"] * 100_000},
        "an ambiguous grammar": {"grammar": ambiguous},
        "a vast count": {"regex": "a{99999999}"},
    }
    for name, spec in specs.items():
        asked = {"model": model, "prompt": "Hi", "max_tokens": 4, "structured_outputs": spec}
        yield Request(f"grammar: {name}", _json(asked))


def _resumed(model: str) -> Iterator[Request]:
    """Streams that never were, to be resumed (docs/resume.md)."""
    body = _json({"model": model, "prompt": "Hi", "max_tokens": 4, "stream": True})
    said = {
        "tokens of no vocabulary": b':hr [{"i":0,"t":[2000000000]}]\n\ndata: {}\n\n',
        "more tokens than asked for": b':hr [{"i":0,"t":[5,5,5,5,5,5]}]\n\ndata: {}\n\n',
        "a choice that nobody asked for": b':hr [{"i":60000,"t":[5]}]\n\ndata: {}\n\n',
        "log-probabilities": b':hr [{"i":0,"t":[5],"l":[[[5,0.0,1]]]}]\n\ndata: {}\n\n',
        "no JSON": b":hr " + b"[" * MEGABYTE + b"\n\ndata: {}\n\n",
        "many lines": b':hr [{"i":0,"t":[]}]\n\ndata: {}\n\n' * 100_000,
        "blank lines": b"\n" * MEGABYTE,
    }
    for name, stream in said.items():
        headers = {"x-headrace-resume": str(len(stream))}
        yield Request(f"resumed: {name}", stream + body, ANSWERED, headers=headers)


def _long(model: str) -> Iterator[Request]:
    """Well-formed lists of many short parts."""

    def said(kind: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": kind, "text": "x"}]}] * 16_000

    items = {"model": model, "input": said("input_text"), "max_output_tokens": 1}
    yield Request("16,000 items", _json(items), ANSWERED, path=RESPONSES)
    messages = {"model": model, "messages": said("text"), "max_tokens": 1}
    yield Request("16,000 messages", _json(messages), ANSWERED, path=CHAT)


def _malformed(model: str) -> Iterator[Request]:
    """Items that fit no kind of item: each is compared with all kinds."""
    hi = [{"role": "user", "content": "Hi"}]
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": 1}]}
    block = {"role": "user", "content": [{"type": "x"}]}
    text = {"role": "user", "content": "x" * 50_000}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("one malformed part beside a text", RESPONSES, {"input": [text, image]}),
        ("200,000 parts", CHAT, {"messages": [{"role": "user", "content": [{}] * 200_000}]}),
        (
            "22 million log-probabilities",
            CHAT,
            {"messages": hi, "n": 128, "max_tokens": 8192, "logprobs": True, "top_logprobs": 20},
        ),
    ]
    for count in (40, 16_000):
        empty = [{"role": "user", "content": None}] * count
        asked += [
            (f"{count:,} malformed items", RESPONSES, {"input": [image] * count}),
            (f"{count:,} empty items", RESPONSES, {"input": [{}] * count}),
            (f"{count:,} malformed tools", RESPONSES, {"input": "Hi", "tools": [{}] * count}),
            (f"{count:,} messages without content", CHAT, {"messages": empty}),
            (f"{count:,} malformed blocks", MESSAGES, {"messages": [block] * count}),
        ]
    for name, path, body in asked:
        yield Request(name, _json({"model": model, "max_tokens": 1, **body}), path=path)


def _encoded(model: str) -> Iterator[Request]:
    """Compressed bodies, which the gateway refuses."""
    bomb = gzip.compress(b" " * BOMB_BYTES)
    for name, body in (
        ("a gzip bomb", bomb),
        ("a gzip bomb in a gzip bomb", gzip.compress(bomb)),
        ("10,000 empty gzip files", gzip.compress(b"") * 10_000),
        ("half a gzip file", bomb[: len(bomb) // 2]),
    ):
        yield Request(name, body, headers={"content-encoding": "gzip"})
    yield Request("an unknown encoding", bomb, headers={"content-encoding": "br"})


def _heads(model: str) -> Iterator[Request]:
    """Headers: names, values and numbers of them."""
    body = _json({"model": model, "prompt": "Hi", "max_tokens": 1})
    yield Request(
        "a forged forwarder",
        body,
        ANSWERED,
        headers={"x-forwarded-for": "127.0.0.1", "x-headrace-tenant": "other"},
    )
    yield Request("a long request id", body, ANSWERED, headers={"x-request-id": "a" * 30_000})
    yield Request("a long key", body, ANSWERED, headers={"authorization": "Bearer " + "a" * 30_000})
    yield Request("many headers", body, ANSWERED, headers={f"x-{n}": "1" for n in range(3_000)})
    yield Request("too many headers", body, headers={f"x-{n}": "1" * 20 for n in range(10_000)})


KINDS: dict[str, Callable[[str], Iterator[Request]]] = {
    "strings": _strings,
    "shapes": _shapes,
    "grammars": _grammars,
    "headers": _heads,
    "resumed": _resumed,
    "long": _long,
    "malformed": _malformed,
    "encoded": _encoded,
}


def wires(model: str, key: str = "none") -> list[Wire]:
    """All misuses of a connection, by a client that shows this key."""
    body = _json({"model": model, "prompt": "Hi", "max_tokens": 1})
    stream = _json({"model": model, "prompt": "Hi", "max_tokens": 512, "stream": True})
    start = (
        f"POST {COMPLETE} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        "content-type: application/json\r\n"
    )
    head = start + "content-length: %d\r\n\r\n"
    no_key = f"POST {COMPLETE} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"

    def post(payload: bytes, length: int | None = None) -> bytes:
        return (head % (len(payload) if length is None else length)).encode() + payload

    def flooded(sock: socket.socket, piece: bytes) -> bytes:
        """Return the answer to a request that continues after the answer, until the server takes no
        more bytes."""
        with contextlib.suppress(OSError):
            for _ in range(FLOOD_BYTES // len(piece)):
                sock.sendall(piece)
        return _some(sock)

    def half_closed(sock: socket.socket) -> bytes:
        sock.sendall(post(body))
        sock.shutdown(socket.SHUT_WR)
        return _all(sock)

    def half_closed_early(sock: socket.socket) -> bytes:
        sock.sendall(post(body, length=len(body) + 10))
        sock.shutdown(socket.SHUT_WR)
        return _all(sock)

    def pipelined(sock: socket.socket) -> None:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 2_000)
        _some(sock)

    def pipelined_streams(sock: socket.socket) -> None:
        sock.sendall(post(stream) * 50)
        _some(sock)

    def smuggled(sock: socket.socket) -> bytes:
        both = post(body).replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n", 1)
        sock.sendall(both)
        return _some(sock)

    def endless_chunks(sock: socket.socket) -> bytes:
        sock.sendall((start + "transfer-encoding: chunked\r\n\r\n").encode())
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                sock.sendall(b"10000\r\n" + b"a" * 0x10000 + b"\r\n")
        return _some(sock)

    def announced(sock: socket.socket) -> bytes:
        sock.sendall(post(b"", length=10**15))
        return _some(sock)

    def header_flood(sock: socket.socket) -> bytes:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        with contextlib.suppress(ConnectionError):
            for n in range(20_000):
                sock.sendall(b"x-%d: 1\r\n" % n)
        return _some(sock)

    def endless_trailers(sock: socket.socket) -> bytes:
        sock.sendall((start + "transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n").encode())
        return flooded(sock, b"a: b\r\n" * 10_000)

    def endless_trailers_after_a_refusal(sock: socket.socket) -> bytes:
        sock.sendall((no_key + "transfer-encoding: chunked\r\n\r\n").encode())
        time.sleep(0.1)
        return flooded(sock, b"0\r\n" + b"a: b\r\n" * 10_000)

    def a_body_after_a_refusal(sock: socket.socket) -> bytes:
        sock.sendall((no_key + "content-length: 1000000000\r\n\r\n").encode())
        return flooded(sock, b"a" * 65_536)

    def one_byte_after_a_refusal(sock: socket.socket) -> bytes:
        sock.sendall((no_key + "transfer-encoding: chunked\r\n\r\n").encode())
        answer = _all(sock)
        sock.sendall(b"1")
        while sock.recv(65_536):  # until the server ends the connection
            pass
        return answer

    def endless_chunk_extensions(sock: socket.socket) -> bytes:
        sock.sendall((start + "transfer-encoding: chunked\r\n\r\n1;").encode())
        return flooded(sock, b"a" * 65_536)

    def chunks_of_one_byte(sock: socket.socket) -> bytes:
        sock.sendall((start + "transfer-encoding: chunked\r\n\r\n").encode())
        return flooded(sock, b"1\r\na\r\n" * 10_000)

    def an_upgrade_with_a_body(sock: socket.socket) -> bytes:
        asks = b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length"
        sock.sendall(post(body).replace(b"content-length", asks, 1))
        return _all(sock)

    def unread(sock: socket.socket) -> None:
        """Ask for a stream and never read it."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(post(stream))
        time.sleep(2.0)

    def byte_by_byte(sock: socket.socket) -> None:
        for byte in (head % 100).encode()[:40]:
            sock.sendall(bytes([byte]))
            time.sleep(0.05)

    acts: list[Callable[[socket.socket], bytes | None]] = [
        *(half_closed, half_closed_early, pipelined, pipelined_streams, smuggled),
        *(endless_chunks, announced, header_flood, unread, byte_by_byte),
        *(endless_trailers, endless_trailers_after_a_refusal, a_body_after_a_refusal),
        *(one_byte_after_a_refusal, endless_chunk_extensions, chunks_of_one_byte),
        an_upgrade_with_a_body,
    ]
    return [Wire(act.__name__.replace("_", " "), act) for act in acts]


class SlowHeads:
    """Connections that each send one byte of a request's head now and then, and never the end."""

    START = b"GET /health HTTP/1.1\r\nhost: x\r\nx: "

    def __init__(self, connect: Callable[[], socket.socket], count: int) -> None:
        self._sockets = [connect() for _ in range(count)]
        self._sent = 0

    def drip(self) -> int:
        """One more byte on each; how many are still open."""
        byte = self.START[self._sent : self._sent + 1] or b"a"
        self._sent += 1
        open_ones = 0
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.sendall(byte)
                open_ones += 1
        return open_ones

    def close(self) -> None:
        """Hang up on all."""
        for sock in self._sockets:
            sock.close()


class Unread:
    """Connections whose clients ask for more than a connection holds, and never read.

    Each has a body of 400 KB and asks for a stream, then for the metrics a hundred times. The
    stream has one token: what sixty streams cost the engine is no attack, and the same whether
    their clients read or not.

    Args:
        model: as of `requests`. key: of the client.
    """

    def __init__(
        self, connect: Callable[[], socket.socket], count: int, model: str, key: str
    ) -> None:
        asked = {"model": model, "prompt": "Hi", "max_tokens": 1, "stream": True}
        body = _json({**asked, "user": "x" * 400_000})
        shown = f"host: localhost\r\nauthorization: Bearer {key}\r\n"
        head = f"POST {COMPLETE} HTTP/1.1\r\n{shown}content-type: application/json\r\n"
        more = f"GET /metrics HTTP/1.1\r\n{shown}\r\n".encode() * 100
        self._sockets = [connect() for _ in range(count)]
        for sock in self._sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(OSError):
                sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body + more)

    def close(self) -> None:
        """Hang up on all."""
        for sock in self._sockets:
            sock.close()


def send(url: str, request: Request, headers: dict[str, str]) -> tuple[int, str] | None:
    """The status and text of the answer; None where the connection was ended without one, as a
    request may be that is refused while it is still coming.

    By `http.client`, which only joins what it sends: a client that computes takes memory bandwidth
    from the app, if it runs on the same machine.

    Raises:
        OSError, HTTPException: half an answer, or none within `limit_s`.
    """
    at = urlsplit(url)
    made = HTTPConnection(at.hostname or "", at.port, timeout=request.limit_s)
    everything = {"content-type": "application/json", **headers, **request.headers}
    with contextlib.closing(made) as connection:
        try:
            connection.request("POST", request.path, request.body, everything)
            got = connection.getresponse()
            return got.status, got.read().decode(errors="replace")
        except ConnectionError:
            return None


def too_long(status: int, text: str) -> str | None:
    """Return why an answer's size is wrong; None if it is not."""
    size = len(text.encode())
    return f"{status} with {size} bytes" if status >= 400 and size > MAX_ERROR_BYTES else None


def wrong_answer(answer: bytes | None) -> str | None:
    """Return why the answer on a misused connection is wrong; None if it is not."""
    if not answer:
        return None
    status = int(answer.split(b" ", 2)[1])
    return None if status < 500 else f"answered {status}"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _some(sock: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionError):
        return sock.recv(65_536)
    return b""


def _all(sock: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65_536):
            answer += part
            if b"\r\n\r\n" in answer:
                break
    return answer

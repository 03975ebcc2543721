"""The lines between a stream's events, and the ASGI layer that puts them there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.resume.emitted import (
    HEADER,
    MAX_LINES_BYTES,
    EmittedChoice,
    EmittedOutput,
    decode_lines,
    encode_line,
    tokens_of_choice,
)
from headrace_decode.resume.recorder import RECORDER, RecordingMiddleware

TOKENS = st.integers(0, 2**31 - 1)
RANKED = st.tuples(TOKENS, st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 9))
SAID = st.builds(
    EmittedChoice,
    index=st.integers(0, 9),
    tokens=st.lists(TOKENS, max_size=4).map(tuple),
    logprobs=st.none() | st.lists(st.lists(RANKED).map(tuple), max_size=3).map(tuple),
    finish=st.sampled_from([None, "stop", "length"]),
    stop=st.none() | TOKENS | st.text(),
)
HELLO: EmittedOutput = (EmittedChoice(0, (7, 8)),)


@given(st.lists(st.lists(SAID, max_size=3).map(tuple)))
def test_lines_say_what_was_said(outputs: list[EmittedOutput]) -> None:
    lines = b"".join(map(encode_line, outputs))
    assert decode_lines(lines) == outputs
    assert lines.count(b"\n\n") == len(outputs), "each is one event of the stream's format"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (b"data: 1\n\n", "must begin with"),
        (encode_line(HELLO)[:-1], "not whole"),
        (encode_line(HELLO) + b":hr [[0,", "not whole"),
        (b':hr [{"i":0,"t":["a"]}]\n\n', "int"),
        (b':hr [{"i":0,"t":[-1]}]\n\n', ">= 0"),
        (b':hr [{"i":0,"t":[4294967296]}]\n\n', "<"),
        (b":hr 7\n\n", "array"),
        (encode_line("two prompts"), "two prompts"),
    ],
)
def test_what_are_no_lines_is_refused(lines: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode_lines(lines)


def test_a_choices_tokens_are_those_of_all_outputs() -> None:
    outputs: list[EmittedOutput] = [
        (EmittedChoice(0, (1, 2)), EmittedChoice(1, (9,))),
        (EmittedChoice(0, (3,)),),
    ]
    assert tokens_of_choice(outputs, 0) == [1, 2, 3]
    assert tokens_of_choice(outputs, 1) == [9]


class Replica:
    """An application that says something before each event, behind the layer."""

    def __init__(self, *, streams: bool = True) -> None:
        self.streams, self.body, self.again = streams, b"", []
        self.app = RecordingMiddleware(self._answer)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            self.body += message.get("body", b"")
            more = message.get("more_body", False)
        self.length = dict(scope["headers"]).get(b"content-length")
        kind = b"text/event-stream; charset=utf-8" if self.streams else b"application/json"
        recorder = RECORDER.get()
        if recorder is not None:
            self.again = recorder.begin(None)
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(2):
            if recorder is not None:
                recorder.add((EmittedChoice(0, (number,)),))
            await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
        if recorder is not None and scope["path"] == "/twice":
            recorder.begin(None)
            recorder.add(HELLO)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def asked(
        self, said: bytes | None, body: Iterable[bytes] = (b"",), path: str = "/"
    ) -> tuple[list[dict[str, Any]], bytes]:
        parts = list(body)
        headers = [(b"content-length", b"%d" % sum(map(len, parts)))]
        if said is not None:
            headers.append((HEADER, said))
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app({"type": "http", "path": path, "headers": headers}, receive, send)
        return sent, b"".join(message.get("body", b"") for message in sent)


async def test_a_stream_tells_what_was_said_before_the_events_that_it_led_to() -> None:
    sent, body = await Replica().asked(b"0")
    assert body == (
        b':hr [{"i":0,"t":[0]}]\n\ndata: x\n\n:hr [{"i":0,"t":[1]}]\n\ndata: x\n\ndata: [DONE]\n\n'
    )
    assert (HEADER, b"1") in sent[0]["headers"]


@pytest.mark.parametrize(("said", "streams"), [(None, True), (b"0", False)])
async def test_nobody_else_is_told(said: bytes | None, streams: bool) -> None:
    sent, body = await Replica(streams=streams).asked(said)
    assert body == b"data: x\n\ndata: x\n\ndata: [DONE]\n\n"
    assert (HEADER, b"1") not in sent[0]["headers"]


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
async def test_what_is_to_be_taken_up_comes_before_the_clients_body(pieces: int) -> None:
    lines, replica = encode_line(HELLO), Replica()
    whole = lines + b'{"stream": true}'
    step = -(-len(whole) // pieces)
    parts = [whole[at : at + step] for at in range(0, len(whole), step)]
    await replica.asked(b"%d" % len(lines), parts)
    assert replica.again == [HELLO]
    assert replica.body == b'{"stream": true}' and replica.length == b"16"


async def test_a_request_that_asks_the_engine_twice_cannot_be_taken_up() -> None:
    _, body = await Replica().asked(b"0", path="/twice")
    assert body.endswith(b':hr "one request has several prompts"\n\ndata: [DONE]\n\n')


@pytest.mark.parametrize(
    ("said", "body"),
    [(b"x", b""), (b"%d" % (MAX_LINES_BYTES + 1), b""), (b"9", b"short"), (b"4", b"data: 1")],
)
async def test_a_wrong_header_is_refused(said: bytes, body: bytes) -> None:
    replica = Replica()
    sent, _ = await replica.asked(said, [body])
    assert sent[0]["status"] == 400 and replica.body == b""

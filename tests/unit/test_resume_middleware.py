"""A client resumes its stream at the replicas themselves, where no gateway is in the way."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx
import pytest

from headrace.client import AsyncResumingTransport
from headrace_decode.resume.emitted import HEADER, RESUME, EmittedChoice
from headrace_decode.resume.recorder import RECORDER
from headrace_decode.resume.resume_middleware import MAX_RECEIVED_BYTES, ResumeMiddleware

ASKED = {"prompt": "Hi", "stream": True}
WORDS = ["one", "two", "three", "four"]
EVENTS = [b'data: {"text":"%s"}\n\n' % word.encode() for word in WORDS] + [b"data: [DONE]\n\n"]
NAME = RESUME.decode()
DIED = b'data: {"error":{"message":"EngineDeadError"}}\n\n'


class Replica:
    """vLLM's application, as far as the middleware sees it: one token, one event.

    Args:
        words: that it answers.
        dies_behind: events, after which the stream ends with vLLM's error event.
    """

    def __init__(self, words: Iterable[str] = WORDS, dies_behind: int | None = None) -> None:
        self.words, self.dies_behind = list(words), dies_behind
        self.dead = False
        self.bodies: list[Any] = []
        self.again: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        assert dict(scope["headers"])[b"content-length"] == b"%d" % len(body)
        self.bodies.append(json.loads(body))
        recorder = RECORDER.get()
        if recorder is not None:
            self.again.append(len(recorder.begin(None)))
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        for number, word in enumerate(self.words):
            if number == self.dies_behind:
                self.dead = True
                await send({"type": "http.response.body", "body": DIED, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return
            if recorder is not None:
                recorder.add((EmittedChoice(0, (number,)),))
            event = b'data: {"text":"%s"}\n\n' % word.encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": EVENTS[-1]})

    def server(self) -> ResumeMiddleware:
        return ResumeMiddleware(self, {}, lambda: self.dead)


async def ask(server: Any, had: bytes = b"", told: str | None = None) -> httpx.Response:
    headers = {"content-type": "application/json", NAME: told or str(len(had))}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(server), base_url="http://replica"
    ) as client:
        content = had + json.dumps(ASKED).encode()
        return await client.post("/v1/completions", content=content, headers=headers)


class Proxy(httpx.AsyncBaseTransport):
    """Gives each request to the next replica, and breaks answers that have no end."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = list(replicas)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        whole, parts, headers = False, [], []

        async def send(message: Any) -> None:
            nonlocal whole
            if message["type"] == "http.response.start":
                headers.extend(message["headers"])
            else:
                parts.append(message["body"])
                whole = not message.get("more_body", False)

        body = request.content

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        heads = [(name.lower(), value) for name, value in request.headers.raw]
        scope = {"type": "http", "path": request.url.path, "headers": heads}
        await self.replicas.pop(0).server()(scope, receive, send)

        async def content() -> AsyncIterator[bytes]:
            for part in parts:
                yield part
            if not whole:
                raise httpx.RemoteProtocolError("the connection broke")

        return httpx.Response(200, headers=headers, content=content())


async def test_who_does_not_ask_gets_the_applications_own_answer() -> None:
    replica = Replica()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(replica.server()), base_url="http://replica"
    ) as client:
        answer = await client.post("/v1/completions", json=ASKED)
    assert answer.content == b"".join(EVENTS) and NAME not in answer.headers
    assert replica.again == []


async def test_who_asks_gets_the_lines_between_the_events() -> None:
    answer = await ask(Replica().server())
    assert answer.headers[NAME] == "1" and HEADER.decode() not in answer.headers
    kept = [part for part in answer.content.split(b"\n\n") if not part.startswith(b":hr")]
    assert b"\n\n".join(kept) == b"".join(EVENTS)
    assert answer.content.count(b":hr ") == len(WORDS)


async def test_a_stream_goes_on_behind_what_the_client_has_wherever_it_was_cut() -> None:
    whole = (await ask(Replica().server())).content
    ends = [at + 2 for at in range(len(whole)) if whole[at : at + 2] == b"\n\n"]
    for cut in ends:
        replica = Replica()
        rest = (await ask(replica.server(), whole[:cut])).content
        given_on = whole[:cut] + rest
        events = [part for part in given_on.split(b"\n\n") if not part.startswith(b":hr")]
        assert b"\n\n".join(events) == b"".join(EVENTS)
        assert replica.bodies == [ASKED]


async def test_a_stream_whose_engine_dies_breaks_and_goes_on_at_another_replica() -> None:
    first, second = Replica(dies_behind=2), Replica()
    async with httpx.AsyncClient(
        transport=AsyncResumingTransport(Proxy(first, second)), base_url="http://proxy"
    ) as client:
        answer = await client.post("/v1/completions", json=ASKED)
    assert answer.content == b"".join(EVENTS)
    assert (first.again, second.again) == ([0], [2])


async def test_an_error_of_an_engine_that_lives_is_the_clients() -> None:
    replica = Replica(dies_behind=1)
    server = ResumeMiddleware(replica, {}, lambda: False)
    answer = await ask(server)
    assert answer.content.endswith(DIED)


async def test_an_answer_that_differs_ends_with_an_error() -> None:
    whole = (await ask(Replica().server())).content
    longer = Replica([*WORDS[:1]])
    answer = await ask(longer.server(), whole)
    last = json.loads(answer.content.split(b"data: ")[-1])
    assert last["error"]["code"] == "replica_lost"


@pytest.mark.parametrize("told", ["-1", "many", str(MAX_RECEIVED_BYTES + 1), "5000"])
async def test_a_number_that_fits_no_body_is_refused(told: str) -> None:
    answer = await ask(Replica().server(), told=told)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, NAME)


async def test_a_stream_that_said_it_cannot_be_taken_up_is_not_resumed() -> None:
    had = b':hr "it has images"\n\n' + EVENTS[0]
    answer = await ask(Replica().server(), had)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cannot_resume")

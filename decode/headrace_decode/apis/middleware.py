"""The layer between vLLM's application and its clients: checks requests, completes answers.

ASGI. The other modules of this package make the changes for each API. A request for any other path,
and the events of a chat's stream, pass unchanged.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from headrace_decode.apis import (
    errors,
    messages,
    prompt_usage,
    request_checks,
    responses,
    retention,
)
from headrace_decode.apis.forced_tools import with_strict_tools
from headrace_decode.apis.prompt_usage import USAGE, PromptUsage
from headrace_decode.apis.request_checks import EngineAbilities, Refusal, RequestFields
from headrace_decode.apis.retention import RETENTION
from headrace_decode.http.internal_port import MAX_RETENTION, REQUEST_ID, TENANT
from headrace_engine.asgi_body import read_body, send_whole, with_body
from headrace_engine.usage.request_usage import HEADER
from headrace_engine.usage.usage_book import UsageBook

logger = logging.getLogger("headrace.decode")

Message = MutableMapping[str, Any]
ASGIApp = Callable[[Message, Any, Any], Awaitable[None]]
LONG_BYTES = 256 * 1024
"""Size above which a body is long."""
REST_S_A_BYTE = 20e-9
"""Rest before a pass over a long body, in seconds a byte: about as long as a pass takes."""
USAGE_WAIT_S = 1.0
"""Longest wait of a whole answer until the engine has said what the request cost. It waits at all
if the engine continues the request for a step, such as one with a stop string."""
_END = b"\n\n"
_REQUEST_ID = b"x-request-id"
_BEFORE_ENGINE = (b"event: response.created\n", b"event: response.in_progress\n")
"""Prefixes of the events that vLLM sends before it calls the engine."""


class ApiMiddleware:
    """ASGI application that checks requests and completes answers of vLLM's application.

    Args:
        app: vLLM's application.
        abilities: the abilities of the engine and the application.
        engine_died: returns whether the engine died; then a 500 is not the client's fault.
        book: has what each request cost, for the answer's header; None without it.
    """

    def __init__(
        self,
        app: ASGIApp,
        abilities: EngineAbilities,
        engine_died: Callable[[], bool],
        book: UsageBook | None = None,
    ) -> None:
        self._app, self._abilities, self._engine_died = app, abilities, engine_died
        self._book = book
        self._long_body = asyncio.Lock()

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Answer one request."""
        path = scope["path"] if scope["type"] == "http" else ""
        anthropic = path.startswith(request_checks.MESSAGES)
        if path not in request_checks.PATHS or scope["method"] != "POST":
            answer = _AnthropicErrors(send) if anthropic else None
            await self._app(scope, receive, send if answer is None else answer.send)
            return
        body = await read_body(receive)
        if body is None:
            return
        await self._rest_before_pass(body)
        fields, retain_s = request_checks.fields_of(body), 0.0
        if fields is not None:
            refused_or_s: float | Refusal | None
            refused_or_s = request_checks.find_refusal(path, fields, self._abilities)
            if refused_or_s is None:
                if retention.reads_blocks(path, body):
                    await self._rest_before_pass(body)
                refused_or_s = retention.requested_s(path, fields)
            if isinstance(refused_or_s, Refusal):
                await _refuse(send, path, refused_or_s)
                return
            retain_s = min(refused_or_s, MAX_RETENTION.get())
            body = with_strict_tools(path, fields, body)
            scope = _named(scope, path, fields)
        scope, receive = with_body(scope, body, receive)
        await self._rest_before_pass(body)
        counted = PromptUsage()
        before, retention_before = USAGE.set(counted), RETENTION.set(retain_s)
        try:
            shaper = _AnswerShaper(
                path, fields or RequestFields(), counted, send, self._engine_died, self._book
            )
            try:
                await self._app(scope, receive, shaper.send)
            except Exception:
                if not await shaper.refuse_late():
                    raise
        finally:
            USAGE.reset(before)
            RETENTION.reset(retention_before)

    async def _rest_before_pass(self, body: bytes) -> None:
        """If the body is long, wait for other long bodies, and rest before the next pass over it.

        A pass blocks the event loop for 10 to 30 ms, and a token needs several turns of the loop to
        leave the replica. Without rests it would wait for as many passes.
        """
        if len(body) > LONG_BYTES:
            async with self._long_body:
                await asyncio.sleep(len(body) * REST_S_A_BYTE)


class _AnswerShaper:
    """The answer of vLLM's application on its way to the client.

    A whole answer that must be changed is collected first; streams pass event by event. A stream
    begins with the engine's first output, so that a refusal of the engine is answered with its own
    status.
    """

    def __init__(
        self,
        path: str,
        fields: RequestFields,
        counted: PromptUsage,
        send: Any,
        engine_died: Callable[[], bool],
        book: UsageBook | None,
    ) -> None:
        self._path, self._counted, self._send = path, counted, send
        self._engine_died, self._book = engine_died, book
        self._only_echo = fields.echo is True and fields.max_tokens == 0
        self._corrects = self._only_echo or _are_several(fields.prompt)
        self._start: Message | None = None
        self._body: list[bytes] = []
        self._waiting: Message | None = None
        self._held_events: list[bytes] = []
        self._refused = False
        self._change: Callable[[bytes], bytes] | None = None
        self._rewriter = responses.EventRewriter()
        self._changes: dict[str, Callable[[bytes], bytes]] = {
            request_checks.MESSAGES: messages.event,
            request_checks.RESPONSES: self._rewriter.rewrite,
        }
        if self._corrects:
            self._changes[request_checks.COMPLETIONS] = self._completion_event

    async def send(self, message: Message) -> None:
        """Send an ASGI message, changed for the API's clients."""
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._start is not None:
            self._body.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._finish()
        elif self._waiting is not None and not await self._may_begin(message):
            pass
        elif self._change is not None and message["type"] == "http.response.body":
            await self._events(message)
        else:
            await self._send(message)

    async def refuse_late(self) -> bool:
        """Refuse a request if the engine refused it before its stream began.

        Return whether the request is refused.
        """
        refusal = self._counted.refusal
        if refusal is None or self._waiting is None:
            return self._refused
        self._waiting, self._refused = None, True
        await _refuse(self._send, self._path, Refusal(refusal[0], refusal[1] or ""))
        return True

    async def _may_begin(self, message: Message) -> bool:
        """Return whether the stream can begin with this part.

        Events that vLLM sends before it calls the engine are held until then.
        """
        assert self._waiting is not None
        body = message.get("body", b"")
        if body.startswith(_BEFORE_ENGINE) and message.get("more_body", False):
            self._held_events.append(body)
            return False
        if self._counted.refusal is not None:
            if not message.get("more_body", False):
                await self.refuse_late()
            return False
        start, self._waiting = self._waiting, None
        await self._send(start)
        message["body"] = b"".join([*self._held_events, body])
        return True

    async def _begin(self, message: Message) -> None:
        if _content_type(message).startswith(b"text/event-stream"):
            self._change = self._changes.get(self._path)
            self._waiting = message
            return
        if message["status"] == 200 and self._book is not None:
            message["headers"] = [*message["headers"], *await usage_header(self._book)]
        if message["status"] == 200 and self._path not in self._changes:
            await self._send(message)
        else:
            self._start = message

    async def _finish(self) -> None:
        assert self._start is not None
        message, body, path = self._start, b"".join(self._body), self._path
        if message["status"] != 200:
            status, body = self._error(message["status"], body)
            message["status"] = status
        elif path == request_checks.MESSAGES:
            body = messages.answer(body)
        elif path == request_checks.RESPONSES:
            body = responses.answer(body)
        else:
            body = prompt_usage.completion(body, self._counted, only_echo=self._only_echo)
        await send_whole(self._send, message, body)

    def _error(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Return an error in the API's format.

        If vLLM failed before any prompt reached the engine, and the engine lives, the error is the
        request's fault.
        """
        if status == 500 and not self._counted.prompts and not self._engine_died():
            reason = errors.message_of(body) or "no reason is known"
            logger.warning("a request was not understood: %s", reason)
            status = 400
            message = f"This request cannot be made into a prompt: {reason}"
            body = json.dumps(errors.openai_error(message, None)).encode()
        if self._path == request_checks.MESSAGES:
            body = messages.error(status, body)
        return status, body

    def _completion_event(self, event: bytes) -> bytes:
        return prompt_usage.completion_event(event, self._counted, only_echo=self._only_echo)

    async def _events(self, message: Message) -> None:
        assert self._change is not None
        self._body.append(message.get("body", b""))
        whole, _, rest = b"".join(self._body).rpartition(_END)
        self._body = [rest] if rest else []
        more = message.get("more_body", False)
        events = [self._change(event + _END) for event in whole.split(_END)] if whole else []
        if not more:
            events += [self._rewriter.rest(), *self._body]
        body = b"".join(events)
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


class _AnthropicErrors:
    """An answer whose errors are changed to Anthropic's format; anything else is unchanged."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._start: Message | None = None
        self._body: list[bytes] = []

    async def send(self, message: Message) -> None:
        """Send an ASGI message; an error is collected and sent in Anthropic's format."""
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = messages.error(self._start["status"], b"".join(self._body))
                await send_whole(self._send, self._start, body)


async def usage_header(book: UsageBook) -> list[tuple[bytes, bytes]]:
    """Return the header with the usage of this task's request; none if it is not known."""
    request_id = REQUEST_ID.get()
    if request_id is None:
        return []
    for record in book.find(request_id, TENANT.get() or ""):
        if await record.completed(USAGE_WAIT_S):
            return [(HEADER, record.whole().header())]
    return []


def _named(scope: Message, path: str, fields: RequestFields) -> Message:
    """Return the scope with the body's request id in the header, from which vLLM takes it."""
    if path not in (request_checks.CHAT, request_checks.COMPLETIONS) or not isinstance(
        fields.request_id, str
    ):
        return scope
    headers = [head for head in scope["headers"] if head[0] != _REQUEST_ID]
    return {**scope, "headers": [*headers, (_REQUEST_ID, fields.request_id.encode())]}


def _are_several(prompt: msgspec.Raw) -> bool:
    """Return whether a completion's prompt is a list of prompts and not of token ids."""
    start = bytes(memoryview(prompt)[:64])
    return start.startswith(b"[") and not start[1:].lstrip()[:1].isdigit()


def _content_type(message: Message) -> bytes:
    return next((value for name, value in message["headers"] if name == b"content-type"), b"")


async def _refuse(send: Any, path: str, refusal: Refusal) -> None:
    if path == request_checks.MESSAGES:
        document = errors.anthropic_error(400, refusal.message)
    else:
        document = errors.openai_error(refusal.message, refusal.param)
    start = {
        "type": "http.response.start",
        "status": 400,
        "headers": [(b"content-type", b"application/json")],
    }
    await send_whole(send, start, json.dumps(document).encode())

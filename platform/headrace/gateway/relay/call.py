"""A client's request on its way through the gateway, and the replica's answer to it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from headrace.gateway.asgi import Write
from headrace.gateway.errors import Headers
from headrace.gateway.ingress.body_budget import BodyReservation
from headrace.gateway.relay.dialect import OPENAI, Dialect, dialect_of
from headrace.gateway.relay.request_history import FinishedRequest
from headrace.gateway.replica_pool import Lease
from headrace.gateway.upstream import Reply
from headrace.router.cluster import NO_TARGETS, LatencyTargets, Prompt
from headrace.router.plan import Plan
from headrace_decode.http.public_routes import Route
from headrace_decode.resume.emitted import HEADER
from headrace_decode.resume.journal import Journal
from headrace_decode.techniques import RequestedTechniques

MAX_LISTED_REQUESTS = 50
"""Maximum number of requests in flight that are listed."""


class AnswerRecorder(Protocol):
    """The keeper of an answer; it may change what the client gets of it."""

    @property
    def holds_last(self) -> bool:
        """Whether `rewrite` holds the last event, which `finish` returns."""

    @property
    def is_background(self) -> bool:
        """Whether the answer is made after the client's request has ended."""

    def rewrite(self, events: bytes) -> bytes:
        """Return the events to send now, for whole events that arrived."""

    async def finish(self) -> bytes:
        """Keep the answer, and return the last event; nothing unless it is held."""

    async def whole(self, body: bytes) -> bytes:
        """Keep an answer that is no stream, and return it."""


@dataclass(slots=True)
class Call:
    """One client request on its way, with its progress and result.

    Attributes:
        route: the replica's operation that it asks for; None for the gateway's own documents.
        encodings: values of the client's `content-encoding` headers.
        started: `perf_counter` at the request's head.
        tenant: the tenant that the key proves; None if no keys are configured.
        waited_s: seconds spent waiting for the client's body, in the queue, for a plan or for a
            replica.
        model_id: own name of the model that answers; empty before it is known.
        gateway_s: seconds of gateway code before the replica got the request; None before that.
        status: the HTTP status sent to the client; 0 before that.
        ttft_s: seconds from the start to the first body bytes sent.
        last_events: the events of a stream that were sent last.
        reservation: the body's part of the budget.
        resume_lines: the lines of its stream so far, for the replica that resumes it.
        resumed_model: the model that the client's part of the stream names; empty if it has none.
        journal: the journal of a client that wants to resume its stream (`client_resume`).
        techniques: its choice of lossy techniques; None on routes without a prompt.
        write_nowait: writes to the client; see `asgi.Write`.
        on_first: called when the first bytes of a stream's body have been sent.
        prompt: the question for its prompt while it is asked, and once it is known; see
            `Placer.read_prompt`.
        targets: returns the targets of the request's class, for its plan.
        on_plan: called with each plan that is made for the request.
        tokens: number of tokens in the answer so far; None if unknown.
        resumed: how often another replica took over its stream.
        error: code of the error that the client got; None if it got none.
        received: the beginning of the stream that the client has and wants to resume.
        recorder: keeps its answer; None if it is not kept.
        max_retention_s: maximum seconds for which it may have its prompt's KV retained.
        own_id_bytes: number of leading bytes of the body that differ each time the client sends it.
    """

    request_id: bytes
    method: str
    target: str
    headers: Headers
    body: bytes = b""
    affinity: bytes = b""
    tenant: str | None = None
    route: Route | None = None
    encodings: tuple[bytes, ...] = ()
    started: float = field(default_factory=perf_counter)
    waited_s: float = 0.0
    gateway_s: float | None = None
    replica_id: str = ""
    model_id: str = ""
    status: int = 0
    ttft_s: float | None = None
    streamed: bool = False
    sent_bytes: int = 0
    last_events: bytes = b""
    reservation: BodyReservation | None = None
    resume_lines: bytes = b""
    resumed_model: str = ""
    journal: Journal | None = None
    techniques: RequestedTechniques | None = None
    write_nowait: Write = lambda piece: False
    on_first: Callable[[], None] = lambda: None
    targets: Callable[[], LatencyTargets] = lambda: NO_TARGETS
    on_plan: Callable[[Plan], None] = lambda plan: None
    tokens: int | None = None
    resumed: int = 0
    error: str | None = None
    received: bytes = b""
    recorder: AnswerRecorder | None = None
    own_id_bytes: int = 0
    max_retention_s: int = 0
    prompt: asyncio.Future[Prompt | None] | None = None

    def replace_body(self, body: bytes) -> None:
        """Put another body in the place of the client's, within its budget.

        Raises:
            ApiError: 429, there is no room for it.
        """
        if self.reservation is not None and len(body) > len(self.body):
            self.reservation.add(len(body) - len(self.body))
        self.body = body

    def drop_body(self) -> None:
        """Free the body, because no replica will be asked again."""
        self.body = b""
        if self.reservation is not None:
            self.reservation.release()

    @property
    def repeated_body(self) -> memoryview:
        """The part of the body that is the same each time the client sends the request."""
        return memoryview(self.body)[self.own_id_bytes :]

    @property
    def path(self) -> str:
        """The path that it asks for, without its query."""
        return self.target.partition("?")[0]

    @property
    def dialect(self) -> Dialect:
        """The dialect in which its errors are written."""
        return OPENAI if self.route is None else dialect_of(self.route.api)


def in_flight(calls: Iterable[Call], unix_s: float) -> list[dict[str, Any]]:
    """Describe the oldest calls, at most `MAX_LISTED_REQUESTS`.

    Args:
        calls: oldest first.
        unix_s: Unix time now.
    """
    now = perf_counter()
    return [
        {
            "id": call.request_id.decode("latin-1"),
            "path": call.path,
            "at": round(unix_s - (now - call.started), 3),
            "age_s": round(now - call.started, 3),
            "tenant": call.tenant,
            "model": call.model_id,
            "queue_s": round(call.waited_s, 4),
            "ttft_s": call.ttft_s,
            "tokens": call.tokens,
            "replica": call.replica_id,
        }
        for call in itertools.islice(calls, MAX_LISTED_REQUESTS)
    ]


def finished(call: Call, unix_s: float) -> FinishedRequest:
    """Describe a call that has just ended.

    Args:
        unix_s: Unix time now.
    """
    total_s = perf_counter() - call.started
    return FinishedRequest(
        id=call.request_id.decode("latin-1"),
        path=call.path,
        at=unix_s - total_s,
        status=call.status,
        error=call.error,
        tenant=call.tenant,
        model=call.model_id,
        streamed=call.streamed,
        replica=call.replica_id,
        queue_s=call.waited_s,
        ttft_s=call.ttft_s,
        total_s=total_s,
        tokens=call.tokens,
        resumed=call.resumed,
    )


@dataclass(slots=True)
class Answer:
    """A reply that may be passed on.

    Attributes:
        body: the first bytes of a stream. Of any other reply, the whole body, or its beginning if
            the gateway may not hold more (`retry.MAX_BUFFERED_BYTES`).
        reservation: the body's part of the budget; None for a stream.
        is_whole: whether nothing follows `body`.
    """

    lease: Lease
    reply: Reply
    body: bytes
    streamed: bool
    reservation: BodyReservation | None = None
    is_whole: bool = True

    def close(self) -> None:
        """End the exchange with the replica; if the reply is not over, this aborts the request."""
        self.reply.close()
        self.lease.release()
        if self.reservation is not None:
            self.reservation.release()

    @property
    def has_resume_lines(self) -> bool:
        """Whether this is a stream with lines to resume from (`headrace_decode.resume.emitted`)."""
        return self.streamed and any(name == HEADER for name, _ in self.reply.headers)

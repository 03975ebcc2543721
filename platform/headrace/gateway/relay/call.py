"""A client's request on its way through the gateway, and the answer that it got."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from headrace.gateway.asgi import Write
from headrace.gateway.door.budget import Held
from headrace.gateway.errors import Headers
from headrace.gateway.relay.dialect import OPENAI, Dialect, dialect_of
from headrace.gateway.replicas import Lease
from headrace.gateway.upstream import Reply
from headrace_decode.replay.journal import Journal
from headrace_decode.replay.said import HEADER
from headrace_decode.routes import Route
from headrace_decode.techniques import Asked

SHOWN = 50
"""Maximum number of in-flight requests that the status lists."""


@dataclass(slots=True)
class Call:
    """One client request on its way, and what became of it.

    Attributes:
        route: the replica's operation that it asks for; None for the gateway's own documents.
        encodings: values of the client's `content-encoding` headers.
        started: `perf_counter` at the request's head.
        tenant: whom the key proves; None where no keys are configured.
        waited_s: seconds spent waiting for the client's body or for a replica.
        own_s: seconds of gateway code before the replica got the request; None before that.
        status: sent to the client; 0 before that.
        ttft_s: seconds from the start to the first body bytes sent.
        last: the events of a stream that were sent last.
        held: counts the body.
        said: the lines of its stream so far, for the replica that takes it up.
        journal: of a client that wants to resume its stream (`resume`).
        techniques: what it says of lossy techniques; None on routes without a prompt.
        write_at_once: writes to its client, as of `asgi`.
        on_first: called when the first bytes of a stream's body have been sent.
    """

    request_id: bytes
    method: str
    target: str
    headers: Headers
    body: bytes = b""
    affinity: bytes = b""
    tenant: str | None = None
    draftable_tokens: int = 0
    route: Route | None = None
    encodings: tuple[bytes, ...] = ()
    started: float = field(default_factory=perf_counter)
    waited_s: float = 0.0
    own_s: float | None = None
    replica_id: str = ""
    status: int = 0
    ttft_s: float | None = None
    streamed: bool = False
    sent_bytes: int = 0
    last: bytes = b""
    held: Held | None = None
    said: bytes = b""
    journal: Journal | None = None
    techniques: Asked | None = None
    write_at_once: Write = lambda piece: False
    on_first: Callable[[], None] = lambda: None

    def drop_body(self) -> None:
        """The body is needed no more: no replica will be asked again."""
        self.body = b""
        if self.held is not None:
            self.held.release()

    @property
    def dialect(self) -> Dialect:
        """How its errors are written."""
        return OPENAI if self.route is None else dialect_of(self.route.api)


def in_flight(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Describe the oldest calls for the status, at most `SHOWN`.

    Args:
        calls: oldest first.
    """
    now = perf_counter()
    return [
        {
            "id": call.request_id.decode("latin-1"),
            "path": call.target.partition("?")[0],
            "age_s": round(now - call.started, 3),
            "ttft_s": call.ttft_s,
            "sent_bytes": call.sent_bytes,
            "replica": call.replica_id,
        }
        for call in itertools.islice(calls, SHOWN)
    ]


@dataclass(slots=True)
class Answer:
    """A reply that may be passed on: of a stream the first bytes, of any other the whole body or
    its first `relay.HELD_BYTES`.

    Attributes:
        held: counts the body; None for a stream.
        is_whole: whether nothing follows `body`.
    """

    lease: Lease
    reply: Reply
    body: bytes
    streamed: bool
    held: Held | None = None
    is_whole: bool = True

    def close(self) -> None:
        """End the exchange with the replica; before its end this aborts the request there."""
        self.reply.close()
        self.lease.release()
        if self.held is not None:
            self.held.release()

    @property
    def tells(self) -> bool:
        """Whether this is a stream with lines (`headrace_decode.replay.said`)."""
        return self.streamed and any(name == HEADER for name, _ in self.reply.headers)

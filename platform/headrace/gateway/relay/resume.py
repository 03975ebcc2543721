"""A client resumes its stream, at this gateway or another one, after its gateway died.

Gateways share nothing for it: the client has everything. A request with the header `RESUME` gets
its stream with the lines of `headrace_decode.replay.said` between the events, as comments. To
resume, the client sends the same request again with what it has of the stream before the body, and
how many bytes these are in the header. The journal reads them, and the stream goes on behind them
as one does whose replica was lost.

What the client says is not trusted: `headrace_decode.replay.checks` sees to the lines, and a count
of events that is wrong ends this stream alone.
"""

from __future__ import annotations

from headrace.gateway import errors
from headrace.gateway.relay.call import Call
from headrace_decode.replay.journal import Journal


async def prepare(call: Call, told: bytes | None) -> None:
    """Take the stream so far off the body.

    Args:
        told: the client's header.

    Raises:
        ApiError: 400, the header does not fit the body; 409, this stream cannot be resumed.
    """
    if told is None:
        return
    size = int(told) if told.isdigit() and len(told) < 12 else -1
    if not 0 <= size <= len(call.body):
        raise errors.bad_resume(len(call.body))
    call.journal = Journal(call.dialect.events, tells=True)
    if not size:
        return
    had, call.body = call.body[:size], call.body[size:]
    await call.journal.read(had)
    if call.journal.why_not is not None:
        raise errors.cannot_resume(call.journal.why_not)
    call.said = call.journal.take_up()

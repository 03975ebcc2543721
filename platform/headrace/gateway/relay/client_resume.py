"""Resuming a stream for a client, at this gateway or another one, after the client's gateway died.

Gateways share no state for this: the client has everything. A request with the header `RESUME` gets
its stream with the lines of `headrace_decode.resume.emitted` between the events, as comments. To
resume, the client sends the same request again, with the received part of the stream before the
body. The header gives the number of bytes of this part. The journal reads the part, and the stream
continues after it like a stream whose replica was lost.

The client's part is not trusted: `headrace_decode.resume.emitted_checks` checks the lines, and a
wrong count of events ends this stream alone.
"""

from __future__ import annotations

import re

from headrace.gateway import errors
from headrace.gateway.relay.call import Call
from headrace_decode.resume.journal import Journal

RECEIVED_BYTES = 16 * 1024
"""Bytes of a stream's beginning that have the id of its response and the name of its model."""
_MODEL = re.compile(rb'"model": ?"([^"\\]{1,256})"')


async def prepare(call: Call, header: bytes | None) -> None:
    """Split the received part of the stream from the body, and read it into the call's journal.

    Args:
        header: the client's header; None if the client does not want to resume streams.

    Raises:
        ApiError: 400, the header does not fit the body; 409, this stream cannot be resumed.
    """
    if header is None:
        return
    size = int(header) if header.isdigit() and len(header) < 12 else -1
    if not 0 <= size <= len(call.body):
        raise errors.bad_resume(len(call.body))
    call.journal = Journal(call.dialect.events, sends_lines=True)
    if not size:
        return
    had, call.body = call.body[:size], call.body[size:]
    call.received = had[:RECEIVED_BYTES]
    if named := _MODEL.search(call.received):
        call.resumed_model = named[1].decode(errors="replace")
    await call.journal.read(had)
    if call.journal.why_not is not None:
        raise errors.cannot_resume(call.journal.why_not)
    call.resume_lines = call.journal.begin_resume()

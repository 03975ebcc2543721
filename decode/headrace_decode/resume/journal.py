"""A record of the events a stream's client has received, with which another replica resumes it.

A replica reports its engine's outputs in lines between the events of a stream (`emitted`).
The journal removes the lines and counts the events after each. To resume the stream, another
replica receives the lines of all events that the client has. It passes the same outputs through its
serving layer. Its answer therefore begins with the same lines and as many events. The
journal drops these events, and raises `Diverged` if lines or counts differ. The ids that the first
replica made up stay valid: they replace the second replica's ids in the events that follow.

A client that wants to resume its stream gets the lines, too, and sends back all it has received. A
new journal reads that like an answer and reaches the state of the first journal. The gateway holds
the journal.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace_decode.http.event_loop import PIECE_BYTES, run_then_rest
from headrace_decode.resume.emitted import END, MARK, MAX_LINES_BYTES, count_tokens, encode_line

_REFUSED = MARK + b'"'


@dataclass(frozen=True, slots=True)
class Events:
    """The patterns that a journal looks for in the events of one API's streams.

    Attributes:
        failed: prefixes of an event that reports a failure.
        ids: pattern of the ids that a replica makes up and later events refer to; None if the API
            has none.
    """

    failed: tuple[bytes, ...]
    ids: re.Pattern[bytes] | None = None


EVENTS = {
    "openai": Events((b'data: {"error"',)),
    "responses": Events((b"event: error\n",), re.compile(rb"\b[a-z]+_[0-9a-f]{16,32}\b")),
    "anthropic": Events((b"event: error\n",)),
}
"""API name of a route (`headrace_decode.http.public_routes.API_MODULES`) -> patterns of its events.
"""


class Diverged(Exception):
    """Error: the second answer does not begin like the stream that the client has."""


class Journal:
    """The journal of one stream.

    Args:
        events: the patterns of its errors and ids.
        sends_lines: whether the client gets the lines, each before the first event that follows it.

    Attributes:
        why_not: why the stream cannot be resumed; None if it can.
        line_bytes: total size of the lines added so far.
        progress: number of events passed on.
        tokens: number of tokens in the lines so far; None before the first line.
    """

    def __init__(self, events: Events = EVENTS["openai"], *, sends_lines: bool = False) -> None:
        self._failed, self._id_pattern = events.failed, events.ids
        self._sends_lines = sends_lines
        self._pending_lines: list[bytes] = []  # lines that the client gets before its next event
        self._ids: dict[bytes, None] = {}  # in the events that the client has, in their order
        self._other_ids: dict[bytes, None] = {}  # in the events of the second answer, in order
        self._lines: list[bytes] = [b""]  # the first is for events before any line
        self._events = [0]  # for each line: number of events after it
        self._tail = b""
        self._at: int | None = None  # while dropping events: index of the last line seen
        self._dropped = 0
        self.why_not: str | None = None
        self.line_bytes = 0
        self.progress = 0
        self.tokens: int | None = None

    def pass_on(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Return the whole events of a chunk that the client gets, and the rest of the chunk.

        The rest begins with the first event that reports a failure; it is not recorded, and empty
        if there is no such event.

        Raises:
            Diverged: the chunk does not continue the client's stream.
        """
        chunk = self._tail + chunk
        cut = chunk.rfind(END) + 2
        if cut == 1:
            self._tail = chunk
            return b"", b""
        self._tail = chunk[cut:]
        whole = chunk[:cut]
        parts = whole.split(END)
        parts.pop()
        passed: list[bytes] = []
        for number, part in enumerate(parts):
            if part.startswith(MARK):
                self._line(part)
            elif part.startswith(self._failed):
                return _joined(passed), END.join([*parts[number:], b""])
            else:
                new = self._is_new()
                if self._id_pattern is not None:
                    part = self._with_ids(part, new=new)
                if new:
                    passed += self._pending_lines
                    self._pending_lines.clear()
                    passed.append(part)
        return _joined(passed), b""

    async def read(self, received: bytes) -> None:
        """Record the stream that a client sends back, in pieces that block the event loop briefly.

        Reading stops at the first event that reports a failure.
        """
        for start in range(0, len(received), PIECE_BYTES):
            _, failed = await run_then_rest(self.pass_on, received[start : start + PIECE_BYTES])
            if failed:
                return

    def rest(self) -> bytes:
        """Return the bytes after the last whole event. Called at the end of the stream."""
        return self._tail

    def begin_resume(self) -> bytes:
        """Return the lines of all events that the client has, and expect a second answer next."""
        while len(self._lines) > 1 and not self._events[-1]:
            self.tokens = (self.tokens or 0) - count_tokens(self._lines.pop())
            self._events.pop()
        self._tail = b""
        self._at, self._dropped = 0, 0
        self._other_ids = {}
        self._pending_lines = []
        return b"".join(one + END for one in self._lines[1:])

    def _line(self, one: bytes) -> None:
        if one.startswith(_REFUSED):
            self.stop(one[len(_REFUSED) : -1].decode("utf-8", "replace"))
            return
        if self._at is not None:
            self._check_whole()
            self._at, self._dropped = self._at + 1, 0
            if self._at < len(self._lines):
                if self._lines[self._at] != one:
                    raise Diverged("another line")
                return
            self._at = None
        self.tokens = (self.tokens or 0) + count_tokens(one)
        if self.why_not is None:
            self._lines.append(one)
            self._events.append(0)
            if self._sends_lines:
                self._pending_lines.append(one)
            self.line_bytes += len(one)
            if self.line_bytes > MAX_LINES_BYTES:
                self.stop(f"its lines have more than {MAX_LINES_BYTES} bytes")

    def _is_new(self) -> bool:
        """Count an event; return whether the client does not have it yet."""
        if self._at is not None:
            if self._dropped < self._events[self._at]:
                self._dropped += 1
                return False
            if self._at + 1 < len(self._lines):
                raise Diverged("more events after a line")
            self._at = None
        self._events[-1] += 1
        self.progress += 1
        return True

    def _with_ids(self, event: bytes, *, new: bool) -> bytes:
        """Replace the second replica's ids in an event by the ids that the client knows.

        While the stream has a single answer, return the event as it is.
        """
        assert self._id_pattern is not None
        seen = dict.fromkeys(self._id_pattern.findall(event))
        if self._at is None and not self._other_ids:
            self._ids.update(seen)
            return event
        self._other_ids.update(seen)
        if new:
            known = dict(zip(self._other_ids, self._ids, strict=False))
            event = self._id_pattern.sub(lambda found: known.get(found[0], found[0]), event)
            self._ids.update(dict.fromkeys(self._id_pattern.findall(event)))
        return event

    def _check_whole(self) -> None:
        assert self._at is not None
        if self._dropped < self._events[self._at]:
            raise Diverged("fewer events after a line")

    def stop(self, why: str) -> None:
        """Discard the record: the stream cannot be resumed."""
        if self.why_not is None and self._sends_lines:
            self._pending_lines.append(encode_line(why)[: -len(END)])
        self.why_not = self.why_not or why
        if self._at is None:
            self._lines, self._events = [b""], [0]


def _joined(events: list[bytes]) -> bytes:
    return END.join([*events, b""]) if events else b""

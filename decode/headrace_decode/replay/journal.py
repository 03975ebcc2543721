"""What a stream's client has, and how a second answer is cut so that it goes on behind that.

A replica tells in lines between the events of a stream what its engine said (`headrace_decode.
replay.said`). The journal takes the lines out and counts the events behind each. To take the stream
up, another replica gets the lines of all events that the client has. It leads its serving layer
through the same outputs, so its answer begins with the same lines and as many events, which the
journal swallows. An answer that does not is never passed on. Ids that the first replica made up
stay: they take the place of the other one's in the events that follow.

A client that wants to resume its stream gets the lines, too, and sends back what it has. A new
journal reads that as it would an answer, and is then as far as the first one was. It is the
gateway's; where no gateway is in the way, the replica's own (`resumed`).

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace_decode.replay.said import END, MARK, MAX_BYTES, line
from headrace_decode.rests import PIECE_BYTES, then_rest

_REFUSED = MARK + b'"'


@dataclass(frozen=True, slots=True)
class Events:
    """What a journal reads in the events of an API's streams.

    Attributes:
        failed: how the first event of a stream begins that failed before its answer.
        ids: what the ids look like that a replica makes up and later events refer to; None where
            there are none.
    """

    failed: tuple[bytes, ...]
    ids: re.Pattern[bytes] | None = None


EVENTS = {
    "openai": Events((b'data: {"error"',)),
    "responses": Events((b"event: error\n",), re.compile(rb"\b[a-z]+_[0-9a-f]{16,32}\b")),
    "anthropic": Events((b"event: error\n",)),
}
"""By the name that a route carries (`headrace_decode.routes.API_MODULES`)."""


class Diverged(Exception):
    """A second answer is not the stream that the client has the beginning of."""


class Journal:
    """One stream.

    Args:
        events: how its errors begin, and which ids its events refer to.
        tells: whether the client gets the lines, each before the first event behind it.

    Attributes:
        why_not: why the stream cannot be taken up; None if it can.
        line_bytes: of all lines kept.
        progress: events passed on.
    """

    def __init__(self, events: Events = EVENTS["openai"], *, tells: bool = False) -> None:
        self._failed, self._id_pattern = events.failed, events.ids
        self._tells = tells
        self._untold: list[bytes] = []  # lines that the client gets before its next event
        self._ids: dict[bytes, None] = {}  # in the events that the client has, in their order
        self._other_ids: dict[bytes, None] = {}  # likewise of the second answer
        self._lines: list[bytes] = [b""]  # the first stands for what comes before any line
        self._events = [0]
        self._tail = b""
        self._at: int | None = None  # while swallowing: the line that was seen last
        self._swallowed = 0
        self.why_not: str | None = None
        self.line_bytes = 0
        self.progress = 0

    def pass_on(self, chunk: bytes) -> tuple[bytes, bytes]:
        """The whole events in a chunk for the client; and the rest, from the first event on that
        says that the replica failed, which is then in neither the client's hands nor the journal.

        Raises:
            Diverged: this is no continuation of what the client has.
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
        given: list[bytes] = []
        for number, part in enumerate(parts):
            if part.startswith(MARK):
                self._line(part)
            elif part.startswith(self._failed):
                return _joined(given), END.join([*parts[number:], b""])
            else:
                new = self._is_new()
                if self._id_pattern is not None:
                    part = self._with_ids(part, new=new)
                if new:
                    given += self._untold
                    self._untold.clear()
                    given.append(part)
        return _joined(given), b""

    async def read(self, had: bytes) -> None:
        """Pass on all that a client sends back, without holding the loop for long."""
        for start in range(0, len(had), PIECE_BYTES):
            _, failed = await then_rest(self.pass_on, had[start : start + PIECE_BYTES])
            if failed:
                return

    def rest(self) -> bytes:
        """What came behind the last whole event; the stream is at its end."""
        return self._tail

    def take_up(self) -> bytes:
        """The lines of all events that the client has; what follows comes from a second answer."""
        while len(self._lines) > 1 and not self._events[-1]:
            self._lines.pop()
            self._events.pop()
        self._tail = b""
        self._at, self._swallowed = 0, 0
        self._other_ids = {}
        self._untold = []
        return b"".join(one + END for one in self._lines[1:])

    def _line(self, one: bytes) -> None:
        if one.startswith(_REFUSED):
            self.stop(one[len(_REFUSED) : -1].decode("utf-8", "replace"))
            return
        if self._at is not None:
            self._check_whole()
            self._at, self._swallowed = self._at + 1, 0
            if self._at < len(self._lines):
                if self._lines[self._at] != one:
                    raise Diverged("another line")
                return
            self._at = None
        if self.why_not is None:
            self._lines.append(one)
            self._events.append(0)
            if self._tells:
                self._untold.append(one)
            self.line_bytes += len(one)
            if self.line_bytes > MAX_BYTES:
                self.stop(f"its lines have more than {MAX_BYTES} bytes")

    def _is_new(self) -> bool:
        """Whether the client lacks the event that comes now."""
        if self._at is not None:
            if self._swallowed < self._events[self._at]:
                self._swallowed += 1
                return False
            if self._at + 1 < len(self._lines):
                raise Diverged("more events behind a line")
            self._at = None
        self._events[-1] += 1
        self.progress += 1
        return True

    def _with_ids(self, event: bytes, *, new: bool) -> bytes:
        """The event with the ids that the client knows, in place of those that the second replica
        made; in a stream of one answer they are the same."""
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
        if self._swallowed < self._events[self._at]:
            raise Diverged("fewer events behind a line")

    def stop(self, why: str) -> None:
        """Keep nothing any more: the stream is not taken up."""
        if self.why_not is None and self._tells:
            self._untold.append(line(why)[: -len(END)])
        self.why_not = self.why_not or why
        if self._at is None:
            self._lines, self._events = [b""], [0]


def _joined(events: list[bytes]) -> bytes:
    return END.join([*events, b""]) if events else b""

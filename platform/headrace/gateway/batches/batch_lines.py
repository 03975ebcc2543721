"""The lines of a batch: split, checked, and answered, as OpenAI's batch API writes them. Pure."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import msgspec

from headrace.gateway.batches.batch_job import LineFault

MAX_FAULTS = 100
"""Maximum number of faults that are told of one file."""
MAX_CUSTOM_ID_CHARS = 512


class BatchLine(msgspec.Struct, frozen=True):
    """A line of an input file. `body`: the request's own JSON."""

    custom_id: str
    body: bytes


class LineFaultError(ValueError):
    """The error of a line that is no request of its batch.

    Args:
        code: OpenAI's code.
        param: the field that is wrong; None for the whole line.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"")


_decode_line = msgspec.json.Decoder(_Line).decode


def parse_line(raw: bytes, endpoint: str) -> BatchLine:
    """Return the request of a line.

    Args:
        endpoint: the batch's route, which the line must name.

    Raises:
        LineFaultError: the line is no such request.
    """
    try:
        line = _decode_line(raw)
        raw.decode()
    except msgspec.ValidationError:
        raise LineFaultError("invalid_json_line", "This line is not a JSON object.") from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        message = "This line is not parseable as valid JSON."
        raise LineFaultError("invalid_json_line", message) from None
    for name in ("custom_id", "method", "url"):
        if getattr(line, name) is None:
            raise _missing(name)
    if not isinstance(line.custom_id, str) or not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        raise LineFaultError("invalid_custom_id", message, "custom_id")
    if line.method != "POST":
        message = f"method must be POST, not {str(line.method)[:20]}."
        raise LineFaultError("invalid_method", message, "method")
    if line.url != endpoint:
        message = f"url must be the batch's endpoint, {endpoint}, not {str(line.url)[:100]}."
        raise LineFaultError("invalid_url", message, "url")
    body = bytes(line.body)
    if not body:
        raise _missing("body")
    if not body.startswith(b"{"):
        raise LineFaultError("invalid_request", "body must be an object.", "body")
    return BatchLine(line.custom_id, body)


def _missing(name: str) -> LineFaultError:
    message = f"Missing required parameter: '{name}'."
    return LineFaultError("missing_required_parameter", message, name)


class LineSplitter:
    """Splits a file that arrives in parts into its lines, without the empty ones.

    Args:
        max_line_bytes: maximum size of a line.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._number = 0

    def feed(self, part: bytes) -> list[tuple[int, bytes]]:
        """Return the lines that a part completes, each with its number, which counts from 1.

        A line that is too long is cut: no JSON object ends there.
        """
        if not self._number and not self._rest:
            part = part.removeprefix(b"\xef\xbb\xbf")
        first, *more = part.split(b"\n")
        if not more:
            self._keep(first)
            return []
        self._keep(first)
        whole = [b"".join(self._rest), *more[:-1]]
        self._rest, self._rest_bytes = [], 0
        self._keep(more[-1])
        return self._numbered(whole)

    def finish(self) -> list[tuple[int, bytes]]:
        """Return the last line, if nothing ended it."""
        whole, self._rest, self._rest_bytes = [b"".join(self._rest)], [], 0
        return self._numbered(whole)

    def is_too_long(self, line: bytes) -> bool:
        """Return whether a line was cut."""
        return len(line) > self._max_line_bytes

    def _keep(self, piece: bytes) -> None:
        """Keep a piece of a line, up to a byte more than a line may have."""
        piece = piece[: self._max_line_bytes + 1 - self._rest_bytes]
        self._rest.append(piece)
        self._rest_bytes += len(piece)

    def _numbered(self, lines: list[bytes]) -> list[tuple[int, bytes]]:
        found = []
        for line in lines:
            self._number += 1
            line = line[: self._max_line_bytes + 1].strip()
            if line:
                found.append((self._number, line))
        return found


class LineChecker:
    """Checks all lines of a file, which arrives in parts.

    Args:
        endpoint: the batch's route.
        max_lines: maximum number of lines.
        max_line_bytes: maximum size of a line.

    Attributes:
        count: number of lines so far.
        faults: the first faults, at most `MAX_FAULTS`.
    """

    def __init__(self, endpoint: str, max_lines: int, max_line_bytes: int) -> None:
        self._endpoint, self._max_lines = endpoint, max_lines
        self._max_line_bytes = max_line_bytes
        self._splitter = LineSplitter(max_line_bytes)
        self._known: set[bytes] = set()
        self.count = 0
        self.faults: list[LineFault] = []

    @property
    def is_over(self) -> bool:
        """Whether no further line needs to be checked."""
        return len(self.faults) >= MAX_FAULTS or self.count > self._max_lines

    def feed(self, part: bytes) -> None:
        """Check the lines that a part completes."""
        self._check(self._splitter.feed(part))

    def finish(self) -> None:
        """Check the last line and the number of lines."""
        self._check(self._splitter.finish())
        if self.count > self._max_lines:
            message = f"The file has more than {self._max_lines} lines, which is the limit."
            self.faults = [LineFault("too_many_lines", message)]
        elif not self.count:
            self.faults = [LineFault("empty_file", "The input file has no lines.")]

    def _check(self, lines: list[tuple[int, bytes]]) -> None:
        for number, raw in lines:
            if self.is_over:
                return
            self.count += 1
            try:
                if self._splitter.is_too_long(raw):
                    message = f"This line has more than {self._max_line_bytes} bytes."
                    raise LineFaultError("line_too_long", message)
                line = parse_line(raw, self._endpoint)
                self._check_unique(line.custom_id)
            except LineFaultError as fault:
                self.faults.append(LineFault(fault.code, str(fault), number, fault.param))

    def _check_unique(self, custom_id: str) -> None:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._known:
            message = f"The custom_id '{custom_id[:100]}' is that of an earlier line, too."
            raise LineFaultError("duplicate_custom_id", message, "custom_id")
        self._known.add(digest)


def answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of the output file for an answer.

    Args:
        status: the HTTP status.
        request_id: the id of the request at the gateway.
        body: the answer's body; one that is no JSON becomes a text.
    """
    try:
        shown = msgspec.json.format(body, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        shown = msgspec.json.encode(body.decode("utf-8", "replace"))
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(shown)}
    return _encoded(custom_id, response, None)


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """Return the line of the error file for a line without an answer."""
    return _encoded(custom_id, None, {"code": code, "message": message})


def _encoded(
    custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    line = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"

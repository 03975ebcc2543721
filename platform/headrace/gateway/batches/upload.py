"""A form with a file, parsed as it arrives: its content is passed on in parts, its fields are kept.

Pure. The parser is python-multipart, which Starlette and vLLM use, too.
"""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headrace.gateway.batches import refusals

MAX_FIELDS, MAX_FIELD_BYTES = 16, 1000
MAX_FILENAME_CHARS = 255


class FileForm:
    """A form of `multipart/form-data` with one file.

    Args:
        content_type: the header of the request.
        part_bytes: size of the parts of the file's content.

    Attributes:
        fields: the other fields by name.
        filename: the client's name of the file; None until the file has begun.
        size_bytes: bytes of the file so far.

    Raises:
        ApiError: 400, it is no such form.
    """

    def __init__(self, content_type: bytes, part_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            message = "The body must be multipart/form-data with the fields purpose and file."
            raise refusals.bad_upload(message)
        self._part_bytes = part_bytes
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size_bytes = 0
        self._rest = bytearray()
        self._parts: list[bytes] = []
        self._is_over = False
        self._header, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._name, self._in_file = "", False
        self._field = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise refusals.bad_upload(f"The form is malformed: {error}.") from None

    def feed(self, data: bytes) -> list[bytes]:
        """Parse a piece of the body; return the parts of the file that it completes.

        Raises:
            ApiError: 400, the form is malformed, or has other fields than it may.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise refusals.bad_upload(f"The form is malformed: {error}.") from None
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[bytes]:
        """Return the last part of the file; the body is over.

        Raises:
            ApiError: 400, the form is cut, or has no file.
        """
        if not self._is_over:
            raise refusals.bad_upload("The form is cut: its last boundary is missing.")
        if self.filename is None:
            raise refusals.bad_upload("The form has no field file with a filename.", "file")
        rest, self._rest = bytes(self._rest), bytearray()
        return [rest] if rest else []

    # Called by the parser.

    def _on_part_begin(self) -> None:
        self._headers.clear()
        self._header, self._value = b"", b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        filename = options.get(b"filename")
        self._in_file = self._name == "file" and filename is not None
        if self._in_file:
            if self.filename is not None:
                raise refusals.bad_upload("The form has more than one file.", "file")
            text = (filename or b"").decode("utf-8", "replace")
            self.filename = "".join(c for c in text if c.isprintable())[:MAX_FILENAME_CHARS]
        elif filename is not None:
            message = f"The form has a file in the field {self._name[:50]!r}; it must be file."
            raise refusals.bad_upload(message, "file")
        elif len(self.fields) >= MAX_FIELDS:
            raise refusals.bad_upload(f"The form has more than {MAX_FIELDS} fields.")
        self._field.clear()

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if not self._in_file:
            self._field += data[start:end]
            if len(self._field) > MAX_FIELD_BYTES:
                message = f"The field {self._name[:50]!r} has more than {MAX_FIELD_BYTES} bytes."
                raise refusals.bad_upload(message)
            return
        self.size_bytes += end - start
        self._rest += memoryview(data)[start:end]
        while len(self._rest) >= self._part_bytes:
            self._parts.append(bytes(self._rest[: self._part_bytes]))
            del self._rest[: self._part_bytes]

    def _on_part_end(self) -> None:
        if not self._in_file:
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._is_over = True

"""Encodings of a request's body: compressed ones are decoded, and JSON becomes UTF-8.

Decoding has the same limits as reading: a decoded body may have as many bytes as any body, and no
step blocks the event loop for long.
"""

from __future__ import annotations

import codecs
import json
import zlib
from collections.abc import Iterator, Sequence

from headrace.gateway import errors

SUPPORTED = ("gzip", "deflate")
PIECE_BYTES = 256 * 1024
"""Maximum bytes that one step decodes: 1 ms of a slow core."""
MAX_MEMBERS = 64
"""Maximum number of consecutive gzip files in one body. Even a short one costs 3 microseconds."""


class Decoder:
    """The decoder of one compressed body.

    Args:
        encoding: one of `SUPPORTED`.
    """

    def __init__(self, encoding: str) -> None:
        self._encoding, self._members = encoding, 1
        self._stream = self._new()

    def decode(self, data: bytes, *, is_last: bool) -> Iterator[bytes]:
        """Decode the next bytes of a body, in pieces of at most `PIECE_BYTES`.

        Args:
            is_last: whether the body ends with these bytes.

        Raises:
            ApiError: 400, the body does not match its encoding, or is cut off.
        """
        while True:
            try:
                piece = self._stream.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise errors.bad_encoding(self._encoding) from None
            data = self._stream.unconsumed_tail
            yield piece
            if self._stream.eof:
                data = self._stream.unused_data
                if not data:
                    return
                self._members += 1
                if self._encoding != "gzip" or self._members > MAX_MEMBERS:
                    raise errors.bad_encoding(self._encoding)
                self._stream = self._new()
            elif not data and len(piece) < PIECE_BYTES:
                break
        if is_last:
            raise errors.bad_encoding(self._encoding)

    def _new(self) -> zlib._Decompress:
        return zlib.decompressobj(31 if self._encoding == "gzip" else 15)


def decoder_of(headers: Sequence[bytes]) -> Decoder | None:
    """Return the decoder for a body with these `content-encoding` headers; None for a plain body.

    Raises:
        ApiError: 415, the encoding is not supported.
    """
    if not headers:
        return None
    header = b", ".join(headers).decode("latin-1").lower()
    names = [name.strip() for name in header.split(",")]
    names = [name.removeprefix("x-") for name in names if name not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in SUPPORTED:
        raise errors.encoding_not_supported(header, SUPPORTED)
    return Decoder(names[0])


def as_utf8(body: bytes, max_bytes: int) -> bytes:
    """Return a JSON text in UTF-8 without a byte order mark.

    UTF-8, UTF-16 and UTF-32 are accepted, with or without the mark, as in Python's JSON parser in
    vLLM's own server.

    Args:
        max_bytes: maximum size of the result after a conversion.

    Raises:
        ApiError: 400, the body is not valid in its encoding; 413, it becomes too large.
    """
    if body.startswith(codecs.BOM_UTF8):
        return body[len(codecs.BOM_UTF8) :]
    encoding = json.detect_encoding(body)
    if encoding.startswith("utf-8"):
        return body
    try:
        body = body.decode(encoding).encode()
    except UnicodeError:
        raise errors.not_json(f"it is not valid {encoding.upper()}") from None
    if len(body) > max_bytes:
        raise errors.body_too_large(max_bytes)
    return body

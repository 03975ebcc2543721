"""The number of tokens of an answer that is no stream, as its `usage` states it."""

from __future__ import annotations

import msgspec

MAX_READ_BYTES = 64 * 1024
"""Longest body that is read: decoding it takes about 0.1 ms."""


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_DECODER = msgspec.json.Decoder(_Answer)


def answer_tokens(body: bytes) -> int | None:
    """Return the answer's tokens: `completion_tokens`, or `output_tokens` as `/v1/responses` and
    `/v1/messages` call them. None if the body does not say, or is longer than `MAX_READ_BYTES`.
    """
    if len(body) > MAX_READ_BYTES:
        return None
    try:
        usage = _DECODER.decode(body).usage
    except msgspec.DecodeError:
        return None
    if usage is None:
        return None
    return usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens

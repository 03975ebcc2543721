"""Encodes the outputs of a stream's engine as lines within the stream, and decodes them.

A replica puts a line before the events of a stream that result from one output of its engine:

    :hr [{"i":0,"t":[2023,11]}]

The line is a comment in the event stream format (WHATWG HTML, 9.2.6), which clients skip; gateways
remove it. When the replica is lost, another replica receives the lines of all events that the
client has, and continues after them. A line with a string as its payload gives the reason why the
stream cannot be resumed.

Pure: no engine, no HTTP.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MARK = b":hr "
"""Prefix of a line."""
END = b"\n\n"
"""Terminator of a line and of each event."""
HEADER = b"x-headrace-resume-lines"
"""In a request whose answer must have lines: number of bytes at the start of its body that are the
lines to resume from; 0 for a new request. In an answer: the answer is a stream with lines."""
RESUME = b"x-headrace-resume"
"""In a client's request: number of bytes at the start of its body that are the stream so far, with
its lines; 0 for a new request. In an answer: the client can resume this stream."""
STOPPING = "gateway_stopping"
"""Code of the error with which a gateway that shuts down ends a stream. Another gateway can resume
the stream."""
MAX_LINES_BYTES = 4 * 2**20
"""Maximum size of the lines of one stream. A stream with more cannot be resumed."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Ranked = tuple[TokenId, float, TokenId]
"""A token id, its log-probability, its rank among all tokens."""


class EmittedChoice(
    msgspec.Struct,
    omit_defaults=True,
    frozen=True,
    rename={
        **{"index": "i", "tokens": "t", "logprobs": "l", "finish": "f", "stop": "s"},
        **{"cached": "c", "adapter": "a", "media": "m"},
    },
):
    """The part of one engine output that belongs to one choice.

    Attributes:
        index: index of the choice.
        tokens: the tokens that the output adds.
        logprobs: for each token the sampled one first, then the most likely ones by rank; None if
            the request asks for none.
        finish: the choice's finish reason, if it ends here.
        stop: the stop string or token that ended it.
        cached: in the first output of a stream: number of cached prompt tokens, which no engine
            computed.
        adapter: in the first output of a stream: digest of the LoRA adapter's content; empty
            without one.
        media: in the first output of a stream: digest of the prompt's media; empty for text.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    tokens: tuple[TokenId, ...]
    logprobs: tuple[tuple[Ranked, ...], ...] | None = None
    finish: str | None = None
    stop: int | str | None = None
    cached: TokenId = 0
    adapter: Annotated[str, msgspec.Meta(max_length=64)] = ""
    media: Annotated[str, msgspec.Meta(max_length=64)] = ""


EmittedOutput = tuple[EmittedChoice, ...]
"""One output of the engine: its choices, in the order in which the serving layer receives them."""

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(EmittedOutput | str)


def encode_line(output: EmittedOutput | str) -> bytes:
    """Return the line for one output, or for the reason why a stream cannot be resumed."""
    return MARK + _ENCODER.encode(output) + END


def decode_lines(lines: bytes) -> list[EmittedOutput]:
    """Return the outputs that these lines encode.

    Raises:
        ValueError: these are not lines, or they say that the stream cannot be resumed.
    """
    found: list[EmittedOutput] = []
    for one in lines.split(END)[:-1]:
        if not one.startswith(MARK):
            raise ValueError(f"a line must begin with {MARK!r}, got {one[:20]!r}")
        output = _DECODER.decode(one[len(MARK) :])  # msgspec.DecodeError is a ValueError
        if isinstance(output, str):
            raise ValueError(f"the stream cannot be resumed: {output}")
        found.append(output)
    if not lines.endswith(END) and lines:
        raise ValueError("the last line is not whole")
    return found


class _CountedChoice(msgspec.Struct, rename={"tokens": "t"}):
    """The part of a choice that `count_tokens` reads."""

    tokens: tuple[int, ...] = ()


_COUNTED = msgspec.json.Decoder(tuple[_CountedChoice, ...])


def count_tokens(line: bytes) -> int:
    """Return the number of tokens in a line without its terminator; 0 if it cannot be read."""
    try:
        return sum(len(choice.tokens) for choice in _COUNTED.decode(line[len(MARK) :]))
    except msgspec.DecodeError:
        return 0


def tokens_of_choice(outputs: list[EmittedOutput], index: int) -> list[int]:
    """Return all tokens of one choice."""
    return [
        token
        for output in outputs
        for choice in output
        if choice.index == index
        for token in choice.tokens
    ]


def all_finished(outputs: list[EmittedOutput], choices: int) -> bool:
    """Return whether all choices have ended.

    Args:
        outputs: all outputs of the request.
        choices: number of choices of the request.
    """
    ended = {choice.index for output in outputs for choice in output if choice.finish is not None}
    return len(ended) == choices


def cached_tokens_of(outputs: list[EmittedOutput]) -> int:
    """Return the number of prompt tokens that were cached when the stream began."""
    return outputs[0][0].cached if outputs and outputs[0] else 0


def adapter_of(outputs: list[EmittedOutput]) -> str:
    """Return the digest of the LoRA adapter with which the stream began; empty without one."""
    return outputs[0][0].adapter if outputs and outputs[0] else ""


def media_of(outputs: list[EmittedOutput]) -> str:
    """Return the digest of the prompt's media when the stream began; empty for text."""
    return outputs[0][0].media if outputs and outputs[0] else ""

"""What a stream's engine has said, in the lines that go with the stream, and back from them.

A replica puts a line before those events of a stream that an output of its engine led to:

    :hr [{"i":0,"t":[2023,11]}]

It is a comment of the event stream's format (WHATWG HTML, 9.2.6), which clients skip; gateways take
it out. When the replica is lost, another one is sent the lines of all events that the client has,
and goes on behind them. A line whose payload is a text says why the stream cannot be taken up.

Pure: no engine, no HTTP.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MARK = b":hr "
"""How a line begins."""
END = b"\n\n"
"""How a line, and each event, ends."""
HEADER = b"x-headrace-said"
"""Of a request whose answer shall come with lines: how many bytes of its body, from the first on,
are lines to take up; 0 for a new request. Of an answer: it is a stream with lines."""
RESUME = b"x-headrace-resume"
"""Of a client's request: how many bytes of its body, from the first on, are its stream so far with
its lines; 0 for a new one. Of an answer: this stream can be resumed."""
STOPPING = "gateway_stopping"
"""Code of the error by which a gateway that shuts down ends a stream; another one resumes it."""
MAX_BYTES = 4 * 2**20
"""Of the lines of one stream. A stream that has said more is not taken up."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Ranked = tuple[TokenId, float, TokenId]
"""A token id, its log-probability, its rank among all tokens."""


class Said(
    msgspec.Struct,
    omit_defaults=True,
    frozen=True,
    rename={
        **{"index": "i", "tokens": "t", "logprobs": "l", "finish": "f", "stop": "s"},
        "cached": "c",
    },
):
    """What one output of the engine adds to one choice.

    Attributes:
        index: of the choice.
        tokens: those that the output adds.
        logprobs: for each token the sampled one first, then the most likely ones by rank; None if
            none were asked for.
        finish: the choice's finish reason, if it ends here.
        stop: the stop string or token that ended it.
        cached: in the first output of a stream: tokens of the prompt that no engine computed.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    tokens: tuple[TokenId, ...]
    logprobs: tuple[tuple[Ranked, ...], ...] | None = None
    finish: str | None = None
    stop: int | str | None = None
    cached: TokenId = 0


Output = tuple[Said, ...]
"""One output of the engine: its choices, in the order in which the serving layer gets them."""

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Output | str)


def line(output: Output | str) -> bytes:
    """The line of one output, or of the reason why a stream cannot be taken up."""
    return MARK + _ENCODER.encode(output) + END


def read(lines: bytes) -> list[Output]:
    """The outputs of lines.

    Raises:
        ValueError: these are no lines, or a stream that cannot be taken up.
    """
    found: list[Output] = []
    for one in lines.split(END)[:-1]:
        if not one.startswith(MARK):
            raise ValueError(f"a line must begin with {MARK!r}, got {one[:20]!r}")
        output = _DECODER.decode(one[len(MARK) :])  # msgspec.DecodeError is a ValueError
        if isinstance(output, str):
            raise ValueError(f"the stream cannot be taken up: {output}")
        found.append(output)
    if not lines.endswith(END) and lines:
        raise ValueError("the last line is not whole")
    return found


def tokens_of(outputs: list[Output], index: int) -> list[int]:
    """All tokens that one choice has."""
    return [
        token
        for output in outputs
        for said in output
        if said.index == index
        for token in said.tokens
    ]


def is_over(outputs: list[Output], choices: int) -> bool:
    """Whether each of so many choices has ended."""
    ended = {said.index for output in outputs for said in output if said.finish is not None}
    return len(ended) == choices


def cached_tokens_of(outputs: list[Output]) -> int:
    """Tokens of the prompt that no engine had computed when the stream began."""
    return outputs[0][0].cached if outputs and outputs[0] else 0

"""A replica's response, read from bytes as they come: every framing, cut anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.upstream_reply import ReplicaLost, Reply

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire:
    """Keeps what a reply says to its connection."""

    def __init__(self) -> None:
        self.ends: list[bool] = []
        self.paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def release(self, *, clean: bool) -> None:
        self.ends.append(clean)


async def poured(reply: Reply, wants: Callable[[bytes], bool]) -> tuple[bool, list[bytes]]:
    pieces: list[bytes] = []

    def take(piece: bytes) -> bool:
        pieces.append(piece)
        return wants(piece)

    return await reply.pour(take), pieces


async def test_what_comes_behind_a_refusal_waits() -> None:
    line = Wire()
    reply = Reply("POST", line)
    reply.feed(CHUNKED)
    pouring = asyncio.ensure_future(poured(reply, lambda piece: piece != b"b"))
    await asyncio.sleep(0)
    reply.feed(b"1\r\na\r\n")
    reply.feed(b"1\r\nb\r\n")
    reply.feed(b"1\r\nc\r\n")
    reply.feed(b"0\r\n\r\n")
    assert await pouring == (False, [b"a", b"b"])
    assert await poured(reply, lambda piece: True) == (True, [b"c"])
    assert line.ends == [True]


async def test_what_take_raises_reaches_the_task() -> None:
    line = Wire()
    reply = Reply("POST", line)
    reply.feed(CHUNKED)

    def fail(piece: bytes) -> bool:
        raise KeyError(piece)

    pouring = asyncio.ensure_future(reply.pour(fail))
    await asyncio.sleep(0)
    reply.feed(b"1\r\na\r\n")
    with pytest.raises(KeyError):
        await pouring
    reply.close()
    assert line.ends == [False]


async def test_pieces_before_a_fault_are_pushed_before_it_is_raised() -> None:
    reply = Reply("POST", Wire())
    reply.feed(CHUNKED)
    pieces: list[bytes] = []

    def take(piece: bytes) -> bool:
        pieces.append(piece)
        return True

    pouring = asyncio.ensure_future(reply.pour(take))
    await asyncio.sleep(0)
    reply.feed(b"1\r\na\r\nnonsense")
    with pytest.raises(ReplicaLost):
        await pouring
    assert pieces == [b"a"]


bodies = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, bytes, str]:
    """The bytes of a response, its body, and how its end is marked."""
    parts = draw(bodies)
    body = b"".join(parts)
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * draw(st.integers(0, 2))
    head = interim + b"HTTP/1.1 200 OK\r\nX-Empty:\r\nContent-Type: text/event-stream\r\n"
    marked = draw(st.sampled_from(["chunked", "length", "close"]))
    if marked == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body, marked
    if marked == "close":
        return head + b"\r\n" + body, body, marked
    ends = draw(st.sampled_from([b"", b";x", b';x="y"']))
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(part), ends, part) for part in parts)
    trailer = draw(st.sampled_from([b"", b"x-sum: 1\r\n"]))
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n" + trailer + b"\r\n", body, marked


def feed(reply: Reply, line: Wire, pieces: list[bytes]) -> None:
    """As a connection does, up to the end."""
    for piece in pieces:
        if line.ends:
            return
        reply.feed(piece)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


cuts = st.lists(st.integers(0, 10_000), max_size=20)


@given(responses(), cuts, st.booleans())
def test_any_split_of_a_response_gives_the_same_body(
    response: tuple[bytes, bytes, str], cuts: list[int], push: bool
) -> None:
    data, body, marked = response

    async def run() -> None:
        line = Wire()
        reply = Reply("POST", line)
        got: list[bytes] = []

        async def read() -> None:
            await reply.head()
            if push:
                over, pieces = await poured(reply, lambda piece: True)
                assert over
                got.extend(pieces)
            else:
                while part := await reply.read_some():
                    got.append(part)

        reading = asyncio.ensure_future(read())
        for number, piece in enumerate(split(data, cuts)):
            reply.feed(piece)
            if number % 2:
                await asyncio.sleep(0)
        if marked == "close":
            reply.eof()
        await reading
        assert b"".join(got) == body
        assert reply.status == 200
        assert reply.headers[:2] == [(b"x-empty", b""), (b"content-type", b"text/event-stream")]
        assert line.ends == [marked != "close"]

    asyncio.run(run())


@given(responses(), st.integers(0, 10_000), cuts)
def test_any_beginning_of_a_response_is_a_lost_replica(
    response: tuple[bytes, bytes, str], kept: int, cuts: list[int]
) -> None:
    data, body, marked = response
    data = data[: kept % len(data)]

    async def run() -> None:
        line = Wire()
        reply = Reply("POST", line)
        feed(reply, line, split(data, cuts))
        got: list[bytes] = []
        if not line.ends:
            reply.eof()
        try:
            await reply.head()
            while part := await reply.read_some():
                got.append(part)
        except ReplicaLost:
            pass
        else:
            assert marked == "close" or b"".join(got) == body
        assert body.startswith(b"".join(got))
        assert line.ends == [False]

    asyncio.run(run())


@given(st.binary(max_size=300), st.sampled_from([b"", CHUNKED, UNTIL_CLOSE, OK[:-2]]), cuts)
def test_no_bytes_raise_anything_but_a_lost_replica(
    noise: bytes, begin: bytes, cuts: list[int]
) -> None:
    async def run() -> None:
        line = Wire()
        reply = Reply("POST", line)
        feed(reply, line, split(begin + noise, cuts))
        if not line.ends:
            reply.eof()
        with contextlib.suppress(ReplicaLost):
            await reply.head()
            while await reply.read_some():
                pass
        assert len(line.ends) == 1

    asyncio.run(run())

"""What a stream's client has, and how a second answer goes on behind it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.resume.emitted import MAX_LINES_BYTES, EmittedChoice, encode_line
from headrace_decode.resume.journal import EVENTS, Diverged, Journal

ERROR = b'data: {"error":{"message":"EngineDeadError"}}'
GROUPS = st.lists(st.integers(0, 3), min_size=1, max_size=12)
"""How many events the serving layer makes of each output of the engine."""


def stream(groups: list[int], before: int = 0) -> list[bytes]:
    """The parts of a stream: lines and events."""
    number = itertools.count()
    parts = [b"data: begin %d\n\n" % n for n in range(before)]
    for token, events in enumerate(groups):
        parts.append(encode_line((EmittedChoice(0, (token,)),)))
        parts += [b"data: %d\n\n" % next(number) for _ in range(events)]
    return [*parts, b"data: [DONE]\n\n"]


def events_of(parts: list[bytes]) -> bytes:
    return b"".join(part for part in parts if not part.startswith(b":"))


def passed(journal: Journal, data: bytes, rng: random.Random) -> bytes:
    """What the client gets of bytes that come in pieces."""
    given_on = b""
    while data:
        size = rng.randint(1, 40)
        given_on += journal.pass_on(data[:size])[0]
        data = data[size:]
    return given_on


@given(GROUPS, st.integers(0, 2), st.randoms(use_true_random=False))
def test_the_client_gets_the_events_and_no_line(
    groups: list[int], before: int, rng: random.Random
) -> None:
    parts = stream(groups, before)
    assert passed(Journal(), b"".join(parts), rng) == events_of(parts)


@given(GROUPS, st.integers(0, 2), st.lists(st.integers(0, 400), max_size=3), st.randoms())
def test_however_often_it_is_cut_the_client_gets_each_event_once(
    groups: list[int], before: int, cuts: list[int], rng: random.Random
) -> None:
    parts = stream(groups, before)
    whole = b"".join(parts)
    journal, got = Journal(), b""
    for cut in cuts:
        got += passed(journal, whole[:cut], rng)
        lines = journal.begin_resume()
        assert whole.replace(b"data", b"").count(lines[:10]) or not lines
        assert all(part + b"\n\n" in parts for part in lines.split(b"\n\n") if part)
    got += passed(journal, whole, rng)
    assert got == events_of(parts)
    assert journal.rest() == b""


@given(GROUPS, st.integers(0, 2), st.lists(st.integers(0, 400), max_size=3), st.randoms())
def test_a_new_journal_goes_on_behind_what_a_client_has_with_its_lines(
    groups: list[int], before: int, cuts: list[int], rng: random.Random
) -> None:
    parts = stream(groups, before)
    had, journal = b"", Journal(sends_lines=True)
    for cut in cuts:
        had += passed(journal, b"".join(parts)[:cut], rng)
        assert not had.rpartition(b"data")[2].count(b":hr"), "lines come with their events only"
        journal = Journal(sends_lines=True)
        journal.pass_on(had)
        lines = journal.begin_resume()
        assert b"".join(parts).replace(b"data", b"").count(lines[:10]) or not lines
    had += passed(journal, b"".join(parts), rng)
    assert had == b"".join(parts)


def test_a_client_that_wants_to_resume_is_told_when_it_cannot() -> None:
    journal = Journal(sends_lines=True)
    journal.pass_on(b"".join(stream([1])[:2]))
    journal.stop("no room")
    assert journal.pass_on(b"data: 1\n\n")[0] == encode_line("no room") + b"data: 1\n\n"
    again = Journal(sends_lines=True)
    again.pass_on(encode_line("no room") + b"data: 1\n\n")
    assert again.why_not == "no room"


def test_lines_that_led_to_no_event_are_computed_again() -> None:
    journal = Journal()
    journal.pass_on(b"".join(stream([1, 0, 2, 0, 0])[:-1]))
    assert journal.begin_resume() == b"".join(
        encode_line((EmittedChoice(0, (n,)),)) for n in range(3)
    )


@pytest.mark.parametrize(
    "other",
    [
        stream([1, 2, 2]),  # fewer events behind the first line
        stream([2, 1, 2]),  # fewer behind the second
        stream([3, 2, 2]),  # more
        [encode_line((EmittedChoice(0, (99,)),)), *stream([2, 2, 2])[1:]],  # another token
        stream([2, 2, 2], before=1),  # an event that was not there
    ],
)
def test_another_stream_is_never_passed_on(other: list[bytes]) -> None:
    journal = Journal()
    journal.pass_on(b"".join(stream([2, 2, 2])[:8]))
    journal.begin_resume()
    with pytest.raises(Diverged):
        journal.pass_on(b"".join(other))


def test_an_error_of_the_replicas_is_neither_passed_on_nor_kept() -> None:
    journal = Journal()
    data = b"".join(stream([1, 1])[:4]) + ERROR + b"\n\ndata: [DONE]\n\n"
    events, error = journal.pass_on(data)
    assert events == b"data: 0\n\ndata: 1\n\n"
    assert error == ERROR + b"\n\ndata: [DONE]\n\n"
    journal.begin_resume()
    assert journal.pass_on(b"".join(stream([1, 1]))) == (b"data: [DONE]\n\n", b"")


def test_a_replica_says_why_a_stream_cannot_be_taken_up() -> None:
    journal = Journal()
    data = (
        encode_line((EmittedChoice(0, (1,)),))
        + b"data: 0\n\n"
        + encode_line("two prompts")
        + b"data: 1\n\n"
    )
    assert journal.pass_on(data)[0] == b"data: 0\n\ndata: 1\n\n"
    assert journal.why_not == "two prompts"
    assert journal.begin_resume() == b""


def test_what_it_keeps_is_bounded() -> None:
    journal = Journal()
    long = encode_line((EmittedChoice(0, tuple(range(100_000))),))
    for _ in range(MAX_LINES_BYTES // len(long) + 2):
        journal.pass_on(long + b"data: 0\n\n")
    assert journal.why_not is not None and "bytes" in journal.why_not
    assert journal.begin_resume() == b""


def test_later_events_keep_the_ids_of_the_first_answer() -> None:
    def events(item: str, response: str) -> list[bytes]:
        names = [f'{{"id":"resp_{response * 16}"}}', f'{{"item":{{"id":"msg_{item * 32}"}}}}']
        names += [f'{{"item_id":"msg_{item * 32}","n":{n}}}' for n in range(2)]
        names += [f'{{"id":"resp_{response * 16}","output":["msg_{item * 32}"]}}']
        return [f"data: {name}\n\n".encode() for name in names]

    journal = Journal(EVENTS["responses"])
    first, second = events("a", "b"), events("c", "d")
    said = [encode_line((EmittedChoice(0, (n,)),)) for n in range(2)]
    got = journal.pass_on(b"".join([*first[:2], said[0], first[2]]))[0]
    assert journal.begin_resume() == said[0]
    rest = [*second[:2], said[0], second[2], said[1], *second[3:]]
    got += b"".join(journal.pass_on(part)[0] for part in rest)
    assert got == b"".join(first)

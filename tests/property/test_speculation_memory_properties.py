"""The memory against naive models: suffix search in lists, rings as lists, an arena as a set."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.draft_memory.one_row import OneRowMemory
from headrace_decode.speculative.retrieval.arena import Arena
from headrace_decode.speculative.retrieval.draft_memory import MemorySettings, tenant_key
from headrace_decode.speculative.retrieval.layout import CONTEXT

TOKEN = st.integers(0, 3)
TEXT = st.lists(TOKEN, min_size=1, max_size=60)


def matches(text: list[int], context: list[int]) -> dict[int, int]:
    """For each place of `text` that something follows: how many of the last tokens stand there."""
    found = {}
    for at in range(len(text) - 1):
        length = 0
        while length < min(at + 1, len(context), CONTEXT):
            if text[at - length] != context[-1 - length]:
                break
            length += 1
        if length:
            found[at] = length
    return found


def check(draft: list[int], match: int, texts: list[list[int]], context: list[int]) -> None:
    """A draft is what follows a place with the said match, and no place is left out that an anchor
    would have found: without any match there is no draft, with one there is."""
    places = [(text, at, length) for text in texts for at, length in matches(text, context).items()]
    assert bool(draft) == bool(places)
    if draft:
        assert any(length == match and text[at + 1] == draft[0] for text, at, length in places)


@settings(max_examples=60)
@given(prompt=TEXT, parts=st.lists(TEXT, max_size=6))
def test_own_text_is_searched_as_a_naive_search_would(
    prompt: list[int], parts: list[list[int]]
) -> None:
    memory = OneRowMemory(MemorySettings(capacity_bytes=1 << 20, floor=0.0))
    handle, text = memory.open_request("", np.array(prompt, np.int32)), list(prompt)
    for part in parts:
        memory.extend(handle, part)
        text += part
        draft = memory.draft(handle, 4)
        check(draft.tokens.tolist(), draft.match_tokens, [text], text)


@settings(max_examples=60)
@given(
    kept=st.lists(st.tuples(st.sampled_from("ab"), TEXT), max_size=8),
    tenant=st.sampled_from("ab"),
    context=st.lists(st.integers(4, 7), min_size=1, max_size=4, unique=True),
    tail=st.lists(TOKEN, min_size=1, max_size=6, unique=True),
)
def test_kept_text_is_searched_in_its_tenants_partition_alone(
    kept: list[tuple[str, list[int]]], tenant: str, context: list[int], tail: list[int]
) -> None:
    memory = OneRowMemory(MemorySettings(capacity_bytes=1 << 20, floor=0.0, lead_tokens=0))
    for owner, text in kept:
        past = memory.open_request("", np.zeros(0, np.int32), owner)
        memory.extend(past, text)
        memory.close_request(past)
    now = memory.open_request("", np.array(context + tail, np.int32), tenant)
    draft = memory.draft(now, 4)
    own = [text for owner, text in kept if owner == tenant and len(text) > 1]
    check(draft.tokens.tolist(), draft.match_tokens, own, context + tail)


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(2, 300), min_size=1, max_size=120), data=st.data())
def test_a_partition_holds_the_newest_segments_whole(
    lengths: list[int], data: st.DataObject
) -> None:
    memory = OneRowMemory(MemorySettings(capacity_bytes=100_000, lead_tokens=0))
    written = []
    for number, length in enumerate(lengths):
        written.append([number * 1000 + n for n in range(length)])
        past = memory.open_request("", np.zeros(0, np.int32), "a")
        memory.extend(past, written[-1])
        memory.close_request(past)
        assert memory.stats()["used_bytes"] <= 100_000
    now = memory.open_request("", np.zeros(0, np.int32), "a")
    row = memory.pool.find(tenant_key("a"))
    assert row is not None

    def held() -> list[list[int]]:
        return [memory.pool.tokens_of(header).tolist() for header in memory.pool.segments(row)]

    kept = held()
    assert kept == written[len(written) - len(kept) :]
    assert kept, "the newest always fits"
    some = data.draw(st.sampled_from(kept))
    at = data.draw(st.integers(1, len(some) - 1))
    memory.extend(now, some[:at])
    if some in held():  # the request's own tokens may have taken its room
        assert memory.draft(now, 1).tokens.tolist() == [some[at]]


@settings(max_examples=60)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 99)), max_size=60)
)
def test_runs_of_the_arena_never_overlap_and_come_back(
    steps: list[tuple[bool, int, int]],
) -> None:
    arena, taken = Arena(200), []
    for take, words, pick in steps:
        if take:
            offset = arena.allocate(words)
            if offset is not None:
                assert all(offset + words <= o or o + w <= offset for o, w in taken)
                assert offset >= 0 and offset + words <= 200
                taken.append((offset, words))
        elif taken:
            arena.free(*taken.pop(pick % len(taken)))
        assert arena.free_words == 200 - sum(words for _, words in taken)
    for run in taken:
        arena.free(*run)
    assert arena.allocate(200) == 0


@settings(max_examples=40)
@given(
    texts=st.lists(TEXT, max_size=5),
    outcomes=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20),
)
def test_survival_is_a_probability_that_never_rises(
    texts: list[list[int]], outcomes: list[tuple[int, int]]
) -> None:
    memory = OneRowMemory(MemorySettings(capacity_bytes=1 << 20))
    for text in texts:
        past = memory.open_request("", np.array([1], np.int32))
        memory.extend(past, text)
        memory.close_request(past)
    now = memory.open_request("", np.array([0, 1, 2, 3, 0, 1], np.int32))
    for offered, accepted in outcomes:
        draft = memory.draft(now, 8)
        assert ((draft.survival > 0) & (draft.survival <= 1)).all()
        assert (np.diff(draft.survival) <= 0).all()
        memory.feedback(draft, offered, accepted)
        memory.extend(now, [accepted % 4])

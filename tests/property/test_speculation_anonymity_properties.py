"""Sharing against a naive model: nothing is public that fewer than k tenants were answered."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.drafting.one_row import OneRowMemory as Memory
from headrace_decode.speculative.draft import Source
from headrace_decode.speculative.retrieval.anonymity import WINDOW_TOKENS, SharedWindows, picked
from headrace_decode.speculative.retrieval.draft_memory import PUBLIC_KEY, Settings
from headrace_kvstore.salts import salt_of

TENANT = st.sampled_from("abcd")
SHORT = st.lists(st.integers(0, 2), max_size=25)
PHRASES = [[100 * n + m for m in range(20)] for n in range(4)]
"""Long enough to hold windows; answers are made of pieces of them."""


def contains(text: list[int], part: list[int]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


def tenants_with(answers: list[tuple[str, list[int]]], part: list[int]) -> set[str]:
    return {tenant for tenant, text in answers if contains(text, part)}


@st.composite
def pieced(draw: st.DrawFn) -> list[int]:
    text: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        phrase = draw(st.sampled_from(PHRASES))
        start = draw(st.integers(0, 4))
        text += phrase[start : start + draw(st.integers(12, 20))]
    return text


@settings(max_examples=200)
@given(
    answers=st.lists(st.tuples(TENANT, SHORT), max_size=25),
    k=st.integers(2, 4),
    window=st.integers(2, 5),
    one_in=st.integers(1, 3),
    entries=st.sampled_from([3, 1000]),
)
def test_a_window_is_published_when_its_kth_tenant_comes(
    answers: list[tuple[str, list[int]]], k: int, window: int, one_in: int, entries: int
) -> None:
    shared = SharedWindows(k, window_tokens=window, one_in=one_in, entries=entries)
    published: list[list[int]] = []
    for number, (tenant, text) in enumerate(answers):
        tokens = np.array(text, np.int32)
        for found in shared.observe(tenant, tokens):
            published.append(found.tolist())
            assert len(tenants_with(answers[: number + 1], found.tolist())) >= k
            assert contains(text, found.tolist())
        assert len(shared) <= entries
    if entries == 1000:
        wanted = set()
        for _, text in answers:
            for start in picked(np.array(text, np.int32), window, one_in).tolist():
                part = text[start : start + window]
                if len(tenants_with(answers, part)) >= k:
                    wanted.add(tuple(part))
        assert sorted(map(tuple, published)) == sorted(wanted)


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(TENANT, st.booleans(), st.lists(st.integers(0, 9), max_size=20), pieced()),
        max_size=20,
    ),
    k=st.integers(2, 3),
)
def test_no_sequence_of_the_public_partition_came_from_fewer_than_k_tenants(
    requests: list[tuple[str, bool, list[int], list[int]]], k: int
) -> None:
    sources = frozenset({Source.RESPONSE})
    memory = Memory(Settings(capacity_bytes=1 << 20, for_all=sources, shared_k=k))
    kept: list[tuple[str, list[int]]] = []
    for tenant, keep, prompt, answer in requests:
        handle = memory.open_request("", np.array(prompt, np.int32), tenant)
        memory.extend(handle, answer)
        memory.close_request(handle, keep=keep)
        if keep:
            kept.append((tenant, answer))
    row = memory.pool.find(PUBLIC_KEY)
    for header in memory.pool.segments(row) if row is not None else ():
        public = memory.pool.tokens_of(header).tolist()
        assert len(public) == WINDOW_TOKENS
        assert len(tenants_with(kept, public)) >= k


@settings(max_examples=100)
@given(text=SHORT, before=SHORT, behind=SHORT, one_in=st.integers(1, 4))
def test_a_text_is_cut_alike_wherever_it_stands(
    text: list[int], before: list[int], behind: list[int], one_in: int
) -> None:
    def cut(tokens: list[int]) -> NDArray[np.intp]:
        return picked(np.array(tokens, np.int32), 4, one_in)

    there = cut(before + text + behind) - len(before)
    inside = there[(there >= 0) & (there <= len(text) - 4)]
    assert inside.tolist() == cut(text).tolist()


def test_several_salts_of_one_tenant_count_as_one_tenant() -> None:
    windows = SharedWindows(3, one_in=1)
    answer = np.arange(40, dtype=np.int32)
    for own in "abcdef":
        assert windows.observe(salt_of("shop", own), answer) == []
    assert windows.observe(salt_of("bank"), answer) == []
    assert windows.observe(salt_of("farm"), answer) != []

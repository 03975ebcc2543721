"""A tenant is drafted the same whatever another has stored, drafted and been refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.draft_memory.one_row import OneRowMemory
from headrace_decode.speculative.retrieval.draft_memory import MemorySettings

SHARED = st.integers(0, 5)
SECRET = st.lists(st.integers(100, 140), min_size=12, max_size=40, unique=True)
TEXTS = st.lists(st.lists(SHARED, min_size=2, max_size=40), max_size=5)
Drafted = tuple[list[int], list[float], int, int]


def memory_of_one_mib() -> OneRowMemory:
    """It learns no chances: how often drafts of a kind were accepted is what tenants share."""
    return OneRowMemory(MemorySettings(capacity_bytes=1 << 20, floor=0.0, replica=1), learns=False)


def plant(memory: OneRowMemory, secret: list[int], corpus: list[int], accepted: int) -> None:
    """Tenant "a" stores a secret and a corpus, is drafted for, and tells how that went."""
    for text in (secret, secret[::-1], corpus):
        past = memory.open_request("", np.array(text[:1], np.int32), "a")
        memory.extend(past, text[1:])
        memory.close_request(past)
    memory.add_to_corpus("c", 1, [np.array(corpus, np.int32)], tenant="a")
    memory.activate_corpus("c", 1, tenant="a")
    now = memory.open_request("", np.array(secret[:4], np.int32), "a")
    for _ in range(8):
        draft = memory.draft(now, 4)
        memory.feedback(draft, len(draft), accepted)


def drafts_of_b(memory: OneRowMemory, kept: list[list[int]], prompt: list[int]) -> list[Drafted]:
    """What "b" is drafted along its prompt, token by token."""
    for text in kept:
        past = memory.open_request("", np.array(text[:1], np.int32), "b")
        memory.extend(past, text[1:])
        memory.close_request(past)
    now, found = memory.open_request("", np.array(prompt[:1], np.int32), "b"), []
    for token in [*prompt[1:], None]:
        draft = memory.draft(now, 8)
        found.append(
            (draft.tokens.tolist(), draft.survival.tolist(), draft.source, draft.match_tokens)
        )
        if token is not None:
            memory.extend(now, [token])
    return found


@st.composite
def prompts_around(draw: st.DrawFn, secret: list[int]) -> list[int]:
    """What a prober may write: pieces of the secret, its beginning among them, between others."""
    prompt: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        prompt += draw(st.lists(SHARED, max_size=4))
        begin = draw(st.one_of(st.just(0), st.integers(0, len(secret) - 2)))
        prompt += secret[begin : draw(st.integers(begin + 1, len(secret) - 1))]
    return prompt


@settings(max_examples=60)
@given(st.data(), SECRET, TEXTS, st.lists(SHARED, min_size=2, max_size=40), st.integers(0, 4))
def test_no_draft_depends_on_what_another_tenant_did(
    data: st.DataObject, secret: list[int], kept: list[list[int]], corpus: list[int], accepted: int
) -> None:
    prompt = data.draw(prompts_around(secret))
    with_secret, without = memory_of_one_mib(), memory_of_one_mib()
    plant(with_secret, secret, corpus, accepted)
    assert drafts_of_b(with_secret, kept, prompt) == drafts_of_b(without, kept, prompt)


@settings(max_examples=60)
@given(st.data(), SECRET, TEXTS)
def test_a_tenant_is_drafted_only_what_itself_has_written_in_this_order(
    data: st.DataObject, secret: list[int], kept: list[list[int]]
) -> None:
    prompt = data.draw(prompts_around(secret))
    memory = memory_of_one_mib()
    plant(memory, secret, secret[::-1], 4)
    known = {pair for text in [*kept, prompt] for pair in pairwise(text)}
    for at, (tokens, *_) in enumerate(drafts_of_b(memory, kept, prompt)):
        assert set(pairwise([prompt[at], *tokens])) <= known


@settings(max_examples=30)
@given(SECRET, st.integers(4, 10))
def test_the_owner_is_drafted_it(secret: list[int], known: int) -> None:
    memory = memory_of_one_mib()
    plant(memory, secret, secret, 4)
    now = memory.open_request("", np.array(secret[:known], np.int32), "a")
    assert memory.draft(now, 1).tokens.tolist() == [secret[known]]

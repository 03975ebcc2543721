"""The store beside sliding windows or recurrent layers, whatever requests come, end and fail: each
answer is that of a model whose KV and states are right, the store holds right ones only, and no
block is held in the end."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from headrace_kvstore.blocks.slot_record import READY
from tests.support.recurrent import STATES, Recurrent
from tests.support.scheduled import BLOCK, SPEC, recurrent, sliding
from tests.support.windowed import GOOD, GROUPS, LAYER_BYTES, WINDOW, Windowed

LONGEST = 7 * BLOCK
ENOUGH, FEW = 200, 22
"""Blocks of the engine: more than all requests take, and hardly those of one."""


@dataclass(frozen=True)
class Add:
    """A request: a prompt of one of two texts, cut off, and the length of its answer."""

    text: int
    tokens: int
    answer: int


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class Abort:
    """End one of the requests that there are."""

    number: int


@dataclass(frozen=True)
class Forget:
    """Empty the engine's own cache, if nothing uses it."""


@dataclass(frozen=True)
class Damage:
    """Flip bits of a layer of one of the stored blocks."""

    number: int
    layer: int


@dataclass(frozen=True)
class Evict:
    """Empty the store."""


ADDS = st.builds(
    Add, st.integers(0, 1), st.integers(BLOCK - 1, LONGEST), st.integers(1, BLOCK + 10)
)
STEPS = st.builds(Steps, st.integers(1, 12))
CALM = st.one_of(ADDS, STEPS, st.just(Forget()))
ROUGH = st.one_of(
    *(ADDS, STEPS, st.just(Forget()), st.just(Evict()), st.builds(Abort, st.integers(0, 3))),
    st.builds(Damage, st.integers(0, 20), st.integers(0, 3)),
)


def prompt(text: int, tokens: int) -> list[int]:
    return [(n * (7 + text)) % 1000 + 20 for n in range(tokens)]


class Story:
    """An engine, and what happens to it."""

    def __init__(self, engine: Windowed) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        self.aborted: set[str] = set()

    def happens(self, event: object) -> None:
        engine, arena = self.engine, self.engine.connector.arena
        there = list(engine.scheduler.requests)
        if isinstance(event, Add):
            name = f"r{len(self.requests)}"
            made = engine.add(name, prompt(event.text, event.tokens), event.answer)
            self.requests.append(made)
        elif isinstance(event, Steps):
            for _ in range(event.count):
                engine.step()
        elif isinstance(event, Abort) and there:
            name = there[event.number % len(there)]
            self.aborted.add(name)
            engine.abort(name)
        elif isinstance(event, Forget):
            engine.scheduler.reset_prefix_cache()
        elif isinstance(event, Evict):
            arena.clear()
        elif isinstance(event, Damage):
            slots = (arena.table["state"] == READY).nonzero()[0]
            if len(slots):
                first = event.layer * LAYER_BYTES
                slot = int(slots[event.number % len(slots)])
                arena.view(slot)[first + 3 : first + LAYER_BYTES : 4] ^= 0x80

    def ends(self) -> None:
        self.engine.ends()
        for request in self.requests:
            if request.request_id not in self.aborted:
                answer = list(request.output_token_ids)
                assert answer == [GOOD] * request.max_tokens, request.request_id
        assert self.engine.is_pool_free


def check_stored(engine: Windowed, request: Request) -> list[bool]:
    """Whether the store has each block of a request. All that it has must be right."""
    if isinstance(engine, Recurrent):
        engine.states(request)
    return engine.stored(request)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(CALM, min_size=1, max_size=10), st.booleans(), st.sampled_from([Windowed, Recurrent])
)
def test_without_losses_all_that_was_computed_is_stored(
    events: list[object], asynchronous: bool, kind: type[Windowed]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = kind(Path(folder), asynchronous, blocks=ENOUGH, step_tokens=2 * BLOCK)
        story = Story(engine)
        for event in events:
            story.happens(event)
        story.ends()
        for request in story.requests:
            full = (request.num_tokens - 1) // BLOCK
            assert all(check_stored(engine, request)[:full])
        engine.close()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(ROUGH, min_size=1, max_size=16),
    st.booleans(),
    st.sampled_from([ENOUGH, FEW]),
    st.sampled_from(
        [
            *(GROUPS, (SPEC, sliding(2 * BLOCK)), (sliding(WINDOW),)),
            *(STATES, (SPEC, recurrent())),
        ]
    ),
)
def test_whatever_is_lost_answers_are_right_and_no_block_stays_held(
    events: list[object], asynchronous: bool, blocks: int, groups: tuple[object, ...]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        has_states = any(isinstance(spec, MambaSpec) for spec in groups)
        engine = (Recurrent if has_states else Windowed)(
            Path(folder),
            asynchronous,
            blocks=blocks,
            step_tokens=2 * BLOCK,
            groups=groups,
            layers=4 // len(groups),
        )
        story = Story(engine)
        for event in events:
            story.happens(event)
        story.ends()
        if not any(isinstance(event, Damage) for event in events):
            for request in story.requests:
                check_stored(engine, request)
        engine.close()

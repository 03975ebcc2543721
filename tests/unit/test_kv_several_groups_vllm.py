"""The store beside several cache groups, in vLLM's own scheduler: requests that end, wait or lose
their blocks, whatever the groups keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from tests.support.recurrent import Recurrent
from tests.support.scheduled import BLOCK
from tests.support.windowed import GOOD, Windowed, counted

PROMPT = 6 * BLOCK + 8
STEP_TOKENS = 2 * BLOCK + 40
BLOCKS, FEW = 64, 26
"""Blocks of the engine: enough, and too few for three requests."""

Make = Callable[[int], Windowed]


@pytest.fixture(params=[False, True], ids=["one step at a time", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[Windowed, Recurrent], ids=["windows", "states"])
def make(
    tmp_path: Path, request: pytest.FixtureRequest, asynchronous: bool
) -> Iterator[Callable[[int], Windowed]]:
    """(blocks) -> an engine with windows or with recurrent layers."""
    engines: list[Windowed] = []

    def make(blocks: int) -> Windowed:
        engines.append(
            request.param(tmp_path, asynchronous, blocks=blocks, step_tokens=STEP_TOKENS)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_blocks_that_are_gone_when_the_load_begins_fail_it_once(make: Make) -> None:
    engine = make(BLOCKS)
    engine.store(PROMPT)
    request = engine.add("again", PROMPT, 5)
    output = engine.scheduler.schedule()
    engine.connector.arena.clear()
    engine.flight.append(engine.computed(output))
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert list(request.output_token_ids) == [GOOD] * 5
    states = 2 if isinstance(engine, Recurrent) else 0
    assert counted(engine, "lost_gone") == 6 + states, "they are not loaded again"


def test_an_aborted_request_gives_all_blocks_back(make: Make) -> None:
    engine = make(BLOCKS)
    engine.add("long", PROMPT, 5)
    for _ in range(2):
        engine.step()
    assert engine.pool.get_num_free_blocks() < BLOCKS - 1
    engine.abort("long")
    engine.ends()
    assert engine.is_pool_free


def test_a_request_that_is_aborted_while_it_loads_gives_all_blocks_back(make: Make) -> None:
    engine = make(BLOCKS)
    engine.store(PROMPT)
    request = engine.add("again", PROMPT, 5)
    engine.until(lambda: request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
    engine.abort("again")
    engine.ends()
    assert engine.is_pool_free


def test_preempted_requests_answer_as_others_and_give_all_blocks_back(make: Make) -> None:
    engine = make(FEW)
    requests = [engine.add(f"r{n}", 3 * BLOCK + n, 4 * BLOCK) for n in range(3)]
    engine.ends()
    assert any(request.num_preemptions for request in requests)
    assert all(set(request.output_token_ids) == {GOOD} for request in requests)
    assert engine.is_pool_free
    for request in requests:
        engine.stored(request), engine.states(request)


@pytest.mark.parametrize("asynchronous", [True], indirect=True)
def test_a_reset_saves_nothing_of_steps_in_flight(make: Make) -> None:
    engine = make(BLOCKS)
    request = engine.add("long", PROMPT, 5)
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ends()
    assert engine.stored(request)[2:] == [False] * 4 and not any(engine.states(request)[2:])
    assert engine.is_pool_free

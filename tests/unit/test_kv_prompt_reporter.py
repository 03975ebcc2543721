"""What the connector tells the eviction policy: prompts, and what blocks cost."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.connector.prompt_reporter import WAITING_PROMPTS, PromptReporter
from headrace_engine.connector.scheduler_connector import SchedulerConnector
from tests.support.kvnode import until


class Arena:
    """An arena whose policy others may keep."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, list[bytes]]] = []
        self.free = threading.Event()
        self.free.set()

    def record_prompt(self, row: int, hashes: list[bytes], at_s: float) -> bool:
        assert self.free.wait(20) and at_s <= time.monotonic()
        self.heard.append((row, list(hashes)))
        if hashes == [b"bad"]:
            raise ValueError
        return True


def test_a_prompt_is_told_in_each_namespace_and_nobody_waits_for_it() -> None:
    arena: Any = Arena()
    arena.free.clear()
    learner = PromptReporter(arena, [3, 4])
    learner.record_prompt([b"a"])
    learner.record_prompt([b"bad"])
    learner.record_prompt([b"b"])
    assert arena.heard == []
    arena.free.set()
    until(lambda: len(arena.heard) == 5)
    assert arena.heard == [(3, [b"a"]), (4, [b"a"]), (3, [b"bad"]), (3, [b"b"]), (4, [b"b"])]
    learner.close()


def test_of_too_many_prompts_the_oldest_are_forgotten() -> None:
    arena: Any = Arena()
    arena.free.clear()
    learner = PromptReporter(arena, [0])
    learner.record_prompt([b"first"])
    until(lambda: not learner._waiting)
    for number in range(WAITING_PROMPTS + 1):
        learner.record_prompt([b"%d" % number])
    arena.free.set()
    until(lambda: len(arena.heard) == 1 + WAITING_PROMPTS)
    assert arena.heard[1] == (0, [b"1"])
    learner.close()


def test_a_learner_tells_what_waits_before_it_ends() -> None:
    arena: Any = Arena()
    learner = PromptReporter(arena, [0])
    learner.record_prompt([b"a"])
    learner.close()
    assert arena.heard == [(0, [b"a"])]


@pytest.mark.parametrize(
    "fields, told",
    [
        ({}, [[b"x", b"y"]]),
        ({"block_hashes": []}, []),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, []),  # the other engine saw it
        ({"kv_transfer_params": {"do_remote_decode": True}}, [[b"x", b"y"]]),
        ({"kv_transfer_params": None}, [[b"x", b"y"]]),
    ],
)
def test_a_request_is_told_once_by_the_engine_that_prefills_it(
    fields: dict[str, Any], told: list[list[bytes]]
) -> None:
    heard: list[list[bytes]] = []
    index: Any = None
    scheduler = SchedulerConnector(index, 16, record_prompt=heard.append)
    scheduler.added(
        SimpleNamespace(
            **{"request_id": "r", "cache_salt": None, "block_hashes": [b"x", b"y"], **fields}
        )
    )
    assert heard == told

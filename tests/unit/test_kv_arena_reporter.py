"""What the connector reports to the arena: prompts, for its policy, and retained blocks."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.connector.arena.arena_reporter import WAITING_REPORTS, ArenaReporter
from headrace_engine.connector.scheduler_connector import SchedulerConnector
from headrace_kvstore.blocks.slot_record import tenant_number
from headrace_kvstore.identity.salts import tenant_salt
from tests.support.kvnode import until


class Arena:
    """An arena whose policy others may keep."""

    def __init__(self, learns: bool = True) -> None:
        self.policy = SimpleNamespace(learns=learns)
        self.retained: list[Any] = []
        self.heard: list[tuple[int, list[bytes]]] = []
        self.free = threading.Event()
        self.free.set()

    def record_prompt(self, row: int, hashes: list[bytes], at_s: float) -> bool:
        assert self.free.wait(20) and at_s <= time.monotonic()
        self.heard.append((row, list(hashes)))
        if hashes == [b"bad"]:
            raise ValueError
        return True

    def retain(self, row: int, hashes: list[bytes], until_s: float, tenant: int) -> None:
        assert self.free.wait(20)
        self.retained.append((row, hashes, until_s, tenant))


def test_a_prompt_is_told_and_nobody_waits_for_it() -> None:
    arena: Any = Arena()
    arena.free.clear()
    reporter = ArenaReporter(arena, 3)
    reporter.record_prompt([b"a"])
    reporter.record_prompt([b"bad"])
    reporter.record_prompt([b"b"])
    assert arena.heard == []
    arena.free.set()
    until(lambda: len(arena.heard) == 3)
    assert arena.heard == [(3, [b"a"]), (3, [b"bad"]), (3, [b"b"])]
    reporter.close()


def test_of_too_many_prompts_the_oldest_are_forgotten() -> None:
    arena: Any = Arena()
    arena.free.clear()
    reporter = ArenaReporter(arena, 0)
    reporter.record_prompt([b"first"])
    until(lambda: not reporter._waiting)
    for number in range(WAITING_REPORTS + 1):
        reporter.record_prompt([b"%d" % number])
    arena.free.set()
    until(lambda: len(arena.heard) == 1 + WAITING_REPORTS)
    assert arena.heard[1] == (0, [b"1"])
    reporter.close()


def test_a_reporter_tells_what_waits_before_it_ends() -> None:
    arena: Any = Arena()
    reporter = ArenaReporter(arena, 0)
    reporter.record_prompt([b"a"])
    reporter.close()
    assert arena.heard == [(0, [b"a"])]


def test_a_policy_that_does_not_learn_is_told_nothing() -> None:
    arena: Any = Arena(learns=False)
    reporter = ArenaReporter(arena, 0)
    reporter.record_prompt([b"a"])
    assert reporter.close() and arena.heard == []


def test_retained_blocks_are_reported_with_their_tenant_and_nobody_waits() -> None:
    arena: Any = Arena(learns=False)
    arena.free.clear()
    reporter = ArenaReporter(arena, 3)
    reporter.retain([b"a", b"b"], 60.0, tenant_salt("acme"))
    reporter.retain([b"c"], 70.0, "")
    assert arena.retained == []
    arena.free.set()
    assert reporter.close()
    acme = tenant_number(tenant_salt("acme"))
    assert arena.retained == [(3, [b"a", b"b"], 60.0, acme), (3, [b"c"], 70.0, 0)]


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

"""The gauge of how long an event loop was held."""

from __future__ import annotations

import asyncio
import time

from headrace_engine.loop_stall import REMEMBERED_S, LoopStall


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_longest_of_the_last_minute_is_told() -> None:
    clock = Clock()
    stall = LoopStall(now_s=clock)
    assert stall.longest_s == 0.0
    for late_s in (0.1, 0.4, 0.2):
        stall.record(late_s, late_s)
    clock.now += REMEMBERED_S - 1
    stall.record(0.3, 0.3)
    assert stall.longest_s == 0.4
    clock.now += 1
    assert stall.longest_s == 0.3
    clock.now += REMEMBERED_S
    assert stall.longest_s == 0.0


def test_after_a_busy_hour_a_minute_without_requests_is_told_as_no_stall() -> None:
    clock = Clock()
    stall = LoopStall(now_s=clock)
    for _ in range(2 * REMEMBERED_S):  # each second has had a request
        stall.record(0.1, 0.1)
        clock.now += 1
    clock.now += REMEMBERED_S
    assert stall.longest_s == 0.0
    assert stall.snapshot() == {"loop_stall_s": 0.0, "loop_held_s": 0.0}


async def test_a_loop_that_is_held_is_seen() -> None:
    stall = LoopStall()
    with stall.watching(), stall.watching():
        await asyncio.sleep(0.05)
        time.sleep(0.2)
        await asyncio.sleep(0.05)
    assert stall.longest_s >= 0.15


async def test_a_request_that_holds_the_loop_to_its_end_is_seen() -> None:
    stall = LoopStall()
    with stall.watching():
        time.sleep(0.2)
    assert stall.longest_s >= 0.15


async def test_between_requests_nothing_is_watched() -> None:
    stall = LoopStall()
    with stall.watching():
        await asyncio.sleep(0)
    time.sleep(0.2)
    await asyncio.sleep(0.05)
    with stall.watching():
        await asyncio.sleep(0)
    assert stall.longest_s < 0.1


async def test_time_without_a_processor_is_no_fault_of_the_loops() -> None:
    stall = LoopStall(now_s=Clock())
    stall.record(0.5, 0.01)
    stall.record(0.2, 0.4)
    assert stall.snapshot() == {"loop_stall_s": 0.5, "loop_held_s": 0.2}


async def test_code_that_holds_the_loop_is_told_from_a_wait() -> None:
    stall = LoopStall()
    with stall.watching():
        await asyncio.sleep(0.05)
        time.sleep(0.2)
        await asyncio.sleep(0.05)
        assert stall.snapshot()["loop_held_s"] < 0.1
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0.05)
    assert stall.snapshot()["loop_held_s"] >= 0.15

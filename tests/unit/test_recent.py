"""A value that many ask for is made once while it is recent."""

from __future__ import annotations

import asyncio

import pytest

from headrace.recent import Recent


class Made:
    """Counts how often the value was made, which waits until `may_end`."""

    def __init__(self) -> None:
        self.count = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, word: str) -> str:
        self.count += 1
        await self.may_end.wait()
        return f"{word} {self.count}"


async def test_callers_share_a_recent_value() -> None:
    recent = Recent(Made(), max_age_s=60.0)
    assert [await recent("a"), await recent("b")] == ["a 1", "a 1"]


async def test_an_old_value_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("headrace.recent.monotonic", lambda: now_s)
    recent = Recent(Made(), max_age_s=1.0)
    assert await recent("a") == "a 1"
    now_s = 1.0
    assert await recent("a") == "a 1"
    now_s = 1.01
    assert await recent("b") == "b 2"


async def test_a_cancelled_caller_leaves_the_value_to_others() -> None:
    made = Made()
    made.may_end.clear()
    recent = Recent(made, max_age_s=60.0)
    first, second = (asyncio.create_task(recent("a")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    made.may_end.set()
    assert await second == "a 1"
    assert made.count == 1

"""A supervised task is logged when it fails, and started again."""

from __future__ import annotations

import asyncio
import logging

import pytest

from headrace_engine import supervise as supervising
from headrace_engine.supervise import supervise


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "MIN_PAUSE_S", 0.01)
    monkeypatch.setattr(supervising, "MAX_PAUSE_S", 0.02)


async def test_a_task_that_fails_is_logged_and_starts_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 4:
            raise ValueError(f"run {runs}")

    with caplog.at_level(logging.ERROR, "headrace.engine"):
        await asyncio.wait_for(supervise(work, "count the runs"), 5)
    assert runs == 4
    assert ["count the runs" in record.message for record in caplog.records] == [True] * 3
    assert "ValueError: run 3" in caplog.text


async def test_a_task_that_may_run_once_is_logged_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        raise ValueError("no")

    with caplog.at_level(logging.ERROR, "headrace.engine"):
        await asyncio.wait_for(supervise(work, "try once", restarts=False), 5)
    assert "try once" in caplog.text


async def test_a_cancelled_task_ends_at_once_also_in_its_pause() -> None:
    async def work() -> None:
        raise ValueError("no")

    task = supervise(work, "fail")
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

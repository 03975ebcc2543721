"""The file by whose age Kubernetes' readiness probe knows that an engine serves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from headrace_engine.serving.ready_file import (
    READY_FILE,
    TOUCH_INTERVAL_S,
    keep_ready,
    start_ready_file,
)
from tests.support.chart import pods, preset

MAX_AGE_S = 30


class Engine:
    """An engine whose health check fails while `error` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def check_health(self) -> None:
        if self.error is not None:
            raise self.error


async def until(condition: bool, path: Path) -> None:
    while path.exists() is not condition:
        await asyncio.sleep(0.001)


async def test_the_file_is_there_while_the_engine_is_well(tmp_path: Path) -> None:
    path, engine = tmp_path / "ready", Engine()
    task = asyncio.create_task(keep_ready(path, engine.check_health, interval_s=0.001))
    async with asyncio.timeout(10):
        await until(True, path)
        engine.error = RuntimeError("the engine is dead")
        await until(False, path)
        engine.error = None
        await until(True, path)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert not path.exists(), "a replica that ends serves no more"


async def test_each_check_that_passes_makes_the_file_young_again(tmp_path: Path) -> None:
    path, engine = tmp_path / "ready", Engine()
    path.touch()
    os.utime(path, (1.0, 1.0))
    task = asyncio.create_task(keep_ready(path, engine.check_health))
    async with asyncio.timeout(10):
        while path.stat().st_mtime == 1.0:
            await asyncio.sleep(0.001)
    task.cancel()


async def test_without_the_variable_nothing_is_written() -> None:
    assert start_ready_file(Engine().check_health, {}) is None


async def test_the_variable_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    task = start_ready_file(Engine().check_health, {READY_FILE: str(path)})
    assert task is not None
    async with asyncio.timeout(10):
        await until(True, path)
    task.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("age_s", "ready"), [(None, False), (0, True), (MAX_AGE_S - 5, True), (MAX_AGE_S + 5, False)]
)
def test_the_probe_of_the_chart_goes_by_the_files_age(
    tmp_path: Path, role: str, age_s: float | None, ready: bool
) -> None:
    """The probe's own command, with the path that the chart gives to the replica."""
    [container] = pods(preset("laptop"))[role]["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    probe = container["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] <= MAX_AGE_S
    assert 2 * TOUCH_INTERVAL_S < MAX_AGE_S, "one late touch is no fault"
    path = tmp_path / "ready"
    if age_s is not None:
        path.touch()
        at_s = time.time() - age_s
        os.utime(path, (at_s, at_s))
    command = [part.replace(env[READY_FILE], str(path)) for part in probe["exec"]["command"]]
    assert str(path) in command[-1]
    done = subprocess.run(command, capture_output=True, timeout=30)
    assert (done.returncode == 0) is ready

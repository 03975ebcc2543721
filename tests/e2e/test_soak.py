"""What takes hours: `make soak`. Kills again and again, and load for long, without loss or growth.

HEADRACE_SOAK_KILLS (20) and HEADRACE_SOAK_S (3600) say how many and how long.
"""

from __future__ import annotations

import os
import time

import psutil
import pytest

from tests.support import run
from tests.support.app import App, until
from tests.support.faults import (
    ANSWER_TOKENS,
    CLIENTS,
    PROMPTS,
    assert_end,
    assert_nothing_was_lost,
    failures,
    kill,
    wait_for_new,
    wait_for_remote,
    wrong_tokens,
)
from tests.support.load import Load

KILLS = int(os.environ.get("HEADRACE_SOAK_KILLS", "20"))
SOAK_S = float(os.environ.get("HEADRACE_SOAK_S", "3600"))
WARM_SHARE = 0.2
"""Of the time: caches and pools fill."""
GROWTH = 0.10
"""Of memory, in what follows."""

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(int(KILLS * 400 + SOAK_S))]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kills_in_a_row_lose_nothing(app: App, role: str) -> None:
    shm = None
    for number in range(KILLS):
        pid = int(app.replica(role)["pid"])
        with Load(app.url, PROMPTS, clients=CLIENTS, max_tokens=100) as load:
            until(lambda: load.streaming() >= 2, 240, "answers are written", app.status)
            orphans, killed_at = kill(pid), time.monotonic()
            assert_end(orphans)
            wait_for_new(app, role, pid)
        answers = load.stop()
        cut = assert_nothing_was_lost(answers, killed_at)
        with app.policy("remote"):
            wait_for_remote(app)
        app.wait_idle(limit_s=60)
        print(f"kill {number}: {len(answers)} requests, {len(cut)} streams went on")
        if number == 0:
            shm = len(os.listdir(run.SHM))
    assert shm is None or len(os.listdir(run.SHM)) <= shm + KILLS // 4, "files in /dev/shm pile up"


def test_load_for_long_neither_fails_nor_grows(app: App) -> None:
    def memory() -> dict[str, int]:
        """Bytes by role, what descends from the replica included."""
        found = {}
        for role in ("prefill", "decode"):
            replica = psutil.Process(app.replica(role)["pid"])
            parts = [replica, *replica.children(recursive=True)]
            found[role] = sum(part.memory_info().rss for part in parts)
        return found

    with Load(app.url, PROMPTS, clients=CLIENTS, max_tokens=ANSWER_TOKENS) as load:
        time.sleep(WARM_SHARE * SOAK_S)
        before = memory()
        time.sleep((1 - WARM_SHARE) * SOAK_S)
        after = memory()
    answers = load.stop()
    app.wait_idle(limit_s=60)
    print(f"{len(answers)} requests; bytes before {before}, after {after}")
    assert not failures(answers)
    for role in before:
        assert after[role] <= (1 + GROWTH) * before[role], f"{role} grows"
    assert not wrong_tokens(app, answers[-CLIENTS:])

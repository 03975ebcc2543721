"""What belongs to an instance is found and ended, nothing else. Real processes, no Ray."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import psutil
import pytest

from headrace.cli.reap import TOKEN_VARIABLE, Belongings, ProcessId, end, remove_shm, shm_names

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); " + SLEEP
# Starts a child in a session of its own and dies, so that init adopts the child.
ORPHAN = (
    "import subprocess, sys; "
    f"p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True); "
    "print(p.pid, flush=True)"
)


@pytest.fixture
def spawn() -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def identity(pid: int) -> ProcessId:
    return ProcessId.of(psutil.Process(pid))


def test_a_later_process_with_the_same_pid_is_another(spawn) -> None:
    process = spawn(SLEEP)
    now = identity(process.pid)
    assert now.process() is not None
    assert ProcessId(now.pid, now.created - 10).process() is None


def test_found_by_record_descent_environment_and_command(spawn, tmp_path: Path) -> None:
    recorded = spawn(
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])", SLEEP
    )
    by_token = spawn(SLEEP, **{TOKEN_VARIABLE: "t0ken"})
    by_folder = spawn(SLEEP, f"{tmp_path}/r/sockets/raylet")
    stranger = spawn(SLEEP, **{TOKEN_VARIABLE: "other"})
    belongings = Belongings("t0ken", tmp_path, [identity(recorded.pid)])
    deadline = time.monotonic() + 10
    while not psutil.Process(recorded.pid).children() and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = psutil.Process(recorded.pid).children()
    found = {i.pid for i in belongings.processes()}
    assert found == {recorded.pid, child.pid, by_token.pid, by_folder.pid}
    assert end(belongings, grace_s=2) == set()
    assert not belongings.processes()
    assert stranger.poll() is None


def test_orphans_are_found_by_their_token(spawn, tmp_path: Path) -> None:
    parent = spawn(ORPHAN, **{TOKEN_VARIABLE: "orphan-token"})
    orphan = int(parent.stdout.readline())
    parent.wait()
    belongings = Belongings("orphan-token", tmp_path)
    assert {i.pid for i in belongings.processes()} == {orphan}
    end(belongings, grace_s=2)
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == "zombie"


def test_who_ignores_sigterm_is_killed(spawn, tmp_path: Path) -> None:
    process = spawn(STUBBORN)
    process.stdout.readline()
    end(Belongings("x", tmp_path, [identity(process.pid)]), grace_s=0.3)
    assert process.wait(5) == -9


def test_this_process_is_spared_whatever_it_carries(tmp_path: Path) -> None:
    me = identity(os.getpid())
    assert me not in Belongings("x", tmp_path, [me]).processes()


def test_shm_files_of_ours_are_removed_and_others_left(spawn, tmp_path: Path) -> None:
    code = (
        "from multiprocessing import shared_memory as s, resource_tracker as t; "
        "m = s.SharedMemory(create=True, size=4096); t.unregister(m._name, 'shared_memory'); "
        "print(m.name, flush=True); " + SLEEP
    )
    before = shm_names()
    process = spawn(code)
    ours = process.stdout.readline().strip()
    theirs = shared_memory.SharedMemory(create=True, size=4096)
    try:
        belongings = Belongings("x", tmp_path, [identity(process.pid)], before)
        noted = end(belongings, grace_s=1)
        assert ours in noted
        assert theirs.name not in noted
        process.wait()
        assert remove_shm(noted, before) == [ours]
        assert remove_shm(noted, before) == []
        # A file that a process still uses stays, even if it was noted by mistake.
        assert remove_shm({theirs.name}, before) == []
        assert theirs.name in shm_names()
    finally:
        theirs.close()
        theirs.unlink()
        with contextlib.suppress(Exception):
            resource_tracker.unregister(f"/{ours}", "shared_memory")


def test_a_file_that_was_there_before_is_never_ours(spawn, tmp_path: Path) -> None:
    old = shared_memory.SharedMemory(create=True, size=4096)
    try:
        before = shm_names()
        assert remove_shm({old.name}, before) == []
    finally:
        old.close()
        old.unlink()

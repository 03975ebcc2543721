"""What belongs to an instance is found and ended, nothing else. Real processes, no Ray."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import psutil
import pytest

from headrace.cli.process_matcher import ProcessMatcher, terminate
from headrace.observability.shared_memory import (
    SHM,
    TOKEN_VARIABLE,
    ProcessId,
    remove_shm,
    shm_files,
    shm_names,
    shm_users,
)

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); " + SLEEP
# Starts a child in a session of its own and dies, so that init adopts the child. It waits for the
# child's code: a process that is about to execute a program has no environment to read.
ORPHAN = (
    "import subprocess, sys; "
    f"p = subprocess.Popen([sys.executable, '-c', {'print(1, flush=True); ' + SLEEP!r}], "
    "start_new_session=True, stdout=subprocess.PIPE); "
    "p.stdout.readline(); print(p.pid, flush=True)"
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
    matcher = ProcessMatcher("t0ken", tmp_path, [identity(recorded.pid)])
    deadline = time.monotonic() + 10
    while not psutil.Process(recorded.pid).children() and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = psutil.Process(recorded.pid).children()
    found = {i.pid for i in matcher.processes()}
    assert found == {recorded.pid, child.pid, by_token.pid, by_folder.pid}
    assert terminate(matcher, grace_s=2) == set()
    assert not matcher.processes()
    assert stranger.poll() is None


def test_orphans_are_found_by_their_token(spawn, tmp_path: Path) -> None:
    parent = spawn(ORPHAN, **{TOKEN_VARIABLE: "orphan-token"})
    orphan = int(parent.stdout.readline())
    parent.wait()
    matcher = ProcessMatcher("orphan-token", tmp_path)
    assert {i.pid for i in matcher.processes()} == {orphan}
    terminate(matcher, grace_s=2)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(orphan).status() == "zombie"


def test_who_ignores_sigterm_is_killed(spawn, tmp_path: Path) -> None:
    process = spawn(STUBBORN)
    process.stdout.readline()
    terminate(ProcessMatcher("x", tmp_path, [identity(process.pid)]), grace_s=0.3)
    assert process.wait(5) == -9


def test_this_process_is_spared_whatever_it_carries(tmp_path: Path) -> None:
    me = identity(os.getpid())
    assert me not in ProcessMatcher("x", tmp_path, [me]).processes()


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
        matcher = ProcessMatcher("x", tmp_path, [identity(process.pid)], before)
        noted = terminate(matcher, grace_s=1)
        assert {file.name for file in noted} == {ours}
        process.wait()
        assert remove_shm(noted, before) == [ours]
        assert remove_shm(noted, before) == []
        # A file that a process still uses stays, even if it was noted by mistake.
        assert remove_shm(shm_files([theirs.name]), before) == []
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
        assert remove_shm(shm_files([old.name]), before) == []
    finally:
        old.close()
        old.unlink()


# Python's lock between processes, as vLLM makes them: its file outlives a killed maker.
SEMAPHORE = (
    "import multiprocessing, os, time; "
    "from multiprocessing import resource_tracker as t; "
    "lock = multiprocessing.get_context('spawn').Lock(); "
    "t.unregister(lock._semlock.name, 'semaphore'); "
    "print('sem.' + lock._semlock.name[1:], flush=True); "
)


def test_the_maker_of_a_semaphore_is_found_though_its_map_shows_another_name(spawn) -> None:
    maker = spawn(SEMAPHORE + SLEEP)
    (file,) = shm_files([maker.stdout.readline().strip()])
    try:
        assert file.name not in Path(f"/proc/{maker.pid}/maps").read_text()
        users = shm_users([file], psutil.process_iter())
        assert users == {file: {identity(maker.pid)}}
        assert remove_shm([file], frozenset()) == []
        maker.kill()
        maker.wait()
        assert remove_shm([file], frozenset()) == [file.name]
    finally:
        (SHM / file.name).unlink(missing_ok=True)


def test_a_file_of_the_same_name_that_somebody_else_made_since_stays() -> None:
    path = SHM / f"sem.mp-test{os.getpid()}"
    path.write_bytes(b"ours")
    try:
        (ours,) = shm_files([path.name])
        path.rename(path.with_name(path.name + "-old"))
        path.write_bytes(b"theirs")
        assert remove_shm([ours], frozenset()) == []
        assert path.read_bytes() == b"theirs"
    finally:
        path.unlink()
        path.with_name(path.name + "-old").unlink()


def test_an_app_without_a_keeper_has_what_its_killed_processes_shared_removed() -> None:
    # A parent, as Ray's raylet, of a store's node and of two makers of a semaphore.
    code = (
        "import subprocess, sys, time\n"
        "node = subprocess.Popen([sys.executable, '-c', sys.argv[2]])\n"
        "makers = [subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE,"
        " text=True) for _ in range(2)]\n"
        "print(*(m.stdout.readline().strip() for m in makers), flush=True)\n"
        "sys.stdin.readline(); makers[0].kill(); makers[0].wait(); print('killed', flush=True)\n"
        "sys.stdin.readline(); makers[1].kill(); node.kill(); node.wait()\n"
    )
    node = (
        "from headrace.observability.shared_memory import watch_siblings; watch_siblings(); "
        + SLEEP
    )
    raylet = subprocess.Popen(
        [sys.executable, "-c", code, SEMAPHORE + SLEEP, node],
        env={k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert raylet.stdin is not None and raylet.stdout is not None
    dead, alive = raylet.stdout.readline().split()
    try:
        time.sleep(4)
        raylet.stdin.write("\n")
        raylet.stdin.flush()
        assert raylet.stdout.readline() == "killed\n"
        deadline = time.monotonic() + 30
        while dead in shm_names():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert alive in shm_names()
    finally:
        raylet.communicate("\n", 60)
        (SHM / alive).unlink(missing_ok=True)


def test_the_keeper_removes_what_a_killed_process_shared_and_keeps_what_is_in_use(
    tmp_path: Path,
) -> None:
    # A command that starts two makers of a semaphore and kills the first, as a lost replica.
    code = (
        "import subprocess, sys, time\n"
        "makers = [subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE,"
        " text=True) for _ in range(2)]\n"
        "print('NAMES', *(m.stdout.readline().strip() for m in makers), flush=True)\n"
        "time.sleep(4); makers[0].kill(); makers[0].wait(); print('KILLED', flush=True)\n"
        "time.sleep(600)\n"
    )
    spec = {"name": "k", "token": f"supervisor-{os.getpid()}", "temp_dir": str(tmp_path)}
    spec |= {"parent": None, "listener": None, "shm_before": sorted(shm_names())}
    spec |= {"command": [sys.executable, "-c", code, SEMAPHORE + SLEEP]}
    (tmp_path / "supervisor.json").write_text(json.dumps(spec))
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli.supervisor", str(tmp_path / "supervisor.json")]
    )
    log = tmp_path / "ray.log"

    def until(true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not true():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    try:
        until(lambda: log.exists() and "KILLED" in log.read_text())
        dead, alive = log.read_text().split("NAMES ")[1].split("\n")[0].split()
        until(lambda: dead not in shm_names())
        assert alive in shm_names()
        supervisor.terminate()
        supervisor.wait(60)
        assert alive not in shm_names()
    finally:
        supervisor.kill()
        supervisor.wait()

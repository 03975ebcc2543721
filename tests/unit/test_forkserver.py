"""Processes forked from one that has imported what they need (`headrace.forkserver`)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.forkserver import LAUNCHER, SERVER, listen
from headrace.forkserver.launcher import ADDRESS_VARIABLE
from headrace.forkserver.server import WITH_RAY

END_S = 30.0
ABOUT = """
import json, os, sys
about = {"pid": os.getpid(), "parent": os.getppid(), "arguments": sys.argv, "path": sys.path[0],
         "folder": os.getcwd(), "mine": os.environ.get("MINE"),
         "imported": "colorsys" in sys.modules}
print(json.dumps(about))
"""


class Server:
    """A fork server that has imported two small modules."""

    def __init__(self, owner: int, first: str = "colorsys,bisect") -> None:
        self.address = f"test-{secrets.token_hex(8)}"
        listener = listen(self.address)
        fd = listener.fileno()
        command = [*SERVER, str(fd), str(owner), first, ""]
        self.process = subprocess.Popen(command, pass_fds=[fd])
        listener.close()

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start the launcher with arguments of `python`."""
        environment = {**os.environ, ADDRESS_VARIABLE: self.address, **options.pop("env", {})}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([*LAUNCHER, *arguments], env=environment, **pipes, **options)

    def about(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """What a program that prints `ABOUT` says of itself, and whether it was forked."""
        process = self.start(*arguments, **options)
        said, _ = process.communicate(timeout=END_S)
        about = json.loads(said)
        return {**about, "forked": about["parent"] == self.process.pid}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(os.getpid())
    yield server
    server.end()


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    over_s = time.monotonic() + END_S
    while not holds():
        assert time.monotonic() < over_s
        time.sleep(0.02)


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The child that a launcher stands for; its program says its number first."""
    assert process.stdout is not None
    return psutil.Process(int(process.stdout.readline()))


SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"


def test_a_child_has_the_imports_and_all_that_its_launcher_has(
    server: Server, tmp_path: Path
) -> None:
    about = server.about("-c", ABOUT, "--given", env={"MINE": "so"}, cwd=tmp_path)

    assert about["forked"] and about["imported"]
    assert about["arguments"] == ["-c", "--given"]
    assert (about["folder"], about["mine"], about["path"]) == (str(tmp_path), "so", "")


def test_it_runs_a_file_and_a_module_as_python_would(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "about.py"
    file.write_text(ABOUT)

    by_file = server.about(str(file), "x")
    by_module = server.about("-m", "about", "y", cwd=tmp_path)

    assert by_file["forked"] and by_module["forked"]
    assert (by_file["arguments"], by_file["path"]) == ([str(file), "x"], str(tmp_path))
    assert (by_module["arguments"], by_module["path"]) == ([str(file), "y"], str(tmp_path))


def test_standard_input_and_other_descriptors_are_the_launchers(server: Server) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"from a pipe")
    code = f"import os, sys; print(sys.stdin.readline().strip(), os.read({reader}, 99).decode())"
    process = server.start("-c", code, pass_fds=[reader])
    said, _ = process.communicate("typed\n", timeout=END_S)
    os.close(reader)
    os.close(writer)

    assert said == "typed from a pipe\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise ValueError", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)", -signal.SIGUSR1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_launcher_ends_as_its_child_does(server: Server, code: str, status: int) -> None:
    assert server.start("-c", code, stderr=subprocess.DEVNULL).wait(END_S) == status


def test_signals_reach_the_child(server: Server) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(100)\n"
    )
    process = server.start("-c", code)
    child_of(process)
    process.terminate()

    assert process.wait(END_S) == 5


def test_a_signal_that_the_launcher_ignores_is_ignored_by_the_child(server: Server) -> None:
    code = (
        "import os, signal\n"
        "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, signal.getsignal(signal.SIGTERM)"
        " == signal.SIG_DFL, os.umask(0))"
    )

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.umask(0o027)

    said, _ = server.start("-c", code, preexec_fn=prepare).communicate(timeout=END_S)
    assert said.split() == ["True", "True", str(0o027)]


@pytest.mark.parametrize(
    "request_",
    [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\2{}", b"\0\0\0\3abc", b"\0\0\0\5abc"],
    ids=["too long", "a list", "empty", "no JSON", "cut off"],
)
def test_a_malformed_request_is_refused_and_the_next_one_served(
    server: Server, request_: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect("\0" + server.address)
        client.sendall(request_)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""

    assert server.about("-c", ABOUT)["forked"]


def test_a_child_is_killed_with_its_launcher(server: Server) -> None:
    process = server.start("-c", SLEEPS)
    child = child_of(process)
    process.kill()
    process.wait()

    until(lambda: not child.is_running())
    assert server.about("-c", ABOUT)["forked"]


def test_children_end_with_the_server() -> None:
    server = Server(os.getpid())
    process = server.start("-c", SLEEPS)
    child = child_of(process)
    server.end()

    assert process.wait(END_S) == -signal.SIGKILL
    until(lambda: not child.is_running())


def test_the_server_ends_with_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    server = Server(owner.pid)
    assert server.about("-c", ABOUT)["forked"]
    owner.communicate(b"\n")

    assert server.process.wait(END_S) == 0


@pytest.mark.parametrize("arguments", [("-W", "ignore", "-c", ABOUT), ("-X", "dev", "-c", ABOUT)])
def test_python_runs_what_a_fork_cannot(server: Server, arguments: tuple[str, ...]) -> None:
    about = server.about(*arguments)

    assert not about["forked"] and not about["imported"]


def test_python_runs_where_no_server_answers(server: Server) -> None:
    about = server.about("-c", ABOUT, env={ADDRESS_VARIABLE: "nobody"})

    assert not about["forked"] and not about["imported"]


def test_python_runs_where_imports_would_read_another_environment(server: Server) -> None:
    assert not server.about("-c", ABOUT, env={"HF_HOME": "/elsewhere"})["forked"]
    assert server.about("-c", ABOUT, env={"OMP_NUM_THREADS": "3"})["forked"]


SPAWNS = """
import multiprocessing, os, sys
def work(pipe):
    pipe.send((os.getpid(), "colorsys" in sys.modules))
    pipe.poll(None)
if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=work, args=(theirs,))
    child.start()
    theirs.close()
    print(os.getpid(), *ours.recv(), flush=True)
    sys.stdin.read()
    ours.close()
    child.join()
"""


def test_what_a_child_spawns_is_forked_too(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "spawns.py"
    file.write_text(SPAWNS)
    process = server.start(str(file))
    said, _ = process.communicate("", timeout=END_S)
    _, _, imported = said.split()

    assert imported == "True"


def test_what_a_worker_of_rays_starts_is_its_descendant_and_ends_with_it(
    server: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "ray" / "_private" / "workers"
    folder.mkdir(parents=True)
    file = folder / "default_worker.py"
    file.write_text(SPAWNS)
    process = server.start(str(file))
    assert process.stdout is not None
    worker, spawned, imported = process.stdout.readline().split()
    family = psutil.Process(int(worker)).children(recursive=True)

    assert imported == "True"
    assert int(spawned) in [each.pid for each in family]

    os.kill(int(worker), signal.SIGKILL)
    until(lambda: not any(each.is_running() and each.status() != "zombie" for each in family))
    assert process.wait(END_S) == -signal.SIGKILL


def test_children_draw_different_random_numbers() -> None:
    server = Server(os.getpid(), "numpy,random")
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    drawn = [server.start("-c", code).communicate(timeout=END_S)[0].split() for _ in range(2)]
    server.end()

    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]


def test_rays_workers_draw_different_ids() -> None:
    """Else Ray takes a task of one worker for that of another."""
    server = Server(os.getpid(), ",".join(WITH_RAY))
    code = "import ray._raylet; print(ray._raylet.UniqueID.from_random().hex())"
    drawn = [server.start("-c", code).communicate(timeout=120)[0] for _ in range(2)]
    server.end()

    assert drawn[0] and drawn[1] and drawn[0] != drawn[1]


def test_many_at_once(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(server.start("-c", ABOUT)) for _ in range(40)]
        said = [json.loads(process.communicate(timeout=END_S)[0]) for process in started]

    assert len({each["pid"] for each in said}) == 40
    assert all(each["imported"] for each in said)

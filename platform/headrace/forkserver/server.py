"""The fork server: imports what replicas and engines need, then forks a child for each launcher.

Run as `python -m headrace.forkserver.server LISTENER OWNER [FIRST [WITH_RAY]]`: the file descriptor
of a Unix socket that listens, the id of the process with which the server ends, and the modules
that it imports in place of `FIRST` and `WITH_RAY`, separated by commas. It has one Python thread
and no event loop, or it could not fork. Its children end with it.

Ray reads its variables, among them the number of the job, when its library is loaded. So the
modules that import Ray are imported when the first of Ray's workers is asked for, with that
worker's variables.

Ray's library draws the ids of tasks and objects from a generator that is seeded once a process, at
the first draw. If this process drew, all its children would have the same ids, and a process that
two of them call would fail (`Check failed: erased == 1`). A module that defines an actor class
draws, and `ray.serve` imports some, so the children import it themselves.

A child that is a worker of Ray's begins by forking a server of its own, before it has threads. That
server forks the processes that the worker starts later. So an engine is a descendant of its
replica, as it would be without forks, and ends with it.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import logging
import multiprocessing
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import setproctitle

from headrace.forkserver import READ_LATER, is_of_imports, listen
from headrace.forkserver.child import (
    Job,
    end_with_parent,
    job_of,
    parse_command,
    renew_libraries,
    take_fds,
)
from headrace.forkserver.launcher import ADDRESS_VARIABLE, FORWARDED

logger = logging.getLogger("headrace.forkserver")

FIRST = ("vllm.entrypoints.openai.api_server",)
WITH_RAY = (
    "ray",
    "pandas",
    "httpx",
    "headrace.gateway.app",
    "headrace_engine.connector.connector",
    "headrace_engine.pull_proof.connector",
    "headrace_decode.llm.planned_llm",
    "headrace_kvstore.node.node",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_model_runner",
)
EXECUTABLE = Path(__file__).with_name("python.sh")
MAX_FDS = 253
"""Maximum number of file descriptors that one message may carry (SCM_MAX_FD)."""
REQUEST = {"arguments", "environment", "folder", "umask", "fds", "ignored", "niceness", "cores"}
MAX_REQUEST_BYTES = 16 << 20
READ_S = 5.0
RETRY_S = 0.1
GRACE_S = 10.0
"""Time for children to end by themselves after the owner has ended."""


class _Launcher:
    """A launcher's connection, its request, and the child that runs for it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.request: dict[str, Any] = {}
        self.fds: list[int] = []
        self.child: int | None = None

    def receive(self) -> None:
        """Read the request and the file descriptors that come with it.

        Raises:
            OSError, ValueError: it does not come in time, is none, or is another user's.
        """
        self.connection.settimeout(READ_S)
        of = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if int.from_bytes(of[4:8], sys.byteorder) != os.getuid():
            raise PermissionError("it is another user's")
        head, ancillary, _, _ = self.connection.recvmsg(4, socket.CMSG_SPACE(MAX_FDS * 4))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i", data[: len(data) - len(data) % 4])
                self.fds += fds
        size = int.from_bytes(head + self._bytes(4 - len(head)), "big")
        if size > MAX_REQUEST_BYTES:
            raise ValueError(f"its request has {size} bytes")
        request = json.loads(self._bytes(size))
        if not isinstance(request, dict) or request.keys() != REQUEST:
            raise ValueError(f"its request must have {sorted(REQUEST)}")
        if len(request["fds"]) != len(self.fds):
            raise ValueError(f"{len(self.fds)} of its file descriptors came")
        self.request = request

    def _bytes(self, size: int) -> bytes:
        read = bytearray()
        while len(read) < size:
            part = self.connection.recv(min(size - len(read), 1 << 16))
            if not part:
                raise ConnectionError("its launcher has ended")
            read += part
        return bytes(read)

    def close_fds(self) -> None:
        """Close this process's copies of the launcher's file descriptors."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def close(self) -> None:
        """Close all that this process has of the launcher."""
        self.close_fds()
        self.connection.close()


class _Imported:
    """Modules that are imported for all children.

    Attributes:
        variables: environment variables that the imports have set.
        fault: why no process can be forked, or None.
    """

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.fault: str | None = None

    def add(self, modules: Sequence[str]) -> None:
        """Import modules. One that cannot be imported is left to the children."""
        before = dict(os.environ)
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:
                logger.warning("%s is not imported ahead: %r", module, error)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self.fault = "an import has initialised CUDA"
        self.variables |= {
            key: value for key, value in os.environ.items() if before.get(key) != value
        }
        sys.stdout.flush()  # or each child would write it, too
        gc.collect()
        gc.freeze()  # imported objects stay, and children share their memory

    def has_read(self, name: str) -> bool:
        """Whether an import may have read this variable, and has not set it."""
        if name in self.variables or name in READ_LATER:
            return False
        return is_of_imports(name) or ("ray" in sys.modules and name.startswith("RAY_"))


class ForkServer:
    """Forks children for launchers.

    Args:
        listener: a bound Unix socket that listens.
        owner: file descriptor of the process (pidfd) that this server ends with.
        environment: a launcher's must equal it in the variables that imports read. None for a
            worker's own server: vLLM would fork there with whatever the worker has changed.
        imported: what has been imported in it.
        with_ray: modules to import for the first of Ray's workers.
    """

    def __init__(
        self,
        listener: socket.socket,
        owner: int,
        environment: Mapping[str, str] | None,
        imported: _Imported,
        with_ray: Sequence[str] = (),
    ) -> None:
        self._listener, self._owner = listener, owner
        self._environment, self._imported, self._with_ray = environment, imported, with_ray
        self._launchers: dict[int, _Launcher] = {}
        self._selector = selectors.DefaultSelector()
        self._wake: tuple[socket.socket, socket.socket] | tuple[()] = ()
        self._ends_s: float | None = None

    def serve(self) -> Job | None:
        """Serve until the owner ends.

        Returns:
            None at the end; in a forked child, the job of that child.
        """
        woken, wakes = self._wake = socket.socketpair()
        woken.setblocking(False)
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)  # it only wakes the loop
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # sent to the group; the launchers pass them on
        for file in (self._listener, self._owner, woken):
            self._selector.register(file, selectors.EVENT_READ)
        while self._ends_s is None or (self._children() and time.monotonic() < self._ends_s):
            left_s = None if self._ends_s is None else self._ends_s - time.monotonic()
            for key, _ in self._selector.select(left_s):
                job = None
                if key.fileobj is woken:
                    if signal.SIGTERM in woken.recv(4096):
                        self._ends_s = time.monotonic() + GRACE_S
                    self._reap()
                elif key.fileobj == self._owner:
                    self._selector.unregister(self._owner)
                    self._ends_s = time.monotonic() + GRACE_S
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._launchers:
                    job = self._heard(key.fd)
                if job is not None:
                    return job
        return None

    def _children(self) -> list[int]:
        return [one.child for one in self._launchers.values() if one.child is not None]

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # no file descriptor is free
            logger.warning("a process is not forked: %s", error)
            time.sleep(RETRY_S)
            return
        launcher = _Launcher(connection)
        try:
            launcher.receive()
            parse_command(launcher.request["arguments"])
            self._prepare(launcher.request["environment"])
            connection.sendall(b"y")
        except (OSError, ValueError) as error:
            logger.warning("a process is not forked: %s", error)
            launcher.close()
            return
        self._launchers[connection.fileno()] = launcher
        self._selector.register(connection, selectors.EVENT_READ)

    def _prepare(self, environment: Mapping[str, str]) -> None:
        """Import what a child with this environment needs.

        Raises:
            ValueError: no child can be forked, or a module that is imported already has read
                another value of a variable.
        """
        if self._with_ray and self._environment is not None and "RAY_JOB_ID" in environment:
            of_ray = {key: value for key, value in environment.items() if key.startswith("RAY_")}
            self._environment = {**self._environment, **of_ray}
            modules, self._with_ray = self._with_ray, ()
            os.environ.update(of_ray)
            self._imported.add(modules)
        if self._imported.fault is not None:
            raise ValueError(self._imported.fault)
        if self._environment is None:
            return
        ours = self._environment
        for name in sorted({*ours, *environment}):
            if ours.get(name) != environment.get(name) and self._imported.has_read(name):
                raise ValueError(f"the environment differs in {name}")

    def _heard(self, fd: int) -> Job | None:
        """Fork for a launcher that asks for it, or clean up after one that has ended."""
        launcher = self._launchers[fd]
        try:
            word = launcher.connection.recv(1)
        except OSError:
            word = b""
        if word == b"g" and launcher.child is None:
            return self._fork(launcher)
        self._forget(fd)
        if launcher.child is not None:
            os.kill(launcher.child, signal.SIGKILL)  # not reaped before, so it is still this child
        return None

    def _fork(self, launcher: _Launcher) -> Job | None:
        parent = os.getpid()
        try:
            child = os.fork()
        except OSError as error:  # too many processes, or no memory
            logger.warning("a process is not forked: %s", error)
            _send(launcher.connection, 0)
            self._forget(launcher.connection.fileno())
            return None
        if child:
            launcher.child = child
            launcher.close_fds()
            _send(launcher.connection, child)
            return None
        end_with_parent(parent)
        # This process's own files are closed first: the launcher's get their numbers.
        signal.set_wakeup_fd(-1)
        for end in self._wake:
            end.close()
        self._selector.close()
        self._listener.close()
        os.close(self._owner)
        launcher.connection.close()
        for one in self._launchers.values():
            if one is not launcher:
                one.close()
        if _is_ray_worker(launcher.request["arguments"]):
            inner = self._own_server(launcher)
            if inner is not None:
                return inner
        return self._become(launcher.request, launcher.fds)

    def _become(self, request: dict[str, Any], fds: list[int]) -> Job:
        """Give this child the launcher's files, settings and environment. Return its job."""
        for number in ("SIGCHLD", *FORWARDED):
            signal.signal(getattr(signal, number), signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        take_fds(fds, request["fds"])
        os.chdir(request["folder"])
        os.umask(request["umask"])
        os.environ.clear()
        os.environ.update({**self._imported.variables, **request["environment"]})
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
        os.sched_setaffinity(0, request["cores"])
        job = job_of(request["arguments"])
        renew_libraries()
        if os.access(EXECUTABLE, os.X_OK):
            os.environ["HEADRACE_PYTHON"] = sys.executable
            multiprocessing.set_executable(str(EXECUTABLE))
        return job

    def _own_server(self, launcher: _Launcher) -> Job | None:
        """Fork a server for what this child starts later, before the child changes.

        Returns:
            In a child of that server, the job of that child; None in this process.
        """
        address, environment = f"headrace-{secrets.token_hex(16)}", launcher.request["environment"]
        listener = listen(address)
        owner, me = os.pidfd_open(os.getpid()), os.getpid()
        environment[ADDRESS_VARIABLE] = address
        if os.fork():
            listener.close()
            os.close(owner)
            return None
        end_with_parent(me)
        launcher.close_fds()
        # Its first call finds the place of the title beside the environment, which must be the
        # first one. Ray has a copy of the library, and only the one that looks first can set it.
        setproctitle.getproctitle()
        job = ForkServer(listener, owner, None, self._imported).serve()
        return job or (lambda: os._exit(0))

    def _reap(self) -> None:
        by_child = {one.child: fd for fd, one in self._launchers.items()}
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if child == 0:
                return
            if child in by_child:
                fd = by_child[child]
                _send(self._launchers[fd].connection, os.waitstatus_to_exitcode(status))
                self._forget(fd)

    def _forget(self, fd: int) -> None:
        launcher = self._launchers.pop(fd)
        self._selector.unregister(launcher.connection)
        launcher.close()


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # its launcher has ended; that is seen by reading
        connection.sendall(b"%d\n" % number)


def _is_ray_worker(arguments: list[str]) -> bool:
    return bool(arguments) and arguments[0].endswith("/ray/_private/workers/default_worker.py")


def main(listener: int, owner: int, first: Sequence[str], with_ray: Sequence[str]) -> Job:
    """Import, then serve."""
    environment, imported = dict(os.environ), _Imported()
    imported.add(first)
    server = ForkServer(
        socket.socket(fileno=listener), os.pidfd_open(owner), environment, imported, with_ray
    )
    return server.serve() or (lambda: None)


if __name__ == "__main__":
    logging.basicConfig()
    lists = [tuple(filter(None, names.split(","))) for names in sys.argv[3:5]]
    modules = (*lists, *(FIRST, WITH_RAY)[len(lists) :])
    job = main(int(sys.argv[1]), int(sys.argv[2]), *modules)
    job()

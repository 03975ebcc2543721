"""The supervisor: the parent process of all processes of a private Ray node.

It is a session leader and a child subreaper, so every process that Ray or vLLM starts stays below
it, even if a process in between dies. It records which files in /dev/shm its processes use, because
those processes may be dead when the files must be removed. It ends the whole node on SIGTERM, when
Ray ends, or when a foreground `headrace up` is killed.

Run as `python -m headrace.cli.supervisor SPEC.json`. `headrace.cli.cluster` writes the spec and
reads the record.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from headrace.cli import state
from headrace.cli.process_matcher import ProcessMatcher, terminate
from headrace.forkserver import SERVER
from headrace.observability.shared_memory import (
    POLL_INTERVAL_S,
    ProcessId,
    ShmFile,
    ShmWatch,
    remove_shm,
)

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
RAY_STOP_S = 5.0  # for Ray to end its own processes; on an idle machine it takes 2.5 s
RECORD_FILE = "shm.json"


class Supervisor:
    """Runner of one command, which it ends with all its descendants."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name: str = spec["name"]
        self.temp_dir = Path(spec["temp_dir"])
        self.command: list[str] = spec["command"]
        self.listener: int | None = spec["listener"]
        parent = spec.get("parent")
        self.parent = ProcessId(**parent) if parent else None
        self.matcher = ProcessMatcher(
            spec["token"], self.temp_dir, shm_before=frozenset(spec["shm_before"])
        )
        self.shm: set[ShmFile] = set()
        self._fork_server_pid: int | None = None
        self._watch = ShmWatch(self.matcher.shm_before)
        self._stop = threading.Event()

    def run(self) -> int:
        """Run until told to stop, or until the command ends. Return its exit status."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

        def die_with_supervisor() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

        with open(self.temp_dir / "ray.log", "ab") as log:
            child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_supervisor,  # no threads run here, so this is safe
            )
        self._start_fork_server(die_with_supervisor)
        status: int | None = None
        orphaned = False
        while status is None and not self._stop.is_set():
            status = self._reap(child.pid)
            self._watch.poll(lambda: psutil.Process().children(recursive=True))
            self._write_record(set(self._watch.used))
            if orphaned := self.parent is not None and self.parent.process() is None:
                break
            self._stop.wait(POLL_INTERVAL_S if status is None else 0)
        self._end(child.pid)
        if orphaned:  # no other process is left to clean up
            shutil.rmtree(self.temp_dir, ignore_errors=True)
            state.remove(self.name, self.matcher.token)
        return 0 if self._stop.is_set() else (status or 0)

    def _start_fork_server(self, die_with_supervisor: Callable[[], None]) -> None:
        """Start the node's fork server on the listener that this process was given."""
        if self.listener is None:
            return
        with open(self.temp_dir / "forkserver.log", "ab") as log:
            server = subprocess.Popen(
                [*SERVER, str(self.listener), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self.listener],
                preexec_fn=die_with_supervisor,
            )
        os.close(self.listener)
        self._fork_server_pid = server.pid

    def _on_signal(self, number: int, frame: Any) -> None:
        self._stop.set()

    def _reap(self, pid: int) -> int | None:
        """Collect all ended children. Return the exit status of `pid` if it is among them."""
        status = None
        with contextlib.suppress(ChildProcessError):
            while True:
                ended, raw = os.waitpid(-1, os.WNOHANG)
                if ended == 0:
                    break
                if ended == pid:
                    status = os.waitstatus_to_exitcode(raw)
        return status

    def _write_record(self, files: set[ShmFile]) -> None:
        if files != self.shm:
            self.shm = files
            part = self.temp_dir / f"{RECORD_FILE}.part"
            part.write_text(json.dumps(sorted(files)))
            part.replace(self.temp_dir / RECORD_FILE)

    def _end(self, pid: int) -> None:
        me = psutil.Process()
        self.matcher.pids = [ProcessId.of(c) for c in _children(me)]
        self.shm |= self.matcher.shm_files(_children(me))
        # Ray's own stop first: it ends its processes in the right order.
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            for child in me.children():
                if child.pid in (pid, self._fork_server_pid):
                    child.terminate()
        deadline = time.monotonic() + RAY_STOP_S
        while _children(me) and time.monotonic() < deadline:
            self._reap(pid)
            # An engine that is starting makes files until Ray kills it.
            self._watch.poll(lambda: _children(me))
            time.sleep(0.1)
        self.shm |= self._watch.used | terminate(self.matcher, grace_s=1.0)
        self._reap(pid)
        remove_shm(self.shm, self.matcher.shm_before)


def _children(process: psutil.Process) -> list[psutil.Process]:
    out = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                out.append(child)
    return out


if __name__ == "__main__":
    sys.exit(Supervisor(json.loads(Path(sys.argv[1]).read_text("utf-8"))).run())

"""Programs with vLLM that begin in a second: forked from a process that has imported it. So are
store nodes: NIXL imports torch.

`Forked` is as much of `subprocess.Popen` as the tests use. The process that
has imported vLLM is multiprocessing's fork server. It begins with the first program, and ends with
this process. What the environment says before vLLM is imported is the first program's.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.program import engine_environment

ROOT = Path(__file__).parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = [
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "headrace_engine.store_connector",
    "headrace_kvstore.node.node",
    "nixl._api",
    "tests.support.stored",
]


class Forked:
    """A running program, `python -m MODULE ARGUMENTS` in all that it can see.

    Args:
        command: the interpreter, "-m", the module, its arguments.
        environment: all of it.
        log: file that its stderr goes to.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        _, _, module, *arguments = command
        their_in, our_in = CONTEXT.Pipe(duplex=False)
        our_out, their_out = CONTEXT.Pipe(duplex=False)
        _have_server(environment)
        about = (module, arguments, dict(environment), str(log), their_in, their_out)
        self._process = CONTEXT.Process(target=_run, args=about, daemon=False)
        self._process.start()
        self.stdin = os.fdopen(os.dup(our_in.fileno()), "wb")
        self.stdout = os.fdopen(os.dup(our_out.fileno()), "rb")
        for end in (their_in, our_in, our_out, their_out):
            end.close()

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """A signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self._process.exitcode


def told(program: str, model: str, task: Any = None, *, timeout_s: float, **more: str) -> Any:
    """What `python -m tests.support.PROGRAM MODEL` says, given `task` as JSON.

    Args:
        more: of its environment.

    Raises:
        RuntimeError: it failed; with the end of its log.
        subprocess.TimeoutExpired: it took longer.
    """
    command = [sys.executable, "-m", f"tests.support.{program}", model]
    with tempfile.TemporaryDirectory() as folder:
        log, said = Path(folder) / "log", Path(folder) / "said"
        process = Forked(command, engine_environment(**more), log)
        try:
            with process.stdin as given:
                given.write(json.dumps(task).encode())
            reader = threading.Thread(target=lambda: said.write_bytes(process.stdout.read()))
            reader.start()  # it may say more than a pipe holds
            status = process.wait(timeout_s)
            reader.join()
        finally:
            process.kill()
        lines = [line for line in said.read_text().splitlines() if line.startswith('{"said"')]
        if status != 0 or not lines:
            raise RuntimeError(f"the engine failed: {log.read_text(errors='replace')[-4000:]}")
        return json.loads(lines[-1])["said"]


def _have_server(environment: Mapping[str, str]) -> None:
    """Have the fork server run, with this environment if it begins now."""
    CONTEXT.set_forkserver_preload(IMPORTED)
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        forkserver.ensure_running()
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _run(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    log: str,
    stdin: Connection,
    stdout: Connection,
) -> None:
    """Be the program."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    with open(log, "ab") as stderr:
        for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(source.fileno(), target)
    stdin.close()
    stdout.close()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv[1:] = arguments
    sys.path[:0] = [str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()

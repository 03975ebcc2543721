"""Programs that a part starts beside itself and drives by JSON lines on stdin and stdout.

A command `{"do": NAME, ...}` calls the method NAME of the program's object with the rest; its
answer is `{"answer": ...}` or `{"error": ...}`. Other lines on stdout are no answers.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
STOP_S = 15.0


class Child:
    """A running program, `python -m PACKAGE.MODULE`.

    Args:
        module: its name.
        options: `--name value` each.
        environment: all of it.
        log: file that its stderr goes to.
        package: where the module is.
        begin: begins a process of a command, an environment and a log.
    """

    def __init__(
        self,
        module: str,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        package: str = "benchmarks.kvstore.",
        begin: Callable[[list[str], Mapping[str, str], Path], Any] | None = None,
    ) -> None:
        command = [sys.executable, "-m", package + module]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self._log = log
        self._process = (begin or _begin)(command, environment, log)

    def do(self, action: str, **parameters: Any) -> Any:
        """Have it do something and wait for the answer.

        Raises:
            RuntimeError: it failed, or ended.
        """
        self.ask(action, **parameters)
        return self.answer()

    def ask(self, action: str, **parameters: Any) -> None:
        """Have it do something; `answer` gives the answer, one for each."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": action, **parameters}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Its next answer; the first tells that its object was made."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                reply = json.loads(line)
                if isinstance(reply, dict) and "error" in reply:
                    raise RuntimeError(reply["error"])
                if isinstance(reply, dict) and "answer" in reply:
                    return reply["answer"]
        raise RuntimeError(f"it ended: {self._log.read_text(errors='replace')[-1500:]}")

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def kill(self) -> None:
        """End it and its own children with SIGKILL, if it has not ended. A rank of an engine that
        waits for another one in a collective does not see that its parent has gone."""
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def end(self) -> None:
        """Close it; kill it if it does not go."""
        with contextlib.suppress(OSError, RuntimeError):
            self.do("close")
        stop(self._process)


def _begin(
    command: list[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("ab") as stderr:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that this one started."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(make: Callable[[], Any]) -> None:
    """Be such a program: make the object, then do what stdin says until it says close."""
    served = None
    line = '{"do": "start"}'
    while line:
        command = json.loads(line)
        action = command.pop("do")
        try:
            if action == "start":
                served, answer = make(), None
            else:
                answer = getattr(served, action)(**command)
            reply = {"answer": answer}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)
        line = "" if action == "close" else sys.stdin.readline()

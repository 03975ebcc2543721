"""Starting the programs that take part, knowing when they listen, and what CPU time they take."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

START_S = 120.0
ROOT = Path(__file__).resolve().parents[2]


class NotStartedError(RuntimeError):
    """A program ended, or did not listen in time. The text has its last words."""


class Program:
    """A running program and its children.

    Attributes:
        told: the line of JSON that it printed, where it prints one.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        talks: bool = False,
    ) -> None:
        """
        Args:
            log: gets what it writes.
            talks: whether it prints a line of JSON when it is ready.

        Raises:
            NotStartedError: it ended before.
        """
        self._log, self.command = log, list(command)
        self.told: dict[str, Any] = {}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if talks else out,
                stderr=out,
                env={**os.environ, **(env or {})},
                cwd=ROOT,
                start_new_session=True,
            )
        if talks:
            words: queue.Queue[dict[str, Any]] = queue.Queue()
            threading.Thread(target=self._listen, args=(words,), daemon=True).start()
            until_s = time.monotonic() + START_S
            while not self.told:
                with contextlib.suppress(queue.Empty):
                    self.told = words.get(timeout=0.2)
                gone = self._process.poll() is not None or time.monotonic() > until_s
                if gone and not self.told:
                    self.stop()
                    raise NotStartedError(self.last_words())

    def _listen(self, words: queue.Queue[dict[str, Any]]) -> None:
        """Its first line of JSON is for us, all others for the log."""
        assert self._process.stdout is not None
        with self._log.open("ab") as log:
            for line in self._process.stdout:
                if not self.told and line.startswith(b"{") and words.empty():
                    words.put(json.loads(line))
                else:
                    log.write(line)
                    log.flush()

    def wait_until_up(self, url: str) -> None:
        """Wait for an answer of 200.

        Raises:
            NotStartedError: none came in time.
        """
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(url, timeout=5.0) as answer:
                    if answer.status == 200:
                        return
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(0.2)
        raise NotStartedError(f"{url} does not answer; {self.last_words()}")

    def last_words(self) -> str:
        """Return the end of its log."""
        text = self._log.read_text("utf-8", errors="replace")
        return f"{' '.join(self.command[:4])} said: {text[-1500:]}"

    def cpu_s(self) -> float:
        """CPU seconds of the program and its children so far."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            one = psutil.Process(self._process.pid)
            for each in (one, *one.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = each.cpu_times()
                    total += times.user + times.system
        return total

    def stop(self) -> None:
        """End it and its children."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)


@contextlib.contextmanager
def running(program: Program) -> Iterator[Program]:
    """The program, until the block ends."""
    try:
        yield program
    finally:
        program.stop()


def free_port() -> int:
    """Return a port that no process uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def get_json(url: str) -> Any:
    """Return a document."""
    with urllib.request.urlopen(url, timeout=30.0) as answer:
        return json.loads(answer.read())

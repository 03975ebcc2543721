"""A StoreNode in a process of its own, for engines that find it by the arena's name."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import call
from tests.support import run
from tests.support.forked import Forked
from tests.support.kvnode import until_arena

ROOT = Path(__file__).parents[2]


class StoreNodeProcess:
    """`python -m headrace_kvstore node`; `start` it as often as it was killed.

    Args:
        settings: of the node, `name` among them.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self._process: Forked | None = None
        self._log = run.folder() / f"{settings['name']}.log"
        self._log.touch()

    def start(self) -> StoreNodeProcess:
        """Begin, and wait until it listens and has its arena."""
        given = [f"--set={name}={value}" for name, value in self.settings.items()]
        command = [sys.executable, "-m", "headrace_kvstore", "node", *given]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "kvstore")}
        self._process = Forked(command, environment, self._log)
        for line in self._process.stdout:
            if line == b"ready\n":
                until_arena(self.stats)
                return self
        raise RuntimeError(f"the node ended with status {self._process.wait()}: {self._said()}")

    def kill(self) -> None:
        """With -9, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None
            print(self._said())  # for a test that failed

    def _said(self) -> str:
        return f"{self._log.name}:\n{self._log.read_text(errors='replace')}"

    def stop(self) -> None:
        """Have it stand still, until it is killed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def stats(self) -> dict[str, Any]:
        """As `StoreNode.stats`."""
        reply = call(self.settings["name"], wire.GetStats(), 20.0)
        assert isinstance(reply, wire.Stats), reply
        return dict(reply.values)

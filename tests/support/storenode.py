"""A StoreNode in a process of its own, for engines that find it by the arena's name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import call
from tests.support.kvnode import until_arena

ROOT = Path(__file__).parents[2]


class StoreNodeProcess:
    """`python -m headrace_kvstore node`; `start` it as often as it was killed.

    Args:
        settings: of the node, `name` among them.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> StoreNodeProcess:
        """Begin, and wait until it listens and has its arena."""
        given = [f"--set={name}={value}" for name, value in self.settings.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace_kvstore", "node", *given],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "kvstore")},
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "ready\n":
                until_arena(self.stats)
                return self
        raise RuntimeError(f"the node ended with status {self._process.wait()}")

    def kill(self) -> None:
        """With -9, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def stop(self) -> None:
        """Have it stand still, until it is killed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def stats(self) -> dict[str, Any]:
        """As `StoreNode.stats`."""
        reply = call(self.settings["name"], wire.GetStats(), 20.0)
        assert isinstance(reply, wire.Stats), reply
        return dict(reply.values)

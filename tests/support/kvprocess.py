"""A store node in a process of its own, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import call
from tests.support.forked import Forked
from tests.support.kvnode import settings, until_arena

ROOT = Path(__file__).parents[2]


class Node:
    """`python -m headrace_kvstore node`, with all that it keeps below `folder`.

    Args:
        forked: from a process that has imported what it needs.
    """

    process: subprocess.Popen[bytes] | Forked

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        forked: bool = False,
        **values: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.settings = settings(folder, **values)
        config = folder.parent / f"{folder.name}.yaml"
        config.write_text(yaml.safe_dump(self.settings.model_dump(mode="json")))
        self._log = folder.parent / f"{folder.name}.log"
        command = [sys.executable, "-m", "headrace_kvstore", "node", "--config", str(config)]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "kvstore"), **(environment or {})}
        if forked:
            self.process = Forked(command, env, self._log)
            return
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env)

    def ready(self) -> Node:
        """Wait until it listens, and has its arena if it can."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == b"ready\n":  # NIXL has its say before
                until_arena(self.stats)
                return self
        raise AssertionError(self.said())

    def said(self) -> str:
        """Its log, and that of nodes before it in this folder."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """Kill it if it runs, and have pytest show its log should the test have failed."""
        self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        print(f"{self.folder.name}:\n{self.said()}")

    def kill(self) -> None:
        """With -9."""
        self.process.kill()
        self.process.wait(10)

    def end(self) -> int | None:
        """With SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)

    def call(self, request: wire.Request) -> Any:
        return call(self.settings.name, request, 20.0, self.folder)

    def stats(self) -> dict[str, Any]:
        return dict(self.call(wire.GetStats()).values)

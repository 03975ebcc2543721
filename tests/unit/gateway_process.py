"""A gateway in a process of its own, which tests kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.unit.gateway_fakes import FakeReplica


class GatewayProcess:
    """A gateway in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url

    @classmethod
    async def start(cls, code: str, replica: FakeReplica, folder: Path) -> GatewayProcess:
        """Start a gateway.

        Args:
            code: a program that gets the replica's port and the folder, and prints its own port.
        """
        path = os.pathsep.join(filter(None, sys.path))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, str(replica.port), str(folder)),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        return cls(process, f"http://127.0.0.1:{port}/v1")

    async def kill(self) -> None:
        """Kill it by SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

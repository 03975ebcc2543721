"""The process that holds all emulated engines: ``python -m benchmarks.routers.engines JSON``.

It prints one line of JSON when it listens: where the engines are, and a port of its own with

    GET /emulated/stats      counts of each engine, and this process's CPU seconds
    GET /emulated/replicas   what our decode replicas answer to `headrace_replica`

and lives until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
import uvloop

from benchmarks.routers.engine import Machine
from benchmarks.routers.http import Exchange, serve
from benchmarks.routers.replica import Replica
from benchmarks.routers.told import REPORT_S, OurLine, VllmEvents
from headrace_lab.simulate.hardware import default_steps


@dataclass(frozen=True, slots=True)
class Settings:
    """How the engines are set up.

    Attributes:
        folder: of the model.
        engines: how many. slow, step_tokens, blocks, block_tokens: of each; see `Machine`.
        line: whether they tell our gateway of themselves. events: whether they publish vLLM's.
        gap_s: see `Replica`.
    """

    folder: str
    engines: int = 8
    slow: float = 1.0
    step_tokens: int = 1024
    blocks: int = 6437
    block_tokens: int = 64
    line: bool = False
    events: bool = False
    gap_s: float | None = None

    def machine(self) -> Machine:
        """One engine."""
        return Machine(default_steps(), self.slow, self.blocks, self.block_tokens, self.step_tokens)

    def to_json(self) -> str:
        """For the process's command line."""
        return json.dumps(asdict(self))


async def run(settings: Settings) -> None:
    """Serve until the standard input ends."""
    replicas: list[Replica] = []
    lines: list[OurLine] = []
    publishers: list[VllmEvents] = []
    urls: list[str] = []
    for number in range(settings.engines):
        ears: OurLine | VllmEvents | None = None
        if settings.line:
            ears = OurLine(f"engine-{number}")
            lines.append(ears)
        elif settings.events:
            ears = VllmEvents(settings.block_tokens)
            publishers.append(ears)
        replica = Replica(settings.machine(), settings.folder, ears, settings.gap_s)
        if ears is not None:
            ears.follow(replica.engine)
        if isinstance(ears, VllmEvents):
            replica.remember = ears.remember
        _, port = await serve(replica.handle)
        replicas.append(replica)
        urls.append(f"http://127.0.0.1:{port}")
    _warm(replicas[0])

    def answer(asked: Exchange) -> None:
        if asked.path == "/emulated/stats":
            engines = [replica.stats() for replica in replicas]
            asked.json({"engines": engines, "cpu_s": time.process_time()})
        elif asked.path == "/emulated/replicas":
            asked.json([_replica(*one) for one in zip(replicas, lines, urls, strict=True)])
        else:
            asked.json({}, 404)

    _, port = await serve(answer)
    loop = asyncio.get_running_loop()

    def tell() -> None:
        for line in lines:
            line.changed()
        loop.call_later(REPORT_S, tell)

    tell()
    told = [one.endpoint for one in publishers]
    print(json.dumps({"urls": urls, "admin": f"http://127.0.0.1:{port}", "events": told}))
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    for line in lines:
        line.line.close()


def _replica(replica: Replica, line: OurLine, url: str) -> dict[str, object]:
    engine = replica.engine
    paths = [("POST", "/v1/completions", True), ("GET", "/v1/models", False)]
    return {
        "replica_id": line.name,
        "url": url,
        "token": "emulated",
        "running": len(engine.running),
        "waiting": len(engine.waiting),
        "kv_usage": 1.0 - engine.cache.available / engine.cache.blocks,
        "in_flight": len(engine.running) + len(engine.waiting),
        "routes": [
            {"method": method, "path": path, "api": "openai", "takes_json": takes}
            for method, path, takes in paths
        ],
        "endpoint": line.line.info(),
    }


def _warm(replica: Replica) -> None:
    """Load compiled code before the first request."""
    replica.request(np.arange(256, dtype=np.uint32), 1, lambda emitted: None)


def main() -> None:
    """See the module."""
    uvloop.run(run(Settings(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()

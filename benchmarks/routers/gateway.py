"""Our gateway before the emulated engines.

    python -m benchmarks.routers.gateway ADMIN SETTINGS

It is the gateway of the app, its `Placer` included. What Ray Serve tells it there comes from the
engines' process here (`ADMIN` is its own port). `SETTINGS` are those of `RouterSettings` that are
not the defaults. It prints its port as one line of JSON, and lives
until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Any

import aiohttp
import uvloop

from benchmarks.emptycluster import EmptyCluster
from benchmarks.routers.replica import MODEL
from headrace.config.gateway import GatewaySettings
from headrace.gateway import ReplicaInfo, build_gateway_app, serve_gateway
from headrace.gateway.placement.endpoint_info import EndpointInfo
from headrace.gateway.placement.placer import Placer
from headrace.router.plan import RouterSettings
from headrace_engine.serving.full_collections import limit_full_collections


class EmulatedCluster(EmptyCluster):
    """The emulated cluster as the gateway's backend (`headrace.gateway.Backend`).

    Args:
        admin: the engines' process.
    """

    def __init__(self, admin: str) -> None:
        self._url = f"{admin}/emulated/replicas"
        self._session: aiohttp.ClientSession | None = None

    async def _told(self) -> list[dict[str, Any]]:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        async with self._session.get(self._url) as response:
            return list(await response.json())

    async def replicas(self) -> list[ReplicaInfo]:
        return [ReplicaInfo.of(answer) for answer in await self._told()]

    async def endpoints(self) -> dict[str, EndpointInfo]:
        told = {one["replica_id"]: EndpointInfo.of(one["endpoint"]) for one in await self._told()}
        return {name: line for name, line in told.items() if line is not None}


async def run(admin: str, settings: RouterSettings) -> None:
    """Serve until the standard input ends."""
    cluster = EmulatedCluster(admin)
    make_placer = partial(Placer, settings, cluster.endpoints)
    options = GatewaySettings(max_concurrent=4096)
    app = build_gateway_app(options, cluster, MODEL, make_placer=make_placer)
    server = await serve_gateway(app, "127.0.0.1", 0)
    print(json.dumps({"url": f"http://127.0.0.1:{server.port}"}))
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(grace_s=1)


def main() -> None:
    """See the module."""
    limit_full_collections()
    settings = RouterSettings(**json.loads(sys.argv[2]))
    uvloop.run(run(sys.argv[1], settings))


if __name__ == "__main__":
    main()

"""One engine behind three servers: vLLM's own application, and a gateway over a replica's port.

Run as a program; it prints the three ports, and ends when its standard input does:
    python -m tests.support.rest_servers MODEL_FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tests.support.program import ROOT, engine_environment, say

NAME = "smollm2"
TOKEN = "of the replica's port"
BLOCK_TOKENS = 128


class Cutting:
    """ASGI: breaks streams off. A request with the header `x-cut-after: 3,5` loses its connection
    after the third event of its first answer, and after the fifth of the answer that goes on."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._cuts: dict[bytes, list[int]] = {}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if b"x-cut-after" not in headers:
            await self._app(scope, receive, send)
            return
        wanted = [int(one) for one in headers[b"x-cut-after"].split(b",")]
        cuts = self._cuts.setdefault(headers[b"x-request-id"], wanted)
        left = cuts.pop(0) if cuts else None

        async def cutting(message: dict[str, Any]) -> None:
            nonlocal left
            if left is not None and message["type"] == "http.response.body":
                if left == 0:
                    raise ConnectionAbortedError("cut by the test")
                left -= 1
            await send(message)

        await self._app(scope, receive, cutting)


@contextlib.contextmanager
def rest_servers(model: str, start_timeout_s: float = 300.0) -> Iterator[tuple[str, str, str]]:
    """The URLs of vLLM's own server, of the gateway and of the replica's port, while the program
    runs.

    Raises:
        RuntimeError: it did not start; with the end of its log.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.rest_servers", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=engine_environment(),
            cwd=ROOT,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            said = next((line for line in process.stdout if line.startswith('{"said"')), None)
            if said is None:
                log.seek(0)
                raise RuntimeError(f"the servers did not start: {log.read()[-4000:]}")
            plain, gateway, replica = json.loads(said)["said"]
            yield (
                f"http://127.0.0.1:{plain}",
                f"http://127.0.0.1:{gateway}",
                f"http://127.0.0.1:{replica}",
            )
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _main(model: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from headrace.gateway import GatewayOptions, ReplicaInfo, build_gateway_app, serve_gateway
    from headrace_decode._vllm_compat import PlannedLLM, keys_route
    from headrace_decode.internal import InternalOnly
    from headrace_decode.replay.recorder import Recorded
    from headrace_decode.routes import keep_public_routes, public_routes

    line = ["--model", model, "--served-model-name", NAME, "--dtype", "float32"]
    line += ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
    line += ["--block-size", str(BLOCK_TOKENS), "--prefix-caching-hash-algo", "sha256_cbor"]
    line += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    llm = PlannedLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))

    async def application() -> Any:
        app = build_app(args, supported_tasks=("generate",))
        await init_app_state(llm, app.state, args, supported_tasks=("generate",))
        return app

    plain, replica = await application(), await application()
    keep_public_routes(replica)
    plain_server = await serve_gateway(plain, "127.0.0.1", 0)
    guarded = InternalOnly(Cutting(Recorded(keys_route(replica, replica, llm))), TOKEN)
    replica_server = await serve_gateway(guarded, "127.0.0.1", 0)

    class OneReplica:
        """The backend, of which only what relaying needs is asked."""

        async def replicas(self) -> list[ReplicaInfo]:
            routes = [asdict(route) for route in public_routes(replica)]
            url = f"http://127.0.0.1:{replica_server.port}"
            told = {"replica_id": "one", "url": url, "routes": routes, "token": TOKEN}
            return [ReplicaInfo.of(told)]

        async def openapi(self) -> dict[str, Any]:
            return dict(await asyncio.to_thread(replica.openapi))

        def __getattr__(self, name: str) -> Any:
            raise NotImplementedError(name)

    options = GatewayOptions(allowed_origins=("*",))
    app = build_gateway_app(options, OneReplica(), NAME)
    gateway = await serve_gateway(app, "127.0.0.1", 0)
    say([plain_server.port, gateway.port, replica_server.port])
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs there, and nobody reads it now
    await asyncio.to_thread(sys.stdin.read)
    for server in (gateway, replica_server, plain_server):
        await server.stop(grace_s=1)
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))

"""One engine behind several servers: vLLM's own application, a gateway over a replica's port, and
gateways over replicas that tell reasoning from answers.

Run as a program; it prints the servers' ports, and ends when its standard input does:
    python -m tests.support.rest_servers MODEL_FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.forked import Forked
from tests.support.program import engine_environment, fork_what_would_be_spawned, say

NAME = "smollm2"
REASONING_MARKS = "The", "ena"
"""The parser `marked` takes for reasoning what stands between these tokens. The model's story
begins with "The story of a young woman named Elena who was"."""
REASONING = {"by tokens": "marked", "by phrases": "granite"}
"""Kinds of reasoning parsers, and the one of the kind that a server has."""
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
def rest_servers(model: str, start_timeout_s: float = 300.0) -> Iterator[list[str]]:
    """The URLs of vLLM's own server, of the gateway, of the replica's port, and of the gateways of
    `REASONING`, while the program runs.

    Raises:
        RuntimeError: it did not start; with the end of its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.support.rest_servers", model]
        process = Forked(command, engine_environment(), log := Path(folder) / "log")
        try:
            said = next((line for line in process.stdout if line.startswith(b'{"said"')), None)
            if said is None:
                text = log.read_text(errors="replace")[-4000:]
                raise RuntimeError(f"the servers did not start: {text}")
            yield [f"http://127.0.0.1:{port}" for port in json.loads(said)["said"]]
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
    from vllm.reasoning import ReasoningParserManager
    from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from headrace.config.gateway import GatewaySettings
    from headrace.gateway import ReplicaInfo, build_gateway_app, serve_gateway
    from headrace_decode.apis.api_layer import add_api_layer
    from headrace_decode.http.internal_port import InternalPort
    from headrace_decode.http.public_routes import keep_public_routes, public_routes
    from headrace_decode.llm.planned_llm import PlannedLLM
    from headrace_decode.rendering.prompt_renderer import keys_route
    from headrace_decode.resume.recorder import RecordingMiddleware

    line = ["--model", model, "--served-model-name", NAME, "--dtype", "float32"]
    line += ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
    line += ["--block-size", str(BLOCK_TOKENS), "--prefix-caching-hash-algo", "sha256_cbor"]
    line += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    line += ["--enable-prompt-tokens-details", "--enable-scale-out"]
    line += ["--allowed-origins", json.dumps(["*"])]
    fork_what_would_be_spawned()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    llm = PlannedLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    llm.grammars.start()

    class Marked(BaseThinkingReasoningParser):
        start_token, end_token = REASONING_MARKS

    ReasoningParserManager.register_module("marked", module=Marked)
    servers = []

    async def serve(app: Any) -> int:
        servers.append(await serve_gateway(app, "127.0.0.1", 0))
        return servers[-1].port

    async def application(reasoning: str = "") -> Any:
        own = copy.deepcopy(args)
        own.structured_outputs_config.reasoning_parser = reasoning
        app = build_app(own, supported_tasks=("generate",))
        await init_app_state(llm, app.state, own, supported_tasks=("generate",))
        return app

    class OneReplica:
        """The backend, of which only what relaying needs is asked."""

        def __init__(self, app: Any, port: int) -> None:
            self._app, self._port = app, port

        async def replicas(self) -> list[ReplicaInfo]:
            routes = [asdict(route) for route in public_routes(self._app)]
            url = f"http://127.0.0.1:{self._port}"
            told = {"replica_id": "one", "url": url, "routes": routes, "token": TOKEN}
            return [ReplicaInfo.of(told)]

        async def openapi(self) -> dict[str, Any]:
            return dict(await asyncio.to_thread(self._app.openapi))

        def __getattr__(self, name: str) -> Any:
            raise NotImplementedError(name)

    async def behind_gateway(reasoning: str = "") -> tuple[int, int]:
        """The ports of the gateway and of the replica."""
        app = await application(reasoning)
        keep_public_routes(app)
        add_api_layer(app)
        port = await serve(
            InternalPort(Cutting(RecordingMiddleware(keys_route(app, app, llm.vllm_config))), TOKEN)
        )
        options = GatewaySettings(allowed_origins=("*",))
        return await serve(build_gateway_app(options, OneReplica(app, port), NAME)), port

    plain, (gateway, replica) = await serve(await application()), await behind_gateway()
    say([plain, gateway, replica, *[(await behind_gateway(r))[0] for r in REASONING.values()]])
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs there, and nobody reads it now
    await asyncio.to_thread(sys.stdin.read)
    for server in reversed(servers):
        await server.stop(grace_s=1)
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))

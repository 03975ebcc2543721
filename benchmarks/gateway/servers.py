"""The server processes of this benchmark: a fake replica, gateways before it, and a bare relay."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing as mp
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.emptycluster import EmptyCluster
from headrace.config.gateway import GatewaySettings
from headrace.config.key_file import KeyEntry, KeyFile, hash_of, new_key, write_keys
from headrace.config.tls_files import TlsFiles
from headrace.gateway import (
    ReplicaInfo,
    Server,
    build_gateway_app,
    serve_gateway,
)
from headrace.observability.gateway_metrics import GatewayMetrics
from headrace_decode.http.public_routes import Route
from headrace_decode.resume.emitted import HEADER, EmittedChoice, encode_line
from tests.support.certificates import Authority

TOKEN_GAP_S = 0.02
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1750000000'
    b',"model":"smollm2-135m-instruct","choices":[{"index":0,"delta":{"content":" token"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"


async def fake_replica(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI app: `max_tokens` events, one each `TOKEN_GAP_S`, the first at once; for a gateway
    with the lines that a replica puts between them."""
    if scope["type"] != "http":
        return
    message = await receive()
    body = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    tells = any(name == HEADER for name, _ in scope["headers"])
    if tells:
        headers.append((HEADER, b"1"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for token in range(json.loads(body)["max_tokens"]):
        if token:
            await asyncio.sleep(TOKEN_GAP_S)
        said = encode_line((EmittedChoice(0, (token,)),)) if tells else b""
        await send({"type": "http.response.body", "body": said + EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": DONE})


class OneReplica(EmptyCluster):
    """A backend with a single replica."""

    def __init__(self, url: str) -> None:
        self._replica = ReplicaInfo("fake", url, routes=(Route("POST", "/v1/chat/completions"),))

    async def replicas(self) -> list[ReplicaInfo]:
        return [self._replica]

    async def metrics(self) -> bytes:
        return json.dumps(OwnTimes.seconds[-2000:]).encode()


class OwnTimes(GatewayMetrics):
    """Keeps what the gateway reports of itself."""

    seconds: list[float] = []

    def own_seconds(self, seconds: float) -> None:
        self.seconds.append(seconds)


@dataclass(frozen=True)
class Door:
    """A gateway's settings for API keys and TLS.

    Attributes:
        keys_file: file of its API keys.
        tls: its certificate and key.
        key: one of the API keys.
        authority: certificate of the authority that signed the gateway's certificate.
    """

    keys_file: str | None = None
    tls: TlsFiles | None = None
    key: str = ""
    authority: str = ""


OPEN = Door()


def closed(folder: Path) -> Door:
    """Return the keys and TLS, with files made in `folder`; a hundred keys of as many tenants."""
    authority, keys = Authority(folder), [new_key() for _ in range(100)]
    entries = [
        KeyEntry(name=f"key-{number}", hash=hash_of(key.encode()), tenant=f"tenant-{number}")
        for number, key in enumerate(keys)
    ]
    file = folder / "keys.yaml"
    write_keys(file, KeyFile(keys=entries))
    files = TlsFiles(*authority.issue("server"))
    return Door(str(file), files, keys[50], str(authority.file))


class BareRelay(asyncio.Protocol):
    """Copies bytes between a client and `target`, and reads none: what any relay costs."""

    def __init__(self, port: int, other: asyncio.Transport | None = None) -> None:
        self._port, self._other = port, other
        self._early = b""

    def connection_made(self, transport: Any) -> None:
        if self._other is None:
            self._connecting = asyncio.create_task(self._connect(transport))

    async def _connect(self, client: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        made = await loop.create_connection(
            lambda: BareRelay(self._port, client), "127.0.0.1", self._port
        )
        self._other = made[0]
        self._other.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early += data
        else:
            self._other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._other is not None:
            self._other.close()


def serve(target: str, door: Door | None, pipe: Connection) -> None:
    """A process: a gateway before `target`, or the replica where there is none, or the bare relay
    where there is no door. It tells its port and lives until the pipe closes."""

    async def run() -> None:
        if door is None:
            loop, port = asyncio.get_running_loop(), int(target.rpartition(":")[2])
            bare = await loop.create_server(lambda: BareRelay(port), "127.0.0.1", 0)
            pipe.send(bare.sockets[0].getsockname()[1])
            with contextlib.suppress(EOFError):
                await loop.run_in_executor(None, pipe.recv)
            return
        app: Any = fake_replica
        if target:
            options = GatewaySettings(api_keys_file=door.keys_file)
            app = build_gateway_app(options, OneReplica(target), "model", metrics=OwnTimes())
        server: Server = await serve_gateway(app, "127.0.0.1", 0, tls=door.tls)
        pipe.send(server.port)
        with contextlib.suppress(EOFError):
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await server.stop(grace_s=1)

    uvloop.run(run())


@dataclass(frozen=True)
class Running:
    """A server process: where it is, itself for its CPU times, what it asks of its clients."""

    url: str
    process: psutil.Process
    door: Door = OPEN


@contextlib.contextmanager
def process(target: str = "", door: Door | None = OPEN) -> Iterator[Running]:
    """A running server process; see `serve`."""
    ours, theirs = mp.Pipe()
    child = mp.get_context("spawn").Process(target=serve, args=(target, door, theirs))
    child.start()
    theirs.close()
    try:
        scheme = "https" if door is not None and door.tls else "http"
        url = f"{scheme}://127.0.0.1:{ours.recv()}"
        yield Running(url, psutil.Process(child.pid), door or OPEN)
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        child.join(10)
        child.kill()

"""An emulated engine's reports of its blocks: our own, or vLLM's KV events over ZMQ."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from benchmarks.routers.cache import Key
from benchmarks.routers.engine import Engine
from headrace_engine.reporting.prompt_backlog import ReceivedPlans
from headrace_engine.reporting.replica_publisher import ReplicaPublisher
from headrace_engine.reporting.report import Report
from headrace_kvstore.protocol.events import BlockRemoved, BlockStored, Change, EventBatch

TOKEN_BYTES = 131_072.0
"""KV of a token of the 8B model whose step times the engines have."""
REPORT_S = 0.15
"""Between two reports of an engine that does nothing."""


class _PlanId(msgspec.Struct):
    request_id: str


_decode_plan = msgspec.json.Decoder(_PlanId).decode


class OurLine:
    """Reports of one of our decode replicas to gateways: numbered reports, and blocks.

    Args:
        name: the replica's id.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._engine: Engine | None = None
        self._heard = ReceivedPlans()
        self._steps: dict[str, Any] = {}
        self.line = ReplicaPublisher(secrets.token_urlsafe(32), "127.0.0.1", self._contents)

    def follow(self, engine: Engine) -> None:
        """Tell of this engine from now on."""
        self._engine, self._steps = engine, dict(engine.machine.fit())
        self.changed()

    def heard(self, plan: bytes) -> None:
        """Record the plan of a request that arrived."""
        self._heard.add(_decode_plan(plan).request_id, time.monotonic())

    def changed(self) -> None:
        """Report a change: a step ended, a request arrived, or time has passed."""
        engine = self._engine
        if engine is None:
            return
        cache, machine = engine.cache, engine.machine
        if cache.changes:
            self.line.publish([Change(one.stored, "GPU", b"", one.key) for one in cache.changes])
            cache.changes = []
        (tokens, pairs), coming = engine.queue(), engine.coming
        self.line.report(
            Report(
                replica=self.name,
                role="decode",
                machine=self.name,
                block_tokens=machine.block_tokens,
                token_bytes=TOKEN_BYTES,
                step_tokens=machine.step_tokens,
                running=engine.rows,
                context=engine.context,
                coming=len(coming),
                coming_context=sum(one.prompt for one in coming),
                prompts=len(coming),
                queued_tokens=tokens,
                queued_pairs=float(pairs),
                free_blocks=cache.available,
                steps=self._steps,  # type: ignore[arg-type]
                heard=self._heard.recent(time.monotonic()),
            )
        )

    def _contents(self) -> list[Change]:
        keys = [] if self._engine is None else self._engine.cache.keys()
        return [Change(True, "GPU", b"", key) for key in keys]


class VllmEvents:
    """Events of vLLM's publisher: batches of blocks with their tokens, numbered from 0, over PUB.

    Blocks are named by the low 64 bits of their hashes, as vLLM does by default."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._engine: Engine | None = None
        self._tokens: dict[Key, list[int]] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._seq = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(0)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = str(self._socket.get_string(zmq.LAST_ENDPOINT))

    def follow(self, engine: Engine) -> None:
        """Tell of this engine from now on."""
        self._engine = engine

    def remember(self, tokens: NDArray[np.uint32], keys: Sequence[Key]) -> None:
        """Record the tokens of a new request, and the keys of their blocks."""
        size = self._size
        for number, key in enumerate(keys):
            if key not in self._tokens:
                self._tokens[key] = tokens[number * size : (number + 1) * size].tolist()

    def heard(self, plan: bytes) -> None:
        """Do nothing: routers with vLLM's events send no plans."""

    def changed(self) -> None:
        """Publish changes after a step ended or a request arrived."""
        if self._engine is None:
            return
        cache = self._engine.cache
        if not cache.changes:
            return
        events: list[Any] = [self._event(*one) for one in cache.changes]
        cache.changes = []
        batch = self._encode(EventBatch(time.time(), events, 0))
        self._socket.send_multipart((b"", self._seq.to_bytes(8, "big"), batch))
        self._seq += 1

    def _event(self, stored: bool, key: Key, parent: Key | None) -> BlockStored | BlockRemoved:
        if not stored:
            return BlockRemoved([_number(key)], "GPU")
        before = None if parent is None else _number(parent)
        tokens, size = self._tokens[key], self._size
        return BlockStored([_number(key)], before, tokens, size, None, "GPU", None)


def _number(key: Key) -> int:
    return int.from_bytes(key[-8:], "big")

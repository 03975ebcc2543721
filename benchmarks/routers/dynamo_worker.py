"""An emulated engine as a worker of Dynamo's.

    python -m benchmarks.routers.dynamo_worker SETTINGS NUMBER

As Dynamo's vLLM worker does, it registers a model that takes tokens, streams one token at a time,
and has Dynamo's own publisher follow the engine's KV events over ZMQ.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import uvloop
from dynamo.llm import (  # type: ignore[import-not-found]
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime  # type: ignore[import-not-found]

from benchmarks.routers.engines import Settings
from benchmarks.routers.http import Exchange, serve
from benchmarks.routers.replica import MODEL, Replica
from benchmarks.routers.told import VllmEvents
from benchmarks.routers.words import ANSWER_ID


class Worker:
    """Dynamo's side of one engine."""

    def __init__(self, replica: Replica, gap_s: float | None) -> None:
        self._replica, self._gap_s = replica, gap_s

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[Any]:
        """Answer a request that the frontend has tokenised."""
        self._replica.requests += 1
        answer = max(1, int(request["stop_conditions"].get("max_tokens") or 16))
        if self._gap_s is not None:
            for number in range(1, answer + 1):
                yield self._token(number, answer)
                if number < answer:
                    await asyncio.sleep(self._gap_s)
            return
        made: asyncio.Queue[int] = asyncio.Queue()
        tokens = np.asarray(request["token_ids"], np.uint32)
        one = self._replica.request(tokens, answer, made.put_nowait)
        self._replica.pacer.submit(one)
        try:
            number = 0
            while number < answer:
                number = await made.get()
                yield self._token(number, answer)
        finally:
            self._replica.engine.abort(one)

    def _token(self, number: int, answer: int) -> dict[str, Any]:
        told: dict[str, Any] = {"index": 0, "token_ids": [ANSWER_ID]}
        if number == answer:
            told["finish_reason"] = "length"
        return told


async def run(settings: Settings, number: int) -> None:
    """Serve until the process is ended."""
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("emulated.backend.generate")
    machine = settings.machine()
    events = VllmEvents(settings.block_tokens)
    replica = Replica(machine, settings.folder, events)
    replica.remember = events.remember
    events.follow(replica.engine)
    replica.request(np.arange(256, dtype=np.uint32), 1, lambda emitted: None)
    publisher = KvEventPublisher(
        endpoint=endpoint,
        kv_block_size=settings.block_tokens,
        zmq_endpoint=events.endpoint,
        zmq_topic="",
        enable_local_indexer=True,
    )
    told = ModelRuntimeConfig()
    told.total_kv_blocks = settings.blocks
    told.max_num_seqs = machine.most_requests
    told.max_num_batched_tokens = settings.step_tokens
    told.enable_local_indexer = True
    await register_model(
        ModelInput.Tokens,
        ModelType.Completions,
        endpoint,
        settings.folder,
        MODEL,
        kv_cache_block_size=settings.block_tokens,
        runtime_config=told,
        worker_type=WorkerType.Aggregated,
    )

    def answer(asked: Exchange) -> None:
        asked.json({"engines": [replica.stats()], "cpu_s": time.process_time()})

    _, port = await serve(answer)
    worker = Worker(replica, settings.gap_s)
    print(json.dumps({"admin": f"http://127.0.0.1:{port}", "number": number}))
    sys.stdout.flush()
    await endpoint.serve_endpoint(worker.generate)
    publisher.shutdown()


def main() -> None:
    """See the module."""
    uvloop.run(run(Settings(**json.loads(sys.argv[1])), int(sys.argv[2])))


if __name__ == "__main__":
    main()

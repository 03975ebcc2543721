"""Loads ahead in vLLM's own scheduler, with both halves of the connector; nobody computes.

Where vLLM moves, mend `kvstore/headrace_kvstore/connector/connector.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from headrace_engine.store_connector import HeadraceConnector
from headrace_kvstore.table import READY
from tests.support.tiny import tiny_llama

BLOCKS, BLOCK, LAYERS = 40, 128, 2
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
NAMES = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
STEP = SimpleNamespace(attn_metadata="a step", cudagraph_runtime_mode=CUDAGraphMode.NONE)


class Engine:
    """A scheduler, and a worker whose cache holds random bytes."""

    def __init__(self, folder: Path) -> None:
        init_none_hash(sha256_cbor)
        config = EngineArgs(
            model=str(tiny_llama()),
            dtype="float32",
            enforce_eager=True,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            num_gpu_blocks_override=BLOCKS,
            async_scheduling=False,
            disable_hybrid_kv_cache_manager=True,
            prefix_caching_hash_algo="sha256_cbor",
            kv_transfer_config=KVTransferConfig(
                kv_connector="HeadraceConnector",
                kv_connector_module_path="headrace_engine.store_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "name": "ahead",
                    "folder": str(folder),
                    "dram_bytes": 64 << 20,
                    "node": False,
                },
            ),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        config.cache_config.block_size = BLOCK
        size = BLOCKS * SPEC.page_size_bytes
        cache = KVCacheConfig(
            BLOCKS,
            [KVCacheTensor(size, [name], size, SPEC.page_size_bytes) for name in NAMES],
            [KVCacheGroupSpec(NAMES, SPEC)],
        )
        register_all_kvcache_specs(config)
        manager = StructuredOutputManager(config)
        self.scheduler: Any = Scheduler(config, cache, manager, block_size=BLOCK)
        self.connector: Any = self.scheduler.connector
        self.worker: Any = HeadraceConnector(config, KVConnectorRole.WORKER, cache)
        self.caches = {name: torch.randn(BLOCKS, 2, BLOCK, 128) for name in NAMES}
        self.worker.register_kv_caches(self.caches)
        self.steps: list[dict[str, int]] = []

    def step(self) -> None:
        """Schedule, have the worker do its part, and take in its output."""
        output = self.scheduler.schedule()
        self.steps.append(dict(output.num_scheduled_tokens))
        worker = self.worker
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(STEP)
        for name in NAMES:
            worker.wait_for_layer_load(name)
        _, received = worker.get_finished(set())
        told = KVConnectorOutput(
            finished_recving=received,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        done = [self.scheduler.requests[n].num_computed_tokens for n in names]
        wanted = [self.scheduler.requests[n].num_tokens for n in names]
        sampled = [[30] if a >= b else [] for a, b in zip(done, wanted, strict=True)]
        places = {name: number for number, name in enumerate(names)}
        result = ModelRunnerOutput(names, places, sampled, kv_connector_output=told)
        self.scheduler.update_from_output(output, result)

    def until(self, condition: Any) -> None:
        limit = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < limit, "it does not come about"
            self.step()
            time.sleep(0.001)

    def add(self, name: str, tokens: int, answer: int) -> Request:
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        prompt = [(tokens * 7 + n) % 1000 + 20 for n in range(tokens)]
        hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        made = Request(name, prompt, params, None, block_hasher=hasher)
        self.scheduler.add_request(made)
        return made

    def served(self, name: str, tokens: int) -> list[torch.Tensor]:
        """Serve a request: its KV is then in the store and not in the engine. Returns that KV."""
        self.add(name, tokens, 2)
        self.step()
        [blocks] = self.scheduler.kv_cache_manager.get_block_ids(name)
        held = [each[blocks[: tokens // BLOCK]].clone() for each in self.caches.values()]
        self.until(lambda: not self.scheduler.requests and not self.connector._half.busy)
        assert self.scheduler.reset_prefix_cache()
        for each in self.caches.values():
            each.zero_()
        return held

    def close(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


def busy(engine: Engine) -> None:
    """Another request decodes; every load is made ahead."""
    engine.add("other", 100, 1000)
    engine.step()
    engine.connector._price.ahead = lambda *_: True


def test_others_decode_while_a_request_loads_and_it_then_has_its_kv(engine: Engine) -> None:
    held = engine.served("first", 5 * BLOCK + 10)
    busy(engine)
    again = engine.add("again", 5 * BLOCK + 10, 3)
    engine.steps.clear()
    engine.step()
    assert again.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.steps == [{"other": 1}]
    engine.until(lambda: "again" in engine.steps[-1])
    assert engine.steps[-1] == {"other": 1, "again": 10}, "the rest is computed"
    [blocks] = engine.scheduler.kv_cache_manager.get_block_ids("again")
    for cache, truth in zip(engine.caches.values(), held, strict=True):
        assert torch.equal(cache[blocks[:5]], truth)
    engine.until(lambda: again.is_finished())


def test_what_does_not_come_is_computed(engine: Engine) -> None:
    engine.served("first", 5 * BLOCK + 10)
    arena = engine.connector._arena
    [slot] = [s for s in arena.table["depth"].nonzero()[0] if arena.table["depth"][s] == 3]
    arena.view(int(slot))[1000] ^= 1
    busy(engine)
    again = engine.add("again", 5 * BLOCK + 10, 3)
    engine.until(lambda: "again" in engine.steps[-1])
    assert engine.steps[-1]["again"] == 2 * BLOCK + 10
    engine.until(lambda: again.is_finished())


def test_of_nothing_that_came_all_is_found_under_the_step_or_computed(engine: Engine) -> None:
    engine.served("first", BLOCK + 10)
    arena = engine.connector._arena
    [slot] = (arena.table["state"] == READY).nonzero()[0]
    arena.view(int(slot))[1000] ^= 1
    busy(engine)
    again = engine.add("again", BLOCK + 10, 3)
    engine.until(lambda: again.is_finished())


def test_a_request_that_is_aborted_while_it_loads_gives_its_blocks_back(engine: Engine) -> None:
    engine.served("first", 5 * BLOCK + 10)
    pool = engine.scheduler.kv_cache_manager.block_pool
    busy(engine)
    free = pool.get_num_free_blocks()
    engine.add("again", 5 * BLOCK + 10, 3)
    engine.step()
    assert pool.get_num_free_blocks() < free
    engine.scheduler.finish_requests("again", RequestStatus.FINISHED_ABORTED)
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert pool.get_num_free_blocks() == free

"""vLLM's own scheduler with both halves of the store's connector; nobody computes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from headrace_engine.store_connector import HeadraceConnector
from tests.support.tiny import tiny_llama

BLOCKS, BLOCK, PAGE, LAYERS = 40, 128, 32, 2
SIZES: dict[str, Any] = {
    **{"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64},
    "dtype": torch.float32,
}
SPEC = FullAttentionSpec(**SIZES)


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def sliding(window: int) -> SlidingWindowSpec:
    """A layer that sees the last `window` tokens alone; otherwise as SPEC."""
    return SlidingWindowSpec(**SIZES, sliding_window=window)


def recurrent(floats: int = 64) -> MambaSpec:
    """A layer with a state of so many numbers, in pages that are as long as those of SPEC."""
    return MambaSpec(
        block_size=BLOCK,
        shapes=((floats,),),
        dtypes=(torch.float32,),
        page_size_padded=SPEC.page_size_bytes,
        mamba_cache_mode="align",
    )


NAMES = [layer_name(n) for n in range(LAYERS)]
STEP = SimpleNamespace(attn_metadata="a step", cudagraph_runtime_mode=CUDAGraphMode.NONE)


def state_of(pages: torch.Tensor, spec: MambaSpec) -> torch.Tensor:
    """vLLM's view of a recurrent layer: [blocks, 1, 1, numbers of a state], in a layer's pages."""
    [(floats,)] = spec.shapes
    blocks, page = pages.shape[0] * PAGE // BLOCK, spec.page_size_bytes // pages.element_size()
    return pages.as_strided((blocks, 1, 1, floats), (page, floats, floats, 1))


class Scheduled:
    """A scheduler, and a worker whose cache holds random bytes.

    Args:
        folder: of the arena.
        blocks: of the cache. scheduler: its class. spec: of a layer. step_tokens: of a step.
        told: `additional_config`. asynchronous: steps are scheduled before their predecessors end.
        groups: specs of cache groups, as vLLM makes them: layers take turns, and those of different
            groups lie in the same memory. Without it there is one group with `spec`.
        layers: of a group.
        store: more settings of the store.
        retention: vLLM's `prefix_cache_retention_interval`; None keeps all states.
        more: arguments of the engine.
    """

    def __init__(
        self,
        folder: Path,
        blocks: int = BLOCKS,
        scheduler: Any = Scheduler,
        spec: Any = SPEC,
        step_tokens: int = 4096,
        told: dict[str, Any] | None = None,
        asynchronous: bool = False,
        groups: Sequence[Any] = (),
        layers: int = LAYERS,
        store: dict[str, Any] | None = None,
        retention: int | None = None,
        **more: Any,
    ) -> None:
        init_none_hash(sha256_cbor)
        config = EngineArgs(
            model=more.pop("model", str(tiny_llama())),
            dtype="float32",
            enforce_eager=True,
            max_model_len=more.pop("max_model_len", 4096),
            max_num_batched_tokens=step_tokens,
            num_gpu_blocks_override=blocks,
            additional_config=told or {},
            async_scheduling=False,
            disable_hybrid_kv_cache_manager=not groups,
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
                    **(store or {}),
                },
            ),
            **more,
        ).create_engine_config()
        # vLLM switches it off on CPUs.
        config.scheduler_config.async_scheduling = asynchronous
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.block_size = BLOCK
        specs = groups or [spec]
        if any(isinstance(each, MambaSpec) for each in specs):
            config.cache_config.mamba_cache_mode = "align"
        self.names = [layer_name(n) for n in range(layers * len(specs))]
        self.groups = [self.names[n :: len(specs)] for n in range(len(specs))]
        size = blocks * spec.page_size_bytes
        cache = KVCacheConfig(
            blocks,
            [
                KVCacheTensor(size, [name], size, spec.page_size_bytes)
                for names in self.groups
                for name in names
            ],
            [KVCacheGroupSpec(*each) for each in zip(self.groups, specs, strict=True)],
            prefix_cache_retention_interval=retention,
        )
        register_all_kvcache_specs(config)
        manager = StructuredOutputManager(config)
        self.scheduler: Any = scheduler(config, cache, manager, block_size=BLOCK)
        self.connector: Any = self.scheduler.connector
        self.worker: Any = HeadraceConnector(config, KVConnectorRole.WORKER, cache)
        pages = torch.randn(layers, blocks * BLOCK // PAGE, 2, PAGE, 128)
        self.caches = {
            name: state_of(page, each) if isinstance(each, MambaSpec) else page
            for names, each in zip(self.groups, specs, strict=True)
            for name, page in zip(names, pages, strict=True)
        }
        self.worker.register_kv_caches(self.caches)
        self.steps: list[dict[str, int]] = []

    def step(self) -> None:
        """Schedule, have the worker do its part, and take in its output."""
        output = self.scheduler.schedule()
        self.steps.append(dict(output.num_scheduled_tokens))
        self.begins(output)
        worker = self.worker
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(STEP)
        for name in self.names:
            worker.wait_for_layer_load(name)
        told = self.connector_output()
        names = list(output.num_scheduled_tokens)
        done = [self.scheduler.requests[n].num_computed_tokens for n in names]
        wanted = [self.scheduler.requests[n].num_tokens for n in names]
        sampled = [[30] if a >= b else [] for a, b in zip(done, wanted, strict=True)]
        places = {name: number for number, name in enumerate(names)}
        result = ModelRunnerOutput(names, places, sampled, kv_connector_output=told)
        self.scheduler.update_from_output(output, result)

    def connector_output(self) -> KVConnectorOutput:
        """End a step of the worker's side."""
        worker, results = self.worker, self.worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return output

    def begins(self, output: Any) -> None:
        """What a worker does with a step's output before anything else."""

    def until(self, condition: Any) -> None:
        limit = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < limit, "it does not come about"
            self.step()
            time.sleep(0.001)

    def add(
        self,
        name: str,
        prompt: int | list[int],
        answer: int,
        extra: Any = None,
        salt: str = "",
        adapter: Any = None,
    ) -> Request:
        """A request with these tokens, or so many."""
        params = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=extra)
        if isinstance(prompt, int):
            prompt = [(prompt * 7 + n) % 1000 + 20 for n in range(prompt)]
        hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        made = Request(
            *(name, prompt, params, None),
            block_hasher=hasher,
            cache_salt=salt or None,
            lora_request=adapter,
        )
        self.scheduler.add_request(made)
        return made

    def served(self, name: str, tokens: int) -> list[torch.Tensor]:
        """Serve a request: its KV is then in the store and not in the engine. Returns that KV."""
        self.add(name, tokens, 2)
        self.step()
        [blocks] = self.scheduler.kv_cache_manager.get_block_ids(name)
        held = [
            self.blocks(each)[blocks[: tokens // BLOCK]].clone() for each in self.caches.values()
        ]
        self.until(lambda: not self.scheduler.requests and not self.connector.scheduler.busy)
        assert self.scheduler.reset_prefix_cache()
        for each in self.caches.values():
            each.zero_()
        return held

    @staticmethod
    def blocks(cache: torch.Tensor) -> torch.Tensor:
        """A layer's by block of the scheduler."""
        return cache.unflatten(0, (-1, BLOCK // PAGE))

    def close(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()

"""Puts sparse attention into an engine's worker, and with it offloading and compression.

If an engine cannot attend sparsely, it starts as usual, logs the reason, and attends densely. Its
frontend asks for the reason before it offers sparse attention or compressed contexts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace_decode.attention.batch import BatchRow, batch_row
from headrace_decode.attention.calibration_file import ModelShape
from headrace_decode.attention.cpu_cache import LayerCache
from headrace_decode.attention.lost_requests import with_lost
from headrace_decode.attention.offload.block_manager import CompressionSpec, OffloadSpec
from headrace_decode.attention.offload.scheduler import OFFLOAD, OffloadMetadata
from headrace_decode.attention.settings import GIB, SparseSettings
from headrace_decode.attention_backend.runtime import RUNTIME
from headrace_decode.compression.engine.calibration import required_predictor
from headrace_decode.compression.engine.compression_worker import CompressionWorker
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.engine.metadata import COMPRESSION_KEY, CompressionMetadata
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.engine.attention import SparseLayer
from headrace_decode.sparse.engine.calibration import bases_for
from headrace_decode.sparse.engine.page_summary_table import PageSummaryTable
from headrace_decode.sparse.engine.sparse_rows import SparseRows
from headrace_decode.sparse.offload.cpu_memory import CpuTieredMemory
from headrace_decode.sparse.offload.host_pool import HostPool, host_blocks
from headrace_decode.sparse.offload.offloaded_requests import OffloadedRequests
from headrace_decode.sparse.offload.pinned_memory import allocate_pinned
from headrace_decode.techniques import COMPRESSION, OFFLOADING, SPARSE
from headrace_engine.extensions.extension import WorkerPart, metadata_of
from headrace_engine.extensions.scheduler import why_no_extensions
from headrace_engine.kv_views import KvOrder
from headrace_engine.rope import Rope, RopeError
from headrace_engine.vllm.attention.cpu import register_cpu_backend, unsupported_cpu_engine
from headrace_engine.vllm.attention.layers import (
    attention_layers,
    attention_modules,
    kv_heads_of_worker,
    model_fields,
    unsupported_kv_cache,
    unsupported_layers,
)
from headrace_engine.vllm.platforms import runs_on_cuda
from headrace_engine.vllm.rotary_embedding import rope_of_model
from headrace_engine.vllm.scheduling import (
    FullAttentionSpec,
    final_tokens,
    replace_as,
    requests_gone,
    requests_moved,
)
from headrace_engine.vllm.worker import FollowedRows, RunnerRows, engine_ranks

if TYPE_CHECKING:
    from headrace_decode.attention_backend.cuda_runtime import CudaSparseRuntime
    from headrace_decode.sparse.offload.device_memory import DeviceTieredMemory

logger = logging.getLogger("headrace.sparse")

BACKEND = "headrace_decode.attention_backend.cpu.SparseBackend"


class AttentionWorkerPart(WorkerPart):
    """Sparse, offloaded and compressed requests of a worker.

    Args:
        worker: vLLM's. settings: settings of sparse attention.
        compression: settings of compression; None if no request drops KV.

    Attributes:
        is_bound: whether the engine attends with our backend.
        host_blocks: number of blocks in host memory; 0 if no KV leaves the cache.
    """

    def __init__(
        self, worker: Any, settings: SparseSettings, compression: CompressionSettings | None
    ) -> None:
        self._worker, self._settings, self._compression = worker, settings, compression
        self.is_bound = False
        self.host_blocks = 0
        self._unsupported: dict[str, str] = {}
        """By technique that the engine does not support: the reason."""
        self._rope: Rope | None = None
        """The model's rotary embedding, if requests may drop KV."""
        self._on_cuda = False
        self._cuda: CudaSparseRuntime | None = None
        """Sparse attention on a CUDA GPU; None on other devices, and if no row is sparse."""
        self._pinned: Tensor | None = None
        """Host memory for KV that leaves the cache of a CUDA GPU."""
        self._batch: RunnerRows[BatchRow] | FollowedRows[BatchRow]
        self._blocks: Callable[[str], Sequence[int]]
        self._tells_ranks: list[str] = []
        """Requests of the step in progress, if ranks must tell each other whose KV is lost."""
        self._final: dict[str, int] = {}
        """Number of each request's tokens whose KV is final after the step in progress."""

    @property
    def _ranks(self) -> int:
        """Number of tensor-parallel ranks of the engine."""
        return int(self._worker.vllm_config.parallel_config.tensor_parallel_size)

    def before_load(self) -> None:
        """Have vLLM make its layers with our attention backend, if the engine supports it."""
        RUNTIME.page_tokens = self._settings.page_tokens
        why = self._use_backend(self._worker.vllm_config)
        if why is None:
            self.is_bound = True
        else:
            self._attend_densely(why)

    def unsupported(self) -> dict[str, str]:
        """Implement `WorkerPart.unsupported`."""
        configured = {
            SPARSE: self._settings.mode != "off",
            COMPRESSION: self._compression is not None,
            OFFLOADING: bool(self._settings.offload_gib),
        }
        return {name: why for name, why in self._unsupported.items() if configured[name]}

    def _attend_densely(self, why: str) -> None:
        self.is_bound = False
        for name in (SPARSE, COMPRESSION, OFFLOADING):
            self._unsupported.setdefault(name, why)
        logger.warning("this engine attends densely: %s", why)

    def _use_backend(self, config: Any) -> str | None:
        """Install the device's attention backend; or return why the engine attends densely."""
        if runs_on_cuda():
            self._on_cuda = True
            return self._use_cuda_backend(config)
        why = unsupported_cpu_engine(config, self._settings.page_tokens)
        if why is None:
            register_cpu_backend(BACKEND)
        return why

    def _use_cuda_backend(self, config: Any) -> str | None:
        """Install the backend of GPUs if rows may be sparse, or contexts compressed.

        A prefill engine has the settings without techniques if engines that pull its KV compress
        contexts. It gets the backend too, so that the KV of both lies alike.
        """
        from headrace_decode.attention_backend import cuda_runtime

        if why := cuda_runtime.unsupported_engine(config, self._settings.page_tokens):
            return why
        self._cuda, why = cuda_runtime.CudaSparseRuntime.of(config, self._settings)
        if why is not None:
            self._unsupported |= {SPARSE: why, OFFLOADING: why}
            if self._compression is None and self._settings.mode != "off":
                return why
            if no_compression := self._why_no_compression(config):
                self._unsupported[COMPRESSION] = no_compression
                return no_compression
            if self._settings.mode != "off":
                logger.warning("techniques.sparse: requests attend to all KV: %s", why)
        cuda_runtime.register_backend(config)
        return None

    def _why_no_compression(self, config: Any) -> str | None:
        """Return why no request drops KV, according to the engine's configuration."""
        if self._ranks > 1:
            return "tensor_parallel_size is above 1"
        return why_drafts_pin(config) or why_no_extensions(config)

    def kv_cache_bytes(self, available: int, specs: Mapping[str, Any]) -> int:
        """Leave the parts that sparse attention and compression take on a GPU."""
        if self._on_cuda and self._rope is not None and self._compression is not None:
            from headrace_decode.attention_backend.cuda_runtime import compression_bytes

            config, keep_ratio = self._worker.vllm_config, self._compression.keep_ratio
            available = max(available - compression_bytes(config, specs, keep_ratio), 0)
        if self._cuda is None:
            return available
        return self._cuda.cache_bytes(available, next(iter(specs.values())), self.host_blocks)

    def kv_cache_specs(self, specs: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's specs, or specs of layers whose blocks may leave the cache or be dropped if
        the settings ask for that and the engine supports it."""
        config: Any = self._worker.vllm_config
        compresses = self._compression is not None
        if not self.is_bound or not (compresses or self._settings.offload_gib):
            return specs
        kind = FullAttentionSpec
        stays = why_blocks_pinned(specs, config)
        if compresses:
            why = stays or self._why_no_compression(config)
            if why is None:
                self._rope, why = rope_of(config, specs, self._worker.get_model())
            if why is None:
                kind = CompressionSpec
            else:
                self._unsupported[COMPRESSION] = why
                logger.warning("techniques.compression: requests keep all KV: %s", why)
        if self._settings.offload_gib:
            blocks, why = 0, self._unsupported.get(OFFLOADING) or stays
            why = why or why_drafts_pin(config) or why_no_extensions(config)
            if why is None:
                blocks, why = host_blocks(specs, self._settings, config)
            if why is None and self._cuda is not None and self._pinned is None:
                why = self._allocate_pinned(specs, blocks)
            if why is None:
                kind, self.host_blocks = OffloadSpec, blocks
            else:
                self._unsupported[OFFLOADING] = why
                logger.warning("techniques.sparse.offload_gib: KV stays in the cache: %s", why)
        if kind is FullAttentionSpec:
            return specs
        return {name: replace_as(spec, kind) for name, spec in specs.items()}

    def _allocate_pinned(self, specs: Mapping[str, Any], blocks: int) -> str | None:
        """Allocate host memory that the GPU reads and writes; or return why that fails."""
        size_bytes = blocks * sum(spec.page_size_bytes for spec in specs.values())
        try:
            self._pinned = allocate_pinned(size_bytes, torch.device(self._worker.device))
        except MemoryError as error:
            return str(error)
        return None

    def after_kv_cache(self, kv_cache_config: Any) -> None:
        """Bind the layers to their caches."""
        if not self.is_bound:
            return
        kind = FullAttentionSpec if self._rope is None else CompressionSpec
        kind = OffloadSpec if self.host_blocks else kind
        modules: list[Any] = []
        if (why := unsupported_kv_cache(kv_cache_config, kind)) is None:
            modules = attention_layers(self._worker.vllm_config, kv_cache_config)
            why = unsupported_layers(modules)
        if why is not None:
            if kind is not FullAttentionSpec:  # the scheduler takes blocks away
                raise RuntimeError(f"this engine cannot offload or drop KV: {why}")
            self._attend_densely(why)
            return
        if not all(hasattr(module.impl, "sparse") for module in modules):
            raise RuntimeError("vLLM made its layers with another attention backend than ours")
        if self._on_cuda:
            self._bind_cuda(modules)
        else:
            self._bind(modules)

    def _bind_cuda(self, modules: list[Any]) -> None:
        rows, runner = None, self._worker.model_runner
        if self._cuda is not None:
            try:
                rows = self._bind_cuda_rows(self._cuda, modules)
            except Exception as error:
                if self.host_blocks:
                    raise RuntimeError(f"this engine cannot offload KV: {error}") from error
                logger.debug("sparse attention cannot be bound", exc_info=True)
                self._unsupported[SPARSE] = why = f"{type(error).__name__}: {error}"
                if self._rope is None:
                    self._attend_densely(why)
                    return
                logger.warning("techniques.sparse: requests attend to all KV: %s", why)
        second = self._worker.vllm_config.use_v2_model_runner
        batch = FollowedRows(batch_row) if second else RunnerRows(runner, batch_row)
        self._batch, self._blocks = batch, batch.blocks
        RUNTIME.bind(rows, batch.rows)
        if self._rope is not None:
            from headrace_decode.attention_backend.cuda_runtime import compile_compression

            for number, module in enumerate(modules):
                module.impl.number = number
            self._bind_compression(modules, self._rope, batch.blocks, KvOrder.JOINED)
            assert RUNTIME.compression is not None
            compile_compression(RUNTIME.compression.head_pages, modules[0].num_heads)

    def _bind_cuda_rows(self, runtime: CudaSparseRuntime, modules: list[Any]) -> SparseRows:
        """Have rows be sparse on a GPU, and KV leave its cache."""
        taken, memory = runtime.bind(modules, self._pinned, self.host_blocks)
        if memory is not None:
            self._bind_offloading(memory)
        logger.info(
            "sparse attention over pages of %d tokens on this GPU; of the KV cache's memory "
            "summaries take %.0f MB, and %.0f MB are left to a step",
            runtime.page_tokens,
            taken / 1e6,
            runtime.scratch_bytes / 1e6,
        )
        return runtime.rows()

    def _bind(self, modules: list[Any]) -> None:
        keys = [LayerCache(module.kv_cache) for module in modules]
        block_tokens = self._worker.vllm_config.cache_config.block_size
        block_pages = block_tokens // RUNTIME.page_tokens
        summary_table = PageSummaryTable(keys, self._bases(), self.host_blocks * block_pages)
        parts = zip(modules, keys, summary_table.summaries, strict=True)
        for number, (module, of_layer, summaries) in enumerate(parts):
            module.impl.sparse = SparseLayer(of_layer, summaries, number)
        modules[0].impl.sparse.warm(modules[0].num_heads)
        rows = SparseRows(len(modules), RUNTIME.page_tokens)
        self._batch = runner = RunnerRows(self._worker.model_runner, batch_row)
        self._blocks = runner.blocks
        RUNTIME.bind(rows, runner.rows, summary_table)
        if self._rope is not None:
            self._bind_compression(modules, self._rope, runner.blocks, KvOrder.VEC)
        if self.host_blocks:
            host = HostPool(self.host_blocks, block_pages)
            longest = self._worker.vllm_config.model_config.max_model_len
            most = -(-longest // block_tokens) * block_pages
            self._bind_offloading(CpuTieredMemory(keys, host, summary_table, most))
        logger.info(
            "sparse attention over pages of %d tokens, %s; summaries take up to %.0f MB",
            RUNTIME.page_tokens,
            "with the model's basis"
            if summary_table.summaries[0].layout.coordinates
            else "without a basis",
            summary_table.nbytes / 1e6,
        )

    def _bind_offloading(self, memory: CpuTieredMemory | DeviceTieredMemory) -> None:
        """Have KV leave the cache."""
        RUNTIME.offloading = OffloadedRequests(memory)
        logger.info(
            "KV may leave the cache: %.2f GiB of host memory, and %.0f MB to line up a layer",
            memory.host_bytes / GIB,
            memory.staging_bytes / 1e6,
        )

    def _bind_compression(
        self, modules: list[Any], rope: Rope, blocks: Callable[[str], Sequence[int]], order: KvOrder
    ) -> None:
        """Have requests drop KV."""
        caches, scale = [module.kv_cache for module in modules], modules[0].impl.scale
        block_tokens = self._worker.vllm_config.cache_config.block_size
        try:
            head_pages = HeadPages(caches, block_tokens // RUNTIME.page_tokens, order)
        except ValueError as error:
            raise RuntimeError(f"this engine cannot drop KV: {error}") from None
        shape = ModelShape.of(model_fields(self._worker.vllm_config))
        assert self._compression is not None
        predictor = required_predictor(self._compression, shape, RUNTIME.page_tokens)
        RUNTIME.compression = CompressionWorker(head_pages, scale, rope, blocks, predictor)
        logger.info(
            "requests may drop KV, in pages of %d tokens on %s; %s",
            RUNTIME.page_tokens,
            head_pages.device,
            "prompts are read again" if predictor is None else "with a predictor",
        )

    def _bases(self) -> list[Basis] | None:
        if self._settings.calibration is None:
            return None
        config = self._worker.vllm_config
        file, fields = Path(self._settings.calibration), model_fields(config)
        bases = bases_for(file, fields, RUNTIME.page_tokens)
        if bases is None:
            return None
        own = kv_heads_of_worker(config, len(bases[0].origin))
        return [one.of_heads(own) for one in bases]

    def begin_step(self, step: Any) -> None:
        """Prepare the step's sparse, offloaded and compressed rows."""
        if not self.is_bound:
            return
        RUNTIME.begin_step(requests_moved(step))
        self._batch.begin_step(step)
        if RUNTIME.compression is not None:
            metadata = metadata_of(step, COMPRESSION_KEY) or CompressionMetadata()
            ended = step.finished_req_ids
            preempted = requests_gone(step) - ended
            RUNTIME.lost |= RUNTIME.compression.begin_step(ended, preempted, metadata)
        self._final = self._offload_begins(step)
        shared = self._ranks > 1 and RUNTIME.offloading
        self._tells_ranks = sorted(step.num_scheduled_tokens) if shared else []

    def end_step(self) -> None:
        """Attend densely until the next step."""
        RUNTIME.end_step()

    def after_step(self, output: Any) -> Any:
        """Save the KV that is final now; return the output, with the requests whose KV was lost."""
        if not self.is_bound:
            return output
        if RUNTIME.offloading:
            RUNTIME.offloading.save(self._final, self._blocks)
        if self._tells_ranks:  # only the first rank's output reaches the scheduler
            RUNTIME.lost |= engine_ranks().union(RUNTIME.lost, self._tells_ranks)
        return output if output is None else with_lost(output, RUNTIME.pop_lost())

    def after_sample(self, output: Any) -> Any:
        """Return the output, with the requests whose KV was lost in the step."""
        return with_lost(output, RUNTIME.pop_lost()) if self.is_bound else output

    def _offload_begins(self, step: Any) -> dict[str, int]:
        """Follow a step's offloaded requests. Return the number of each request's tokens whose KV
        is final after the step."""
        offloading = RUNTIME.offloading
        if offloading is None:
            return {}
        metadata = metadata_of(step, OFFLOAD) or OffloadMetadata({}, {})
        offloading.begin_step(requests_gone(step), metadata.working_sets)
        if not offloading:
            return {}
        offloading.save(metadata.copy_first, self._blocks)
        if metadata.copy_first:
            offloading.memory.finish()
        final = final_tokens(step)
        known = {name: before for name, (before, _) in final.items() if offloading.follows(name)}
        offloading.save(known, self._blocks)
        return {name: behind for name, (_, behind) in final.items()}


def why_blocks_pinned(specs: dict[str, Any], config: Any) -> str | None:
    """Return why no block may leave an engine's cache; None if blocks may.

    Args:
        specs: vLLM's specs, by layer.
        config: the engine's configuration.
    """
    kinds = {type(spec).__name__ for spec in specs.values()}
    if kinds != {FullAttentionSpec.__name__}:
        return f"its layers are {sorted(kinds)}"
    return unsupported_layers(attention_modules(config, specs))


def why_drafts_pin(config: Any) -> str | None:
    """Return why drafts of an engine let no block leave its cache; None if blocks may."""
    speculative = config.speculative_config
    if speculative is not None and speculative.method != "custom_class":
        return f"{speculative.method} drafts over the cache"
    return None


def rope_of(config: Any, specs: Mapping[str, Any], model: Any) -> tuple[Rope | None, str | None]:
    """Return the rotary embedding of an engine's model; or why queries cannot be turned by it.

    Args:
        config: the engine's configuration. specs: by attention layer. model: the loaded model.
    """
    try:
        layers = attention_modules(config, specs)
        return rope_of_model(model_fields(config), model, layers), None
    except RopeError as error:
        return None, str(error)

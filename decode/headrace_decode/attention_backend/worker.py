"""Worker classes that put sparse attention into an engine.

If an engine cannot attend sparsely, it starts as usual, logs the reason, and attends densely. Its
frontend calls `headrace_unsupported` before it offers sparse attention or compressed contexts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_decode.attention.batch import BatchRow, batch_row
from headrace_decode.attention.calibration_file import CalibrationError, ModelShape
from headrace_decode.attention.cpu_cache import LayerCache
from headrace_decode.attention.lost_requests import with_lost
from headrace_decode.attention.offload.block_manager import CompressionSpec, OffloadSpec
from headrace_decode.attention.offload.scheduler import COPY_FIRST, OFFLOADED
from headrace_decode.attention.settings import GIB, SparseSettings, settings_of
from headrace_decode.attention_backend.runtime import RUNTIME
from headrace_decode.compression.engine.calibration import read_predictor
from headrace_decode.compression.engine.compression_worker import CompressionWorker
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.engine.metadata import COMPRESSION_METADATA, CompressionMetadata
from headrace_decode.compression.engine.settings import settings_of as compression_settings_of
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_decode.resume.worker import ResumeWorker
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.engine.attention import SparseLayer
from headrace_decode.sparse.engine.calibration import COMMAND, read_bases
from headrace_decode.sparse.engine.page_summary_table import PageSummaryTable
from headrace_decode.sparse.engine.sparse_rows import SparseRows
from headrace_decode.sparse.offload.host_pool import HostPool
from headrace_decode.sparse.offload.offloaded_request import TieredCache
from headrace_decode.sparse.offload.offloaded_rows import OffloadedRequests
from headrace_decode.speculative.speculative_worker import SpeculativeWorker
from headrace_decode.techniques import COMPRESSION, SPARSE
from headrace_engine.rope import Rope, RopeError
from headrace_engine.vllm.attention.cpu import register_cpu_backend, unsupported_cpu_engine
from headrace_engine.vllm.attention.layers import (
    attention_layers,
    attention_modules,
    model_fields,
    unsupported_kv_cache,
    unsupported_layers,
)
from headrace_engine.vllm.platforms import runs_on_cuda
from headrace_engine.vllm.rotary_embedding import rope_of_model
from headrace_engine.vllm.scheduler import FullAttentionSpec, replace_as
from headrace_engine.vllm.scheduling import final_tokens, requests_gone, requests_moved
from headrace_engine.vllm.worker import FollowedRows, RunnerRows

if TYPE_CHECKING:
    from headrace_decode.attention_backend.cuda_runtime import CudaSparseRuntime

logger = logging.getLogger("headrace.sparse")

BACKEND = "headrace_decode.attention_backend.cpu.SparseBackend"


class SparseWorkerMixin:
    """Mixin that precedes a vLLM worker class among the bases."""

    _sparse = False
    _unsupported: dict[str, str] = {}
    """By technique that the engine does not support: the reason."""
    _settings = SparseSettings()
    _rope: Rope | None = None
    """The model's rotary embedding, if requests may drop KV."""
    _host_blocks = 0
    """Number of blocks in host memory; 0 if no KV leaves the cache."""
    _cuda: CudaSparseRuntime | None = None
    """Resources on a CUDA GPU; None on other devices."""
    _batch: RunnerRows[BatchRow] | FollowedRows[BatchRow]
    _blocks: Callable[[str], Sequence[int]]

    def load_model(self, **kwargs: Any) -> None:
        """Load the model like vLLM, with our attention backend if the engine supports it."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        settings = settings_of(config.additional_config)
        if settings is not None:
            RUNTIME.page_tokens, self._settings = settings.page_tokens, settings
            self._unsupported = {}
            why = self._use_backend(config)
            if why is None:
                self._sparse = True
            else:
                self._attend_densely(why)
        super().load_model(**kwargs)  # type: ignore[misc]

    def headrace_unsupported(self) -> dict[str, str]:
        """Implement `BlendingWorkerMixin.headrace_unsupported`."""
        found: dict[str, str] = getattr(super(), "headrace_unsupported", dict)()
        return found | self._unsupported

    def _attend_densely(self, why: str) -> None:
        self._sparse = False
        self._unsupported = {SPARSE: why, COMPRESSION: why}
        logger.warning("this engine attends densely: %s", why)

    def _use_backend(self, config: Any) -> str | None:
        """Install the device's attention backend; or return why the engine attends densely."""
        if runs_on_cuda():
            from headrace_decode.attention_backend.cuda_runtime import CudaSparseRuntime

            self._cuda, why = CudaSparseRuntime.of(config, self._settings)
            return why
        why = unsupported_cpu_engine(config, self._settings.page_tokens)
        if why is None:
            register_cpu_backend(BACKEND)
        return why

    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache like vLLM, less the part that sparse attention takes on
        a GPU."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        if self._cuda is None:
            return available
        specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        return self._cuda.cache_bytes(available, next(iter(specs.values())))

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return vLLM's specs, or specs of layers whose blocks may leave the cache or be dropped if
        the settings ask for that and the engine supports it."""
        specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        compresses = compression_settings_of(config.additional_config) is not None
        if not self._sparse or not (compresses or self._settings.offload_gib):
            return specs
        kind, stays = FullAttentionSpec, why_blocks_pinned(specs, config)
        if compresses:
            why = stays or why_scheduler_unable(config, "drops_blocks")
            if why is None:
                self._rope, why = rope_of(config, specs, self.get_model())  # type: ignore[attr-defined]
            if why is None:
                kind = CompressionSpec
            else:
                self._unsupported[COMPRESSION] = why
                logger.warning("techniques.compression: requests keep all KV: %s", why)
        if self._settings.offload_gib:
            blocks, why = 0, stays or why_scheduler_unable(config, "offloads_blocks")
            if why is None:
                blocks, why = host_blocks(specs, self._settings, config)
            if why is None:
                kind, self._host_blocks = OffloadSpec, blocks
            else:
                logger.warning("techniques.sparse.offload_gib: KV stays in the cache: %s", why)
        if kind is FullAttentionSpec:
            return specs
        return {name: replace_as(spec, kind) for name, spec in specs.items()}

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Initialise the KV cache like vLLM, then bind the layers to their caches."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        if not self._sparse:
            return
        kind = FullAttentionSpec if self._rope is None else CompressionSpec
        kind = OffloadSpec if self._host_blocks else kind
        modules: list[Any] = []
        if (why := unsupported_kv_cache(kv_cache_config, kind)) is None:
            modules = attention_layers(self.vllm_config, kv_cache_config)  # type: ignore[attr-defined]
            why = unsupported_layers(modules)
        if why is not None:
            if self._host_blocks:
                raise RuntimeError(f"this engine cannot offload KV: {why}")
            self._attend_densely(why)
            return
        if not all(hasattr(module.impl, "sparse") for module in modules):
            raise RuntimeError("vLLM made its layers with another attention backend than ours")
        if self._cuda is not None:
            self._bind_cuda(self._cuda, modules)
        else:
            self._bind(modules)

    def _bind_cuda(self, runtime: CudaSparseRuntime, modules: list[Any]) -> None:
        try:
            taken = runtime.bind(modules)
        except Exception as error:
            logger.debug("sparse attention cannot be bound", exc_info=True)
            self._attend_densely(f"{type(error).__name__}: {error}")
            return
        second = self.vllm_config.use_v2_model_runner  # type: ignore[attr-defined]
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self._batch = FollowedRows(batch_row) if second else RunnerRows(runner, batch_row)
        RUNTIME.bind(runtime.rows(), self._batch.rows)
        logger.info(
            "sparse attention over pages of %d tokens on this GPU; of the KV cache's memory "
            "summaries take %.0f MB, and %.0f MB are left to a step",
            runtime.page_tokens,
            taken / 1e6,
            runtime.scratch_bytes / 1e6,
        )

    def _bind(self, modules: list[Any]) -> None:
        keys = [LayerCache(module.kv_cache) for module in modules]
        block_tokens = self.vllm_config.cache_config.block_size  # type: ignore[attr-defined]
        block_pages = block_tokens // RUNTIME.page_tokens
        summary_table = PageSummaryTable(keys, self._bases(), self._host_blocks * block_pages)
        parts = zip(modules, keys, summary_table.summaries, strict=True)
        for number, (module, of_layer, summaries) in enumerate(parts):
            module.impl.sparse = SparseLayer(of_layer, summaries, number)
        modules[0].impl.sparse.warm(modules[0].num_heads)
        rows = SparseRows(len(modules), RUNTIME.page_tokens)
        self._batch = runner = RunnerRows(self.model_runner, batch_row)  # type: ignore[attr-defined]
        self._blocks = runner.blocks
        RUNTIME.bind(rows, runner.rows, summary_table)
        if self._rope is not None:
            head_pages, scale = HeadPages(keys, block_pages), modules[0].impl.scale
            predictor = self._predictor(RUNTIME.page_tokens)
            RUNTIME.compression = CompressionWorker(
                head_pages, scale, self._rope, runner.blocks, predictor
            )
        if self._host_blocks:
            host = HostPool(keys, self._host_blocks, block_pages)
            longest = self.vllm_config.model_config.max_model_len  # type: ignore[attr-defined]
            most = -(-longest // block_tokens) * block_pages
            RUNTIME.offloading = OffloadedRequests(
                TieredCache(keys, host, summary_table, most), block_tokens
            )
            logger.info(
                "KV may leave the cache: %.2f GiB of host memory, and a layer's %.0f MB to line up",
                host.nbytes / GIB,
                RUNTIME.offloading.memory.staging_bytes / 1e6,
            )
        logger.info(
            "sparse attention over pages of %d tokens, %s; summaries take up to %.0f MB",
            RUNTIME.page_tokens,
            "with the model's basis"
            if summary_table.summaries[0].layout.coordinates
            else "without a basis",
            summary_table.nbytes / 1e6,
        )

    def _predictor(self, page_tokens: int) -> ImportancePredictor | None:
        """Read the predictor of compressed contexts, if the settings name one.

        Raises:
            RuntimeError: the file cannot be used. The scheduler relies on the predictor, so the
                engine cannot run without it.
        """
        settings = compression_settings_of(self.vllm_config.additional_config)  # type: ignore[attr-defined]
        if settings is None or settings.calibration is None:
            return None
        shape = ModelShape.of(model_fields(self.vllm_config))  # type: ignore[attr-defined]
        try:
            return read_predictor(Path(settings.calibration), shape, page_tokens)
        except CalibrationError as error:
            raise RuntimeError(
                f"techniques.compression.calibration: {settings.calibration} cannot be used: "
                f"{error}"
            ) from None

    def _bases(self) -> list[Basis] | None:
        if self._settings.calibration is None:
            return None
        config = model_fields(self.vllm_config)  # type: ignore[attr-defined]
        return bases_for(Path(self._settings.calibration), config, RUNTIME.page_tokens)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step like vLLM, with its sparse, offloaded and compressed rows."""
        if not self._sparse:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        RUNTIME.begin_step(requests_moved(scheduler_output))
        self._batch.begin_step(scheduler_output)
        if RUNTIME.compression is not None:
            metadata = getattr(scheduler_output, COMPRESSION_METADATA, CompressionMetadata())
            ended = scheduler_output.finished_req_ids
            preempted = requests_gone(scheduler_output) - ended
            RUNTIME.lost |= RUNTIME.compression.begin_step(ended, preempted, metadata)
        final = self._offload_begins(scheduler_output)
        try:
            found = super().execute_model(scheduler_output)  # type: ignore[misc]
        finally:
            RUNTIME.end_step()
        if RUNTIME.offloading:
            RUNTIME.offloading.save(final, self._blocks)
        return found if found is None else with_lost(found, RUNTIME.pop_lost())

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Return the step's output, with the requests whose KV was lost in it."""
        found = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        return with_lost(found, RUNTIME.pop_lost()) if self._sparse else found

    def _offload_begins(self, step: Any) -> dict[str, int]:
        """Follow a step's offloaded requests. Return the number of each request's tokens whose KV
        is final after the step."""
        offloading = RUNTIME.offloading
        if offloading is None:
            return {}
        offloading.begin_step(requests_gone(step), getattr(step, OFFLOADED, {}))
        if not offloading:
            return {}
        offloading.save(getattr(step, COPY_FIRST, {}), self._blocks)
        final = final_tokens(step)
        known = {name: before for name, (before, _) in final.items() if offloading.follows(name)}
        offloading.save(known, self._blocks)
        return {name: behind for name, (_, behind) in final.items()}


class SparseWorker(SparseWorkerMixin, ResumeWorker):
    """Worker of engines that do not draft."""


class SparseSpeculativeWorker(SparseWorkerMixin, SpeculativeWorker):
    """Worker of engines that draft."""


def why_blocks_pinned(specs: dict[str, Any], config: Any) -> str | None:
    """Return why no block may leave an engine's cache; None if blocks may.

    Args:
        specs: vLLM's specs, by layer.
        config: the engine's configuration.
    """
    if runs_on_cuda():
        return "this engine does not run on a CPU"
    kinds = {type(spec).__name__ for spec in specs.values()}
    if kinds != {FullAttentionSpec.__name__}:
        return f"its layers are {sorted(kinds)}"
    if why := unsupported_layers(attention_modules(config, specs)):
        return why
    speculative = config.speculative_config
    if speculative is not None and speculative.method != "custom_class":
        return f"{speculative.method} drafts over the cache"
    return None


def why_scheduler_unable(config: Any, ability: str) -> str | None:
    """Return why an engine's scheduler cannot give blocks of running requests to others; None if it
    can.

    Args:
        config: the engine's configuration. ability: attribute of scheduler classes that can.
    """
    scheduler = config.scheduler_config.get_scheduler_cls()
    if getattr(scheduler, ability, False):
        return None
    return f"the engine runs with scheduler_cls {scheduler.__module__}.{scheduler.__qualname__}"


def host_blocks(
    specs: dict[str, Any], settings: SparseSettings, config: Any
) -> tuple[int, str | None]:
    """Return the number of blocks that host memory holds; or 0, and why it holds too few. Arguments
    as for `why_blocks_pinned`."""
    blocks = settings.host_blocks(sum(spec.page_size_bytes for spec in specs.values()))
    longest = config.model_config.max_model_len
    if blocks * config.cache_config.block_size < longest:
        return 0, f"{settings.offload_gib} GiB do not hold a request of {longest} tokens"
    return blocks, None


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


def bases_for(file: Path, config: Mapping[str, Any], page_tokens: int) -> list[Basis] | None:
    """Read the bases of a calibration; None, with the reason in the log, if it cannot be used.

    Args:
        config: configuration of the engine's model, as `ModelShape.of` takes it.
    """
    try:
        return read_bases(file, ModelShape.of(config), page_tokens)
    except CalibrationError as error:
        logger.warning(
            "techniques.sparse.calibration: %s cannot be used: %s. This engine attends without a "
            "basis, and errs more than was calibrated. `%s` makes such a file",
            file,
            error,
            COMMAND,
        )
        return None

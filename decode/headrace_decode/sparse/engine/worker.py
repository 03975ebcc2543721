"""Worker classes that put sparse attention into an engine.

If an engine cannot attend sparsely, it starts as usual, logs the reason, and attends densely. Its
frontend calls `headrace_unsupported` before it offers sparse attention or bounded contexts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_decode.compression.engine import settings as bounded
from headrace_decode.compression.engine.calibration import read_gate
from headrace_decode.compression.engine.cells import Cells
from headrace_decode.compression.engine.following import TOLD, Following, Told
from headrace_decode.compression.gate import Gate
from headrace_decode.resume.worker import TakingUpWorker
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.calibration_file import CalibrationError, Shape
from headrace_decode.sparse.engine._vllm_compat import (
    FollowedRows,
    FullAttentionSpec,
    RunnerRows,
    attention_layers,
    attention_modules,
    final_tokens,
    model_fields,
    replace_as,
    requests_gone,
    requests_moved,
    runs_on_cuda,
    use_backend,
    why_dense,
    why_layers_dense,
    why_modules_dense,
)
from headrace_decode.sparse.engine.attention import SparseLayer
from headrace_decode.sparse.engine.book import Book
from headrace_decode.sparse.engine.bound import BOUND
from headrace_decode.sparse.engine.calibration import COMMAND, read_bases
from headrace_decode.sparse.engine.keys import LayerKeys
from headrace_decode.sparse.engine.lost import with_lost
from headrace_decode.sparse.engine.offload.held import Memory
from headrace_decode.sparse.engine.offload.host import HostPool
from headrace_decode.sparse.engine.offload.manager import DropSpec, OffloadSpec
from headrace_decode.sparse.engine.offload.rows import Offloading
from headrace_decode.sparse.engine.offload.scheduler import LEFT, OFFLOADED
from headrace_decode.sparse.engine.rows import SparseRows
from headrace_decode.sparse.engine.settings import GIB, SparseSettings, settings_of
from headrace_decode.speculative.drafting_worker import SpeculatingWorker
from headrace_decode.techniques import BOUNDED, SPARSE
from headrace_engine.rope import Rope, RopeError
from headrace_engine.rotary import rope_of_model

if TYPE_CHECKING:
    from headrace_decode.sparse.engine.device.card import Card

logger = logging.getLogger("headrace.sparse")

BACKEND = "headrace_decode.sparse.engine.backend.SparseBackend"


class SparseInReach:
    """Mixin that precedes a vLLM worker class among the bases."""

    _sparse = False
    _unsupported: dict[str, str] = {}
    """By technique that the engine does not support: the reason."""
    _settings = SparseSettings()
    _rope: Rope | None = None
    """The model's rotary embedding, if requests may drop KV."""
    _host_blocks = 0
    """Number of blocks in host memory; 0 if no KV leaves the cache."""
    _card: Card | None = None
    """Resources on a CUDA GPU; None on other devices."""
    _batch: RunnerRows | FollowedRows
    _blocks: Callable[[str], Sequence[int]]

    def load_model(self, **kwargs: Any) -> None:
        """Load the model like vLLM, with our attention backend if the engine supports it."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        settings = settings_of(config.additional_config)
        if settings is not None:
            BOUND.unit_tokens, self._settings = settings.unit_tokens, settings
            self._unsupported = {}
            why = self._use_backend(config)
            if why is None:
                self._sparse = True
            else:
                self._attend_densely(why)
        super().load_model(**kwargs)  # type: ignore[misc]

    def headrace_unsupported(self) -> dict[str, str]:
        """Implement `ModelInReach.headrace_unsupported`."""
        found: dict[str, str] = getattr(super(), "headrace_unsupported", dict)()
        return found | self._unsupported

    def _attend_densely(self, why: str) -> None:
        self._sparse = False
        self._unsupported = {SPARSE: why, BOUNDED: why}
        logger.warning("this engine attends densely: %s", why)

    def _use_backend(self, config: Any) -> str | None:
        """Install the device's attention backend; or return why the engine attends densely."""
        if runs_on_cuda():
            from headrace_decode.sparse.engine.device.card import Card

            self._card, why = Card.of(config, self._settings)
            return why
        why = why_dense(config, self._settings.unit_tokens)
        if why is None:
            use_backend(BACKEND)
        return why

    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache like vLLM, less the part that sparse attention takes on
        a GPU."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        if self._card is None:
            return available
        specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        return self._card.cache_bytes(available, next(iter(specs.values())))

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return vLLM's specs, or specs of layers whose blocks may leave the cache or be dropped if
        the settings ask for that and the engine supports it."""
        specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        bounds = bounded.settings_of(config.additional_config) is not None
        if not self._sparse or not (bounds or self._settings.offload_gib):
            return specs
        kind, stays = FullAttentionSpec, why_all_stays(specs, config)
        if bounds:
            why = stays or why_scheduler_unable(config, "drops_blocks")
            if why is None:
                self._rope, why = rope_of(config, specs, self.get_model())  # type: ignore[attr-defined]
            if why is None:
                kind = DropSpec
            else:
                self._unsupported[BOUNDED] = why
                logger.warning("techniques.bounded: requests keep all KV: %s", why)
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
        kind = FullAttentionSpec if self._rope is None else DropSpec
        kind = OffloadSpec if self._host_blocks else kind
        why = why_layers_dense(self.vllm_config, kv_cache_config, kind)  # type: ignore[attr-defined]
        if why is not None:
            if self._host_blocks:
                raise RuntimeError(f"this engine cannot offload KV: {why}")
            self._attend_densely(why)
            return
        modules = attention_layers(self.vllm_config, kv_cache_config)  # type: ignore[attr-defined]
        if not all(hasattr(module.impl, "sparse") for module in modules):
            raise RuntimeError("vLLM made its layers with another attention backend than ours")
        if self._card is not None:
            self._bind_card(self._card, modules)
        else:
            self._bind(modules)

    def _bind_card(self, card: Card, modules: list[Any]) -> None:
        try:
            taken = card.bind(modules)
        except Exception as error:
            logger.debug("sparse attention cannot be bound", exc_info=True)
            self._attend_densely(f"{type(error).__name__}: {error}")
            return
        second = self.vllm_config.use_v2_model_runner  # type: ignore[attr-defined]
        self._batch = FollowedRows() if second else RunnerRows(self.model_runner)  # type: ignore[attr-defined]
        BOUND.bind(card.rows(), self._batch.rows)
        logger.info(
            "sparse attention over units of %d tokens on this GPU; of the KV cache's memory "
            "summaries take %.0f MB, and %.0f MB are left to a step",
            card.unit_tokens,
            taken / 1e6,
            card.scratch_bytes / 1e6,
        )

    def _bind(self, modules: list[Any]) -> None:
        keys = [LayerKeys(module.kv_cache) for module in modules]
        block_tokens = self.vllm_config.cache_config.block_size  # type: ignore[attr-defined]
        block_units = block_tokens // BOUND.unit_tokens
        book = Book(keys, self._bases(), self._host_blocks * block_units)
        parts = zip(modules, keys, book.summaries, strict=True)
        for number, (module, of_layer, summaries) in enumerate(parts):
            module.impl.sparse = SparseLayer(of_layer, summaries, number)
        modules[0].impl.sparse.warm(modules[0].num_heads)
        rows = SparseRows(len(modules), BOUND.unit_tokens)
        self._batch = runner = RunnerRows(self.model_runner)  # type: ignore[attr-defined]
        self._blocks = runner.blocks
        BOUND.bind(rows, runner.rows, book)
        if self._rope is not None:
            cells, scale = Cells(keys, block_units), modules[0].impl.scale
            gate = self._gate(BOUND.unit_tokens)
            BOUND.following = Following(cells, scale, self._rope, runner.blocks, gate)
        if self._host_blocks:
            host = HostPool(keys, self._host_blocks, block_units)
            longest = self.vllm_config.model_config.max_model_len  # type: ignore[attr-defined]
            most = -(-longest // block_tokens) * block_units
            BOUND.offloading = Offloading(Memory(keys, host, book, most), block_tokens)
            logger.info(
                "KV may leave the cache: %.2f GiB of host memory, and a layer's %.0f MB to line up",
                host.nbytes / GIB,
                BOUND.offloading.memory.staging_bytes / 1e6,
            )
        logger.info(
            "sparse attention over units of %d tokens, %s; summaries take up to %.0f MB",
            BOUND.unit_tokens,
            "with the model's basis" if book.summaries[0].layout.coordinates else "without a basis",
            book.nbytes / 1e6,
        )

    def _gate(self, unit_tokens: int) -> Gate | None:
        """Read the gate of bounded contexts, if the settings name one.

        Raises:
            RuntimeError: the file cannot be used. The scheduler relies on the gate, so the engine
                cannot run without it.
        """
        told = bounded.settings_of(self.vllm_config.additional_config)  # type: ignore[attr-defined]
        if told is None or told.calibration is None:
            return None
        shape = Shape.of(model_fields(self.vllm_config))  # type: ignore[attr-defined]
        try:
            return read_gate(Path(told.calibration), shape, unit_tokens)
        except CalibrationError as error:
            raise RuntimeError(
                f"techniques.bounded.calibration: {told.calibration} cannot be used: {error}"
            ) from None

    def _bases(self) -> list[Basis] | None:
        if self._settings.calibration is None:
            return None
        config = model_fields(self.vllm_config)  # type: ignore[attr-defined]
        return bases_for(Path(self._settings.calibration), config, BOUND.unit_tokens)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step like vLLM, with its sparse, offloaded and bounded rows."""
        if not self._sparse:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        BOUND.step_begins(requests_moved(scheduler_output))
        self._batch.step_begins(scheduler_output)
        if BOUND.following is not None:
            told = getattr(scheduler_output, TOLD, Told())
            ended = scheduler_output.finished_req_ids
            preempted = requests_gone(scheduler_output) - ended
            BOUND.lost |= BOUND.following.step_begins(ended, preempted, told)
        final = self._offload_begins(scheduler_output)
        try:
            found = super().execute_model(scheduler_output)  # type: ignore[misc]
        finally:
            BOUND.step_ends()
        if BOUND.offloading:
            BOUND.offloading.save(final, self._blocks)
        return found if found is None else with_lost(found, BOUND.take_lost())

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Return the step's output, with the requests whose KV was lost in it."""
        found = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        return with_lost(found, BOUND.take_lost()) if self._sparse else found

    def _offload_begins(self, step: Any) -> dict[str, int]:
        """Follow a step's offloaded requests. Return the number of each request's tokens whose KV
        is final after the step."""
        offloading = BOUND.offloading
        if offloading is None:
            return {}
        offloading.step_begins(requests_gone(step), getattr(step, OFFLOADED, {}))
        if not offloading:
            return {}
        offloading.save(getattr(step, LEFT, {}), self._blocks)
        final = final_tokens(step)
        known = {name: before for name, (before, _) in final.items() if offloading.follows(name)}
        offloading.save(known, self._blocks)
        return {name: behind for name, (_, behind) in final.items()}


class SparseTakingUpWorker(SparseInReach, TakingUpWorker):
    """Worker of engines that do not draft."""


class SparseSpeculatingWorker(SparseInReach, SpeculatingWorker):
    """Worker of engines that draft."""


def why_all_stays(specs: dict[str, Any], config: Any) -> str | None:
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
    if why := why_modules_dense(attention_modules(config, specs)):
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
    as for `why_all_stays`."""
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


def bases_for(file: Path, config: Mapping[str, Any], unit_tokens: int) -> list[Basis] | None:
    """Read the bases of a calibration; None, with the reason in the log, if it cannot be used.

    Args:
        config: configuration of the engine's model, as `Shape.of` takes it.
    """
    try:
        return read_bases(file, Shape.of(config), unit_tokens)
    except CalibrationError as error:
        logger.warning(
            "techniques.sparse.calibration: %s cannot be used: %s. This engine attends without a "
            "basis, and errs more than was calibrated. `%s` makes such a file",
            file,
            error,
            COMMAND,
        )
        return None

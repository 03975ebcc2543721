"""The worker classes that put sparse attention into an engine.

An engine in which it cannot be done starts as ever, says why in its log, and attends densely.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_decode.replay.worker import TakingUpWorker
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.engine._vllm_compat import (
    RunnerRows,
    attention_layers,
    model_fields,
    requests_moved,
    use_backend,
    why_dense,
    why_layers_dense,
)
from headrace_decode.sparse.engine.attention import SparseLayer
from headrace_decode.sparse.engine.book import Book
from headrace_decode.sparse.engine.bound import BOUND
from headrace_decode.sparse.engine.calibration import (
    COMMAND,
    CalibrationError,
    Shape,
    read_bases,
)
from headrace_decode.sparse.engine.keys import LayerKeys
from headrace_decode.sparse.engine.rows import SparseRows
from headrace_decode.sparse.engine.settings import settings_of
from headrace_decode.speculation.drafting_worker import SpeculatingWorker

logger = logging.getLogger("headrace.sparse")

BACKEND = "headrace_decode.sparse.engine.backend.SparseBackend"


class SparseInReach:
    """Mixed into a worker class of vLLM's, before it."""

    _sparse = False
    _calibration: str | None = None

    def load_model(self, **kwargs: Any) -> None:
        """As vLLM's, with our attention backend where it can stand."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        settings = settings_of(config.additional_config)
        if settings is not None:
            why = why_dense(config, settings.unit_tokens)
            if why is None:
                BOUND.unit_tokens, self._sparse = settings.unit_tokens, True
                self._calibration = settings.calibration
                use_backend(BACKEND)
            else:
                _say_dense(why)
        super().load_model(**kwargs)  # type: ignore[misc]

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """As vLLM's; then binds the layers to their caches."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        if not self._sparse:
            return
        why = why_layers_dense(self.vllm_config, kv_cache_config)  # type: ignore[attr-defined]
        if why is not None:
            self._sparse = False
            _say_dense(why)
            return
        self._bind(attention_layers(self.vllm_config, kv_cache_config))  # type: ignore[attr-defined]

    def _bind(self, modules: list[Any]) -> None:
        keys = [LayerKeys(module.kv_cache) for module in modules]
        book = Book(keys, self._bases())
        for module, of_layer, summaries in zip(modules, keys, book.summaries, strict=True):
            module.impl.sparse = SparseLayer(of_layer, summaries)
        modules[0].impl.sparse.warm(modules[0].num_heads)
        rows = SparseRows(book, len(modules), BOUND.unit_tokens)
        BOUND.bind(rows, RunnerRows(self.model_runner).rows)  # type: ignore[attr-defined]
        logger.info(
            "sparse attention over units of %d tokens, %s; summaries take up to %.0f MB",
            BOUND.unit_tokens,
            "without a basis" if book.summaries[0].basis is None else "with the model's basis",
            book.nbytes / 1e6,
        )

    def _bases(self) -> list[Basis] | None:
        if self._calibration is None:
            return None
        config = model_fields(self.vllm_config)  # type: ignore[attr-defined]
        return bases_for(Path(self._calibration), config, BOUND.unit_tokens)

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's."""
        if not self._sparse:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        BOUND.step_begins(requests_moved(scheduler_output))
        try:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        finally:
            BOUND.step_ends()


class SparseTakingUpWorker(SparseInReach, TakingUpWorker):
    """Of engines that do not draft."""


class SparseSpeculatingWorker(SparseInReach, SpeculatingWorker):
    """Of engines that draft."""


def bases_for(file: Path, config: Mapping[str, Any], unit_tokens: int) -> list[Basis] | None:
    """The bases of a calibration; None, with the reason in the log, if it cannot be used.

    Args:
        config: of the engine's model, as `Shape.of` takes it.
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


def _say_dense(why: str) -> None:
    logger.warning("this engine attends densely: %s", why)

"""Gives an engine's connector the model, so that the connector can compute rows.

A connector that needs the model has a method `bind_rows(RowEngine)`. It may lie within a
MultiConnector. Engines in which rows cannot be computed start as usual: their connector is told so
(`no_rows(reason)`), and vLLM computes their requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from headrace_engine.extensions.extension import WorkerPart
from headrace_engine.vllm.worker import engine_ranks, worker_connectors

if TYPE_CHECKING:
    from headrace_prefill.blending.engine.rows import RowEngine

logger = logging.getLogger("headrace.blending")

Done = TypeVar("Done")
BLENDING = "blending"
"""The technique's name among those that an engine cannot do."""


class BlendingWorkerPart(WorkerPart):
    """The connectors of a worker that need its model."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._unsupported: str | None = None

    def after_kv_cache(self, kv_cache_config: Any) -> None:
        """Bind the connectors that need the model, if rows can be computed on all ranks."""
        for connector in (each for each in worker_connectors() if hasattr(each, "bind_rows")):
            self._unsupported = None
            rows = self._on_all_ranks(partial(row_engine, self._worker, kv_cache_config))
            # No rank is missing now: the check computes rows on all of them together.
            if not (rows and self._on_all_ranks(partial(self._bind, connector, rows))):
                connector.no_rows(self._unsupported or "another rank cannot recompute rows")

    def _on_all_ranks(self, task: Callable[[], Done]) -> Done | None:
        """Do a task; return its result, or None if it failed on any rank."""
        done = None
        try:
            done = task()
        except Exception as error:
            logger.debug("rows cannot be computed", exc_info=True)
            self._unsupported = str(error) if isinstance(error, ValueError) else repr(error)
        mine = {BLENDING} if self._unsupported else set()
        return None if engine_ranks().union(mine, [BLENDING]) else done

    def _bind(self, connector: Any, rows: RowEngine) -> bool:
        from headrace_prefill.blending.engine.row_check import check_rows

        check_rows(rows, self._worker.vllm_config.model_config.max_model_len)
        connector.bind_rows(rows)
        return True

    def unsupported(self) -> dict[str, str]:
        """Implement `WorkerPart.unsupported`."""
        return {} if self._unsupported is None else {BLENDING: self._unsupported}


def row_engine(worker: Any, kv_cache_config: Any) -> RowEngine:
    """Return the `RowEngine` of a worker's model.

    Raises:
        Unsupported: they cannot be computed; the text says why.
        RopeError: its keys cannot be moved to other positions.
    """
    from headrace_engine.vllm.forward_pass import (
        ForwardContexts,
        check_engine,
        find_decoder,
        kv_caches,
    )
    from headrace_engine.vllm.rotary_embedding import rope_of_model
    from headrace_prefill.blending.engine.paged import PagedKV
    from headrace_prefill.blending.engine.rows import RowEngine

    check_engine(worker.vllm_config, kv_cache_config)
    model = worker.get_model()
    decoder = find_decoder(model)
    fields = worker.vllm_config.model_config.hf_text_config.to_dict()
    rope = rope_of_model(fields, model, decoder.attention)
    caches, order, block_tokens = kv_caches(decoder, kv_cache_config)
    kv = PagedKV(caches, order, block_tokens)
    contexts = ForwardContexts(worker.vllm_config, kv_cache_config, decoder, kv.kernel_tokens)
    return RowEngine(decoder, kv, contexts, rope, engine_ranks())

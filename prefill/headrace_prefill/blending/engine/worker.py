"""The worker class that gives its connector the model, so that the connector can compute rows.

    worker_cls="headrace_prefill.blending.engine.worker.BlendingWorker"

A connector that needs the model has a method `bind_rows(RowEngine)`. It may lie within a
MultiConnector. Engines in which rows cannot be computed start as usual: the worker calls their
connector's `no_rows(reason)`, and vLLM computes their requests. The engine's frontend calls
`headrace_unsupported` before it offers reuse.
"""

from __future__ import annotations

import logging
from typing import Any

from headrace_engine.vllm.forward_pass import (
    ForwardContexts,
    check_engine,
    find_decoder,
    kv_caches,
)
from headrace_engine.vllm.rotary_embedding import rope_of_model
from headrace_engine.vllm.worker import PlatformWorker, worker_connectors
from headrace_prefill.blending.engine.paged import PagedKV
from headrace_prefill.blending.engine.rows import RowEngine

logger = logging.getLogger("headrace.blending")


class BlendingWorkerMixin:
    """Mixin for a worker class of vLLM, placed before it among the bases."""

    _reuse_unsupported: str | None = "the engine has no connector that reuses KV"

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Initialise the worker as vLLM does; then bind the connectors that need the model."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        for connector in (each for each in worker_connectors() if hasattr(each, "bind_rows")):
            try:
                connector.bind_rows(row_engine(self, kv_cache_config))
                self._reuse_unsupported = None
            except Exception as error:
                why = str(error) if isinstance(error, ValueError) else repr(error)
                logger.debug("rows cannot be computed", exc_info=True)
                self._reuse_unsupported = why
                connector.no_rows(why)

    def headrace_unsupported(self) -> dict[str, str]:
        """Return why this engine cannot do a technique, by the technique's name; techniques that it
        can do are left out."""
        found: dict[str, str] = getattr(super(), "headrace_unsupported", dict)()
        why = self._reuse_unsupported
        return found if why is None else found | {"blending": why}


class BlendingWorker(BlendingWorkerMixin, PlatformWorker):  # type: ignore[misc]
    """vLLM's worker for the platform, with the model within the connectors' reach."""


def row_engine(worker: Any, kv_cache_config: Any) -> RowEngine:
    """Return the `RowEngine` of a worker's model.

    Raises:
        Unsupported: they cannot be computed; the text says why.
        RopeError: its keys cannot be moved to other positions.
    """
    check_engine(worker.vllm_config, kv_cache_config)
    model = worker.get_model()
    decoder = find_decoder(model)
    fields = worker.vllm_config.model_config.hf_text_config.to_dict()
    rope = rope_of_model(fields, model, decoder.attention)
    caches, order, block_tokens = kv_caches(decoder, kv_cache_config)
    kv = PagedKV(caches, order, block_tokens)
    contexts = ForwardContexts(worker.vllm_config, kv_cache_config, decoder, kv.kernel_tokens)
    return RowEngine(decoder, kv, contexts, rope)

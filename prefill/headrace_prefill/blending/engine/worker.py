"""The worker class that gives its connector the model, so that the connector can compute rows.

    worker_cls="headrace_prefill.blending.engine.worker.ReusingWorker"

A connector that needs the model has a method `bind_rows(RowEngine)`. It may lie within a
MultiConnector. Engines in which rows cannot be computed start as usual: the worker calls their
connector's `no_rows(reason)`, and vLLM computes their requests. The engine's frontend calls
`headrace_unsupported` before it offers reuse.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from headrace_engine.rotary import rope_of_model
from headrace_prefill.blending.engine._vllm_compat import (
    Contexts,
    check_engine,
    decoder,
    paged_kv,
)
from headrace_prefill.blending.engine.rows import RowEngine

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


logger = logging.getLogger("headrace.reuse")


class ModelInReach:
    """Mixin for a worker class of vLLM, placed before it among the bases."""

    _reuse_unsupported: str | None = "the engine has no connector that reuses KV"

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Initialise the worker as vLLM does; then bind the connectors that need the model."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        for connector in (each for each in _connectors() if hasattr(each, "bind_rows")):
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
        return found if why is None else found | {"reuse": why}


class ReusingWorker(ModelInReach, PlatformWorker):  # type: ignore[misc]
    """vLLM's worker for the platform, with the model within the connectors' reach."""


def row_engine(worker: Any, kv_cache_config: Any) -> RowEngine:
    """Return the `RowEngine` of a worker's model.

    Raises:
        Unsupported: they cannot be computed; the text says why.
        RopeError: its keys cannot be moved to other positions.
    """
    check_engine(worker.vllm_config, kv_cache_config)
    model = worker.get_model()
    opened = decoder(model)
    fields = worker.vllm_config.model_config.hf_text_config.to_dict()
    rope = rope_of_model(fields, model, opened.attention)
    kv = paged_kv(opened, kv_cache_config)
    contexts = Contexts(worker.vllm_config, kv_cache_config, opened, kv.kernel_tokens)
    return RowEngine(opened, kv, contexts, rope)


def _connectors() -> list[Any]:
    """Return the worker's connector, or the connectors within it."""
    if not has_kv_transfer_group():
        return []
    group = get_kv_transfer_group()
    return list(getattr(group, "_connectors", [group]))

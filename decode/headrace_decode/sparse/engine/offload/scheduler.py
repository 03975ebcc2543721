"""Schedulers that offload requests: they say which, and tell the worker.

Offloaded is every request whose longest does not fit into the KV cache, exact ones too, and those
that `switch` says are served sooner so. A request that is offloaded stays so until it ends.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.replay.scheduler import TakingUp, TakingUpAsync
from headrace_decode.sparse.engine.offload.ledger import Ledger
from headrace_decode.sparse.engine.offload.manager import OffloadManager
from headrace_decode.sparse.engine.rows import share_of
from headrace_decode.sparse.engine.settings import SparseSettings, settings_of
from headrace_decode.sparse.offload.sizes import Footprint, footprint

OFFLOADED = "headrace_offloaded"
"""Attribute of a step's `SchedulerOutput`: the blocks of the working set, by request that is
admitted in it."""


class _Offloads:
    """Mixed into a scheduler of vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offloads = _manager_of(self)
        if self._offloads is None:
            return
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        settings = settings_of(config.additional_config)
        assert settings is not None
        cache: Any = self.kv_cache_config  # type: ignore[attr-defined]
        block_bytes = self._offloads.kv_cache_spec.page_size_bytes * len(
            cache.kv_cache_groups[0].layer_names
        )
        self._settings: SparseSettings = settings
        self._offloads.ledger = Ledger(settings.host_blocks(block_bytes))

    def add_request(self, request: Any) -> None:
        """As vLLM's. A request that is too long for the cache is planned to be offloaded."""
        manager = self._offloads
        if manager is not None:
            params = request.sampling_params
            share = share_of(None if params is None else params.extra_args)
            most = min(
                request.num_prompt_tokens + request.max_tokens,
                self.max_model_len,  # type: ignore[attr-defined]
            )
            usable = manager.block_pool.num_gpu_blocks - 1
            if most > usable * manager.block_size:
                needed = self._footprint(most, share)
                if needed.blocks > usable:
                    needed = self._footprint(most, None)
                manager.ledger.plan(request.request_id, needed)
        super().add_request(request)  # type: ignore[misc]

    def _footprint(self, most_tokens: int, share: float | None) -> Footprint:
        assert self._offloads is not None
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        limit = config.scheduler_config.long_prefill_token_threshold
        batch = config.scheduler_config.max_num_batched_tokens
        steps = config.max_in_flight_tokens // batch
        return footprint(
            most_tokens,
            share,
            self._settings.unit_tokens,
            self._offloads.block_size,
            steps * (min(limit, batch) if limit > 0 else batch),
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        manager = self._offloads
        if manager is not None:
            _tell(manager, output)
        return output


def _tell(manager: OffloadManager, output: Any) -> None:
    """Let the worker know which requests are newly offloaded in this step."""
    ledger, told = manager.ledger, {}
    for request_id in output.finished_req_ids:
        ledger.forget(request_id)
    for request_id in output.num_scheduled_tokens:
        if ledger.is_admitted(request_id):
            if not ledger.is_known(request_id):
                told[request_id] = manager.slots(request_id)
            ledger.worker_knows(request_id, len(manager.req_to_blocks[request_id]))
    setattr(output, OFFLOADED, told)


def _manager_of(scheduler: Any) -> OffloadManager | None:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return managers[0] if len(managers) == 1 and isinstance(managers[0], OffloadManager) else None


class OffloadingTakingUp(_Offloads, TakingUp):
    """Where a step waits for the one before."""


class OffloadingTakingUpAsync(_Offloads, TakingUpAsync):
    """Where steps are scheduled ahead."""

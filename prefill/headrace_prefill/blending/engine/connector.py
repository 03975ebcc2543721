"""A connector that loads a prompt's KV from stored runs, which selective recompute corrects.

vLLM sees an asynchronous load of all tokens but the last. During the load the request waits with
its blocks, other requests run, and each engine step ends with a bounded part of selective
recompute. After it, vLLM computes the last token, and the request continues like any other.

A subclass finds the runs (`find`, in the scheduler's process) and knows where they lie (`planned`,
in the worker's). The resulting KV is approximate. Therefore, when the load has succeeded, the
blocks from the first approximate one on become private (`headrace_engine.vllm.private_blocks`):
their hashes are random, and no other request finds them. An engine that pulls such KV is told so
(`handoff.BLENDED_KEY`), and keeps all of it private. After a failed load, the request is served as
if it had not asked: vLLM computes it with prefix cache and store, and both may keep its KV.

The connector serves a request once. After a preemption, or if stored KV was lost, vLLM computes the
request. On abort, vLLM holds the blocks until the worker reports the load as ended, which it does
in the same step.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from headrace_engine.kv_transfer.handoff import BLENDED_KEY
from headrace_engine.vllm.private_blocks import keep_private
from headrace_prefill.blending.engine.kv_scatter import KvScatter, StoredRun
from headrace_prefill.blending.engine.paged import BlockTable
from headrace_prefill.blending.engine.rows import RowEngine
from headrace_prefill.blending.engine.selective_recompute import (
    ChooseDepths,
    RecomputeRequest,
    SelectiveRecompute,
)
from headrace_prefill.blending.engine.stats import BlendingPromMetrics, BlendingStats

logger = logging.getLogger("headrace.blending")

MIN_ROWS = 32
"""Minimum row budget of selective recompute in a step, however many tokens the step's requests
have."""


@dataclass(frozen=True)
class LoadStart:
    """A request whose load begins.

    Attributes:
        request_id: vLLM's.
        token_ids: its tokens without the last one.
        final: its last token.
        blocks: its block ids.
        start: number of its leading tokens that have KV already.
        found: the result of `find`.
    """

    request_id: str
    token_ids: list[int]
    final: int
    blocks: list[int]
    start: int
    found: Any


@dataclass
class BlendingMetadata(KVConnectorMetadata):
    """Message from the scheduler side to the worker side: new loads, and the step's row budget."""

    begin: list[LoadStart] = field(default_factory=list)
    budget_rows: int = 0


@dataclass(frozen=True)
class RecomputePlan:
    """Selective recompute's work for a request; attributes as in `RecomputeRequest`."""

    runs: Sequence[StoredRun]
    choose: ChooseDepths
    last: int | None = None


class BlendingConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector's scheduler side and worker side. It serves no request of an engine with
    several KV cache groups."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError('kv_transfer_config.kv_load_failure_policy: give "recompute"')
        self._step_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self._block_tokens = vllm_config.cache_config.block_size
        self._is_first_rank = vllm_config.parallel_config.rank == 0
        self._has_one_group = len(kv_cache_config.kv_cache_groups) == 1
        self._found: dict[str, Any] = {}
        self._served: set[str] = set()
        self._sources: dict[str, int] = {}
        self._loading: dict[str, tuple[Any, int, frozenset[int]]] = {}
        """request id -> (vLLM's request, index of its first approximate block, ids of the blocks
        that are loaded)."""
        self._blended: set[str] = set()
        self._begin: list[LoadStart] = []
        self._rows: RowEngine | None = None
        self._pass: SelectiveRecompute | None = None
        self._blocks: dict[str, list[int]] = {}
        self._unused: list[str] = []
        self._failed: set[int] = set()
        self._recompute_s = 0.0

    # Subclass interface

    @abstractmethod
    def find(self, request: Any, computed_tokens: int) -> Any:
        """Return the stored KV to reuse for a request after its computed tokens; None for nothing.

        The result must be picklable, and the same for the same arguments: the scheduler side calls
        this until the request gets its blocks."""

    def exact_tokens(self, found: Any) -> int:
        """Return how many of a prompt's first tokens get exact KV."""
        return 0

    @abstractmethod
    def planned(self, begin: LoadStart) -> RecomputePlan:
        """Return where the found runs lie in this worker, and which rows are computed."""

    @abstractmethod
    def scatter(self, rows: RowEngine) -> KvScatter:
        """Return the object that copies runs to this engine's cache."""

    # Scheduler side

    def on_new_request(self, request: Any) -> None:
        if (request.kv_transfer_params or {}).get(BLENDED_KEY):
            keep_private(request, 0)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        name, rest = request.request_id, request.num_tokens - 1 - num_computed_tokens
        self._found.pop(name, None)
        if name in self._served or rest <= 0 or not self._has_one_group:
            return 0, False
        found = self.find(request, num_computed_tokens)
        if found is None:
            return 0, False
        self._found[name] = found
        return rest, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        found = self._found.pop(request.request_id, None)
        if found is None or not num_external_tokens:
            return
        *tokens, final = request.all_token_ids
        start = len(tokens) - num_external_tokens
        [table] = blocks.get_block_ids()
        self._served.add(request.request_id)
        self._sources[request.request_id] = num_external_tokens
        first = max(start, self.exact_tokens(found)) // self._block_tokens
        load = frozenset(table[start // self._block_tokens :])
        self._loading[request.request_id] = request, first, load
        self._begin.append(LoadStart(request.request_id, tokens, final, list(table), start, found))

    def kv_sources(self, request_id: str) -> Mapping[str, int]:
        """Implement `headrace_engine.usage.scheduler_usage.KvSources`."""
        tokens = self._sources.get(request_id)
        return {} if tokens is None else {"blended": tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        begin, self._begin = self._begin, []
        room = self._step_rows - scheduler_output.total_num_scheduled_tokens
        return BlendingMetadata(begin, max(MIN_ROWS, room))

    def update_connector_output(self, connector_output: Any) -> None:
        invalid = connector_output.invalid_block_ids or set()
        for name in self._loading.keys() & (connector_output.finished_recving or set()):
            request, first, blocks = self._loading.pop(name)
            if invalid.isdisjoint(blocks):
                keep_private(request, first)
                self._blended.add(name)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        name, transfer = request.request_id, request.kv_transfer_params or {}
        blended = name in self._blended
        self._found.pop(name, None)
        self._loading.pop(name, None)
        self._served.discard(name)
        self._sources.pop(name, None)
        self._blended.discard(name)
        return False, {BLENDED_KEY: True} if blended and transfer.get("do_remote_decode") else None

    # Worker side

    def bind_rows(self, rows: RowEngine) -> None:
        """Take the model, once it is loaded; `worker.BlendingWorkerPart` calls this."""
        self._rows, self._pass = rows, SelectiveRecompute(rows, self.scatter(rows))

    def no_rows(self, reason: str) -> None:
        """Compute no rows, and log why. vLLM then computes the requests itself."""
        self._rows = self._pass = None
        logger.warning("nothing is reused in this engine: %s", reason)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, BlendingMetadata)
        for begin in meta.begin:
            self._blocks[begin.request_id] = begin.blocks[begin.start // self._block_tokens :]
            if self._pass is None:
                self._unused.append(begin.request_id)
            else:
                self._pass.start(begin.request_id, partial(self._request, begin))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        meta = self._get_connector_metadata()
        assert isinstance(meta, BlendingMetadata)
        ended: set[str] = set()
        if self._pass is not None:
            ended.update(name for name in finished_req_ids if self._pass.cancel(name))
            if len(self._pass):
                began_s = time.perf_counter()
                stepped = self._pass.step(meta.budget_rows)
                self._recompute_s += time.perf_counter() - began_s
                ended.update(stepped.finished)
                self._unused += stepped.failed
        for name in self._unused:
            self._failed.update(self._blocks[name])
            ended.add(name)
        self._unused = []
        for name in ended:
            del self._blocks[name]
        return None, ended or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        recompute_s, self._recompute_s = self._recompute_s, 0.0
        # vLLM adds up the ranks' statistics, but ranks recompute at the same time.
        counts = recompute_s and self._is_first_rank
        return BlendingStats({"recompute_s": recompute_s}) if counts else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return BlendingStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics | None:
        return BlendingPromMetrics(*args)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests that are being filled are in no step."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: corrected KV is valid for its own prompt only and is not saved."""

    def wait_for_save(self) -> None:
        """Do nothing: no KV is saved."""

    def _request(self, begin: LoadStart) -> RecomputeRequest:
        planned = self.planned(begin)
        return RecomputeRequest(
            begin.request_id,
            np.asarray(begin.token_ids, np.int64),
            BlockTable(np.asarray(begin.blocks, np.int64), self._block_tokens),
            begin.start,
            planned.runs,
            planned.choose,
            planned.last,
            begin.final,
        )

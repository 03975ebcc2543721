"""The two halves of vLLM's pull connector: hand-outs are recorded, pulls are proved.

The scheduler's half decides, and the worker's half reads and writes memory. The decisions of a step
travel with vLLM's own metadata of the step (`StepWork`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from headrace_engine.exchange import pieces
from headrace_engine.handoff import CHECK_KEY
from headrace_engine.kvkind import kv_heads
from headrace_engine.pull_events import PROVED, UNPROVED
from headrace_engine.pull_proof.block_ids import by_group, has_blocks
from headrace_engine.pull_proof.content import BlockSums, block_seeds
from headrace_engine.pull_proof.identity import (
    ID_BYTES,
    PARAMS_KEY,
    Claim,
    Identity,
    Unproved,
    read_claim,
)
from headrace_engine.pull_proof.prompt_digests import PromptDigests
from headrace_engine.pull_proof.proving import ProvingAgent, Pull
from headrace_engine.pull_proof.records import Geometry, Grants, RecordTable
from headrace_engine.pull_proof.settings import IntegritySettings, Sampling
from headrace_engine.pull_proof.stats import TransferStats
from headrace_kvstore.device.placing import place_worker
from headrace_kvstore.layout import LayoutError
from headrace_kvstore.protocol.address import host_port

logger = logging.getLogger("headrace.engine")

LISTEN_AGAIN_S = 0.1
"""Pause after a message that cannot be read. It limits a flood of them to ten a second."""


@dataclass
class ProvenPayload(NixlHandshakePayload):
    """A worker's answer to handshakes; `records_at` is the address of its table of records, which
    its own scheduler puts into references."""

    records_at: int = 0


@dataclass
class ToSum:
    """A prompt whose KV this step completes."""

    row: int
    identity: Identity
    blocks: list[int]


@dataclass
class StepWork:
    """Work of one step that the scheduler's half gives to the worker's half."""

    ended: list[str] = field(default_factory=list)
    """Requests that will hand out no blocks."""
    begun: list[tuple[str, int, bytes]] = field(default_factory=list)
    """Requests that will hand out blocks: id, row, record."""
    sums: list[ToSum] = field(default_factory=list)
    claims: dict[str, Claim | Unproved] = field(default_factory=dict)
    """By id of a request that pulls: the claim to prove, or why the request must not pull."""


@dataclass
class _Summed:
    """A checked request, until its prompt is computed."""

    request: Any
    row: int
    identity: Identity
    blocks: list[int] = field(default_factory=list)


def geometry_of(vllm_config: VllmConfig) -> Geometry:
    """Return the geometry of an engine's table; it is the same in both halves."""
    longest, block = vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size
    return Geometry.of(longest, block)


def settings_of(vllm_config: VllmConfig) -> IntegritySettings:
    """Return an engine's settings. Raises ValueError if they cannot be used."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return IntegritySettings.parse(transfer.kv_connector_extra_config)


class ProvenScheduler(NixlPullConnectorScheduler):
    """The scheduler's half: gives hand-outs their identity, and pulls the claims to prove."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        settings, groups = settings_of(vllm_config), len(kv_cache_config.transfer_groups)
        if settings.check == "all" and groups != 1:
            raise ValueError("integrity.check: all needs a model with one kind of attention")
        self._pulls = groups == 1
        """Whether this engine pulls. For a model with several groups, vLLM 0.29 cannot recompute KV
        that failed to arrive."""
        self.digests = PromptDigests(vllm_config)
        self._pulls = self._pulls and self.digests.is_known
        self._grants = Grants(
            geometry_of(vllm_config).rows,
            secrets.token_bytes(ID_BYTES),
            Sampling(settings, possible=groups == 1),
        )
        self._places: dict[tuple[int, int], int] = {}
        self._row_bytes = geometry_of(vllm_config).row_bytes
        self._work = StepWork()
        self._to_sum: dict[str, _Summed] = {}
        self._computing: set[str] = set()
        """Requests that will hand out KV and have not ended."""

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self._places = {rank: payload.records_at for rank, payload in metadata.items()}
        self._listen_error: Exception | None = None
        super().set_xfer_handshake_metadata(metadata)
        if self._listen_error is not None:
            where = host_port(self.side_channel_host, self.side_channel_port)
            raise RuntimeError(
                f"NIXL's handshakes cannot be answered at {where} ({self._listen_error}); set "
                "VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this machine and "
                "VLLM_NIXL_SIDE_CHANNEL_PORT to a port that is free there"
            ) from self._listen_error

    def _nixl_handshake_listener(  # type: ignore[override]  # vLLM's is static
        self, encoded_data: Any, ready_event: Event, stop_event: Event, host: str, port: int
    ) -> None:
        """Answer handshakes, in a thread. vLLM waits for `ready_event` without a limit, and one
        message that cannot be read ends its listener."""
        listen = NixlPullConnectorScheduler._nixl_handshake_listener
        while not stop_event.is_set():
            try:
                listen(encoded_data, ready_event, stop_event, host, port)
            except Exception as error:
                if not ready_event.is_set():
                    self._listen_error = error
                    ready_event.set()
                    return
                logger.warning("a message to NIXL's handshakes at port %d: %r", port, error)
                stop_event.wait(LISTEN_AGAIN_S)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        params = request.kv_transfer_params
        if not self._pulls and params is not None and params.get("do_remote_prefill"):
            return 0, False  # vLLM then tells the producer that there is no pull
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and num_external_tokens > 0:
            self._work.claims[request.request_id] = self._claim(request, params)
        if params.get("do_remote_decode"):
            self._begin(request, params)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _begin(self, request: Any, params: dict[str, Any]) -> None:
        request_id, ids = request.request_id, request.prompt_token_ids or []
        digest = self.digests.of(request, ids)
        if digest is not None and self._grants.held(request_id) is None:
            demanded = bool(params.get(CHECK_KEY))
            grant = self._grants.begin(request_id, digest, len(ids), demanded)
            if grant is None:
                logger.warning("more hand-outs are out than have records; one will not be pulled")
                return
            row, identity = grant
            self._computing.add(request_id)
            self._work.begun.append((request_id, row, identity.record()))
            if identity.checked:
                self._to_sum[request_id] = _Summed(request, row, identity)

    def _claim(self, request: Any, params: dict[str, Any]) -> Claim | Unproved:
        try:
            claim = read_claim(params)
            tokens = claim.identity.tokens
            if not 0 < tokens <= len(request.prompt_token_ids or ()):
                raise Unproved("reference", "the reference is of a longer prompt")
            digest = self.digests.of(request, request.prompt_token_ids[:tokens])
            if digest is None:
                raise Unproved("unknown", "it is not known what this request's KV depends on")
            return claim.own(digest, by_group(params["remote_block_ids"]))
        except Unproved as error:
            return error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            return Unproved("unknown", f"the reference cannot be read ({error})")

    def reset(self) -> bool:
        """Stop proving KV that was computed so far: the weights may have changed.

        KV that was handed out before keeps its proof. A prompt that is being computed hands out
        nothing unless it is computed again from its start.
        """
        self.digests.renew()
        for request_id in self._computing:
            self._end(request_id)
        self._computing.clear()
        return True

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._follow_prompts(scheduler_output)
        metadata = super().build_connector_meta(scheduler_output)
        metadata.integrity, self._work = self._work, StepWork()
        return metadata

    def _follow_prompts(self, scheduler_output: Any) -> None:
        """Collect the blocks of checked prompts, and have a computed prompt's fingerprints made."""
        if not self._to_sum:
            return
        for request_id, groups, resumed in yield_req_data(scheduler_output):
            summed = self._to_sum.get(request_id)
            if summed is None:
                continue
            if resumed:
                summed.blocks.clear()
            if groups is not None:
                summed.blocks.extend(groups[0])
            request = summed.request
            computed = request.num_computed_tokens
            computed += scheduler_output.num_scheduled_tokens[request_id]
            if computed >= request.num_prompt_tokens:
                self._work.sums.append(ToSum(summed.row, summed.identity, list(summed.blocks)))
                del self._to_sum[request_id]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._computing.discard(request.request_id)
        held, params = super().request_finished(request, block_ids)
        grant = self._grants.held(request.request_id)
        if grant is None:
            return held, params
        if not held or params is None:
            self._end(request.request_id)
            return held, params
        row, identity = grant
        places = {rank: at + row * self._row_bytes for rank, at in self._places.items()}
        proof = identity.proof(by_group(params["remote_block_ids"]))
        return held, {**params, PARAMS_KEY: Claim(identity, places, proof).params()}

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_sending or ():
            self._grants.end(request_id)  # the workers have erased its record
            self._to_sum.pop(request_id, None)

    def shutdown(self) -> None:
        super().shutdown()
        self.digests.close()

    def _end(self, request_id: str) -> None:
        self._grants.end(request_id)
        self._to_sum.pop(request_id, None)
        self._work.ended.append(request_id)


class ProvenWorker(NixlPullConnectorWorker):
    """The worker's half: keeps the records that pullers read, and reads those of producers."""

    nixl_wrapper: Any
    xfer_handshake_metadata: Any
    _layer_specs: Any

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: Any) -> None:
        if vllm_config.device_config.device_type == "cuda":  # before NIXL chooses its devices
            place_worker(torch.cuda.current_device())
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = TransferStats()
        self._settings, self._geometry = settings_of(vllm_config), geometry_of(vllm_config)
        self._sums: BlockSums | None = None
        self._rows: dict[str, int] = {}
        self._sum_next: list[ToSum] = []
        self._claims: dict[str, Claim | Unproved] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._table = RecordTable(self._geometry)
        # Before vLLM asks the agent for the description of its memory that other engines need.
        table = [(self._table.address, self._geometry.nbytes, 0, "")]
        registered = self.nixl_wrapper.register_memory(table, mem_type="DRAM")
        self._agent = ProvingAgent(
            self.nixl_wrapper,
            self._geometry.row_bytes,
            self,
            self._settings.proof_timeout_s,
            demand=self._settings.check == "all",
        )
        self.nixl_wrapper = self._agent
        super().register_kv_caches(kv_caches)
        self._registered_descs.extend((registered, self._agent.registered))
        payload = self.xfer_handshake_metadata
        assert payload is not None
        self.xfer_handshake_metadata = ProvenPayload(
            payload.compatibility_hash, payload.agent_metadata_bytes, self._table.address
        )
        try:
            caches = self.host_xfer_buffers or kv_caches
            # Layers that read another layer's cache have no specification, and are not transferred.
            caches = {name: cache for name, cache in caches.items() if name in self._layer_specs}
            self._sums = BlockSums(caches, self._logical_num_blocks)
        except (AttributeError, LayoutError) as error:  # some models' caches are no tensors
            if self._settings.check == "all":
                raise ValueError(f"integrity.check: all is not possible here: {error}") from error
            logger.warning("transferred KV is not checked byte for byte: %s", error)

    # As a producer

    def start_load_kv(self, metadata: Any) -> None:
        work = getattr(metadata, "integrity", None)
        if work is not None:
            for request_id in work.ended:
                self._erase(request_id)
            for request_id, row, record in work.begun:
                self._rows[request_id] = row
                self._table.write(row, record)
            self._sum_next.extend(work.sums)
            self._claims.update(work.claims)
        super().start_load_kv(metadata)

    def get_finished(self) -> tuple[set[str], set[str]]:
        for each in self._sum_next:
            self._sum(each)
        self._sum_next.clear()
        self._agent.new_step()
        self._give_up_hanging()
        done_sending, done_recving = super().get_finished()
        for request_id in done_sending:
            self._erase(request_id)  # its blocks are freed when the scheduler hears of it
        for request_id in done_recving:
            self._claims.pop(request_id, None)
        return done_sending, done_recving

    def _give_up_hanging(self) -> None:
        """Disconnect from producers whose bytes do not arrive.

        NIXL then ends their transfers as failed, and no byte of them arrives any more, so their
        blocks can be computed. The next pull shakes hands again.
        """
        for engine in self._agent.hanging(self._settings.pull_timeout_s):
            logger.warning("no KV comes from engine %s: its connection is given up", engine)
            with self._handshake_lock:
                if engine in self._remote_agents:
                    self._cleanup_remote_engine(engine)

    def _erase(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._table.erase(row)

    def _sum(self, each: ToSum) -> None:
        """Start to make the fingerprints of a prompt whose KV is computed."""
        if self._sums is None:
            self._table.put_sums(each.row, each.identity.generation, None)
            return
        blocks = each.blocks[: self._geometry.sums]
        made = self._sums.start(blocks, block_seeds(each.identity, range(len(blocks))))

        def publish(done: Future[Any]) -> None:
            sums = None if done.cancelled() or done.exception() else done.result()
            self._table.put_sums(each.row, each.identity.generation, sums)

        made.add_done_callback(publish)

    # As a puller

    def start(self, blocks: Sequence[int], positions: Sequence[int], claim: Claim) -> Future[Any]:
        """Start to make fingerprints of blocks that arrived (`proving.Sums`)."""
        assert self._sums is not None
        return self._sums.start(blocks, block_seeds(claim.identity, positions))

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        reads = has_blocks(meta)
        try:
            if reads:
                self._may_pull(req_id, meta)
            super()._read_blocks_for_req(req_id, meta)
            if not reads:
                self._recving_metadata.pop(req_id, None)  # no transfer will end it
        except Unproved as why:
            self._refuse(req_id, why)
        except Exception as error:
            logger.exception("a pull could not begin", extra={"request_id": req_id})
            self._refuse(req_id, Unproved("unreachable", f"the pull could not begin: {error!r}"))

    def _may_pull(self, req_id: str, meta: Any) -> None:
        """Refuse a reference that cannot be right, before anything is read."""
        claim = self._claims.get(req_id, Unproved("unknown", "the reference has no identity"))
        if isinstance(claim, Unproved):
            raise claim
        remote = meta.remote
        engine = self.transfer_topo.get_engine_info(remote.engine_id)
        known = self.dst_num_blocks[remote.engine_id] // engine.remote_physical_blocks_per_logical
        theirs = by_group(remote.block_ids)
        if len(theirs) != len(meta.local_block_ids):
            raise Unproved("range", "the reference has another number of block groups")
        for rank in self.tp_mappings[remote.engine_id].all_source_ranks:
            if (0, rank) not in claim.places:
                raise Unproved("unknown", f"the reference has no record of rank {rank}")
        ratio = self.transfer_topo.block_size_ratio(engine.remote_block_size)
        for ours, group in zip(meta.local_block_ids, theirs, strict=True):
            if any(not 0 <= block < known for block in group):
                raise Unproved("range", f"the reference names blocks beyond the producer's {known}")
            if ratio == 1 and len(ours) > len(group):
                raise Unproved("range", f"{len(group)} blocks offered where {len(ours)} are due")

    def _read_blocks(self, *, read_spec: Any, request_id: str, **more: Any) -> None:
        meta, claim = self._recving_metadata[request_id], self._claims.get(request_id)
        rank = (0, read_spec.remote_rank)
        if not isinstance(claim, Claim) or not any(len(g) for g in read_spec.local_block_ids):
            super()._read_blocks(read_spec=read_spec, request_id=request_id, **more)
            return
        agent = self._remote_agents[meta.remote.engine_id][rank]
        blocks, positions = self._comparable(meta)
        engine = meta.remote.engine_id
        ranks = self.transfer_topo.get_engine_info(engine).remote_tp_size, self.world_size
        cut = pieces(*ranks, kv_heads(self.vllm_config))
        pull = Pull(request_id, engine, agent, claim.places[rank], claim, blocks, positions, cut)
        with self._agent.pulling(pull):
            super()._read_blocks(read_spec=read_spec, request_id=request_id, **more)

    def _comparable(self, meta: Any) -> tuple[list[int], range]:
        """Return blocks of this engine and their positions in the prompt; none where the two
        engines cut KV into blocks or ranks in different ways."""
        engine = self.transfer_topo.get_engine_info(meta.remote.engine_id)
        same = (
            self._sums is not None
            and len(meta.local_block_ids) == 1
            and engine.remote_tp_size == self.world_size
            and self.transfer_topo.block_size_ratio(engine.remote_block_size) == 1
            and engine.remote_physical_blocks_per_logical
            == self._physical_blocks_per_logical_kv_block
            and not (self.dcp_size > 1 or engine.remote_dcp_size > 1)
        )
        if not same:
            return [], range(0)
        ours = list(meta.local_block_ids[0])
        known = self._blocks_of(meta)
        return ours, range(known - len(ours), known)

    def _blocks_of(self, meta: Any) -> int:
        """Return how many blocks, of the scheduler's size, the prompt has at the producer."""
        kernel_blocks = len(by_group(meta.remote.block_ids)[0])
        return kernel_blocks // self._physical_blocks_per_logical_kv_block

    def _refuse(self, req_id: str, why: Unproved) -> None:
        self._agent.outcomes.failed[req_id] = why
        self._handle_failed_transfer(req_id, None)

    def _handle_failed_transfer(self, req_id: str, handle: Any) -> None:
        """Extend vLLM's method to models with sliding windows and requests without a transfer."""
        meta = self._recving_metadata.get(req_id)
        if meta is not None and not has_blocks(meta):
            # All its KV is here, and it runs already. Only the producer is not notified.
            self._recving_metadata.pop(req_id, None)
            self._agent.outcomes.failed.pop(req_id, None)
            return
        if meta is not None and self._is_hma_required:
            self._invalid_block_ids.put({block for g in meta.local_block_ids for block in g})
        if meta is not None and meta.remote is not None:
            why = self._agent.outcomes.failed.pop(
                req_id, Unproved("unreachable", "the handshake or the transfer failed")
            )
            told = [req_id, meta.remote.engine_id, why.kind, str(why)]
            self.xfer_stats.data[UNPROVED].append(told)
        super()._handle_failed_transfer(req_id, handle)

    def get_kv_connector_stats(self) -> Any:
        if hasattr(self, "_agent"):
            proved = self._agent.take_proved()
            self.xfer_stats.data[PROVED].extend([s, checked] for s, checked in proved)
        return super().get_kv_connector_stats()

    def shutdown(self) -> None:
        super().shutdown()
        if getattr(self, "_sums", None) is not None:
            assert self._sums is not None
            self._sums.close()

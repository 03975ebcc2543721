"""The worker's side of the pull connector: keeps the records of hand-outs, and proves pulls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from vllm.config import VllmConfig

from headrace_engine.kv_transfer.compatibility import pieces
from headrace_engine.kv_transfer.kv_kind import kv_heads
from headrace_engine.pull_events import PROVED, UNPROVED
from headrace_engine.pull_proof.block_ids import by_group, has_blocks, without_unneeded
from headrace_engine.pull_proof.content import BlockSums, block_seeds
from headrace_engine.pull_proof.identity import Claim, Unproved
from headrace_engine.pull_proof.proving_agent import ProvingAgent, Pull
from headrace_engine.pull_proof.records import RecordTable
from headrace_engine.pull_proof.stats import TransferStats
from headrace_engine.pull_proof.step_work import ProvenPayload, ToSum, geometry_of, settings_of
from headrace_engine.vllm.connectors import KVConnectorTransferResults, NixlPullConnectorWorker
from headrace_kvstore.blocks.block_layout import LayoutError

logger = logging.getLogger("headrace.engine")


class ProvenWorker(NixlPullConnectorWorker):
    """The worker's side: keeps the records that pullers read, and reads those of producers."""

    nixl_wrapper: Any
    xfer_handshake_metadata: Any
    _layer_specs: Any

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = TransferStats()
        self._settings, self._geometry = settings_of(vllm_config), geometry_of(vllm_config)
        self._sums: BlockSums | None = None
        self._rows: dict[str, int] = {}
        self._sum_next: list[ToSum] = []
        self.claims: dict[str, Claim | Unproved] = {}

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
            self.claims.update(work.claims)
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        for each in self._sum_next:
            self._sum(each)
        self._sum_next.clear()
        self._agent.new_step()
        self._give_up_hanging()
        results = super().get_transfer_results()
        for request_id in results.finished_sending:
            self._erase(request_id)  # its blocks are freed when the scheduler hears of it
        for request_id in results.finished_recving:
            self.claims.pop(request_id, None)
        return results

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
        """Start to make fingerprints of blocks that arrived (`proving_agent.Sums`)."""
        assert self._sums is not None
        return self._sums.start(blocks, block_seeds(claim.identity, positions))

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        try:
            if has_blocks(meta) and meta.remote.engine_id in self._remote_agents:
                self.check_pull(req_id, meta)
            super()._read_blocks_for_req(req_id, meta)  # shakes hands first with a new producer
        except Unproved as why:
            self._refuse(req_id, why)
        except Exception as error:
            logger.exception("a pull could not begin", extra={"request_id": req_id})
            self._refuse(req_id, Unproved("unreachable", f"the pull could not begin: {error!r}"))

    def check_pull(self, req_id: str, meta: Any) -> None:
        """Refuse a reference that cannot be right, before anything is read."""
        claim = self.claims.get(req_id, Unproved("unknown", "the reference has no identity"))
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

    def _read_blocks(self, *, read_spec: Any, request_id: str, **more: Any) -> bool:
        claim, rank = self.claims.get(request_id), (0, read_spec.remote_rank)
        if not isinstance(claim, Claim) or not any(len(g) for g in read_spec.local_block_ids):
            posted: bool = super()._read_blocks(read_spec=read_spec, request_id=request_id, **more)
            return posted
        read_spec = without_unneeded(read_spec)
        meta = self._recving_metadata[request_id]
        agent = self._remote_agents[meta.remote.engine_id][rank]
        blocks, positions = self._comparable(meta, claim)
        engine = meta.remote.engine_id
        ranks = self.transfer_topo.get_engine_info(engine).remote_tp_size, self.world_size
        cut = pieces(*ranks, kv_heads(self.vllm_config))
        pull = Pull(request_id, engine, agent, claim.places[rank], claim, blocks, positions, cut)
        with self._agent.pulling(pull):
            posted = super()._read_blocks(read_spec=read_spec, request_id=request_id, **more)
        return posted

    def _comparable(self, meta: Any, claim: Claim) -> tuple[list[int], range]:
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
        known = self._blocks_of(meta, claim)
        return ours, range(known - len(ours), known)

    def _blocks_of(self, meta: Any, claim: Claim) -> int:
        """Return how many blocks, of the scheduler's size, the prompt has at the producer.

        Of layers with sliding windows the reference has only the last blocks. Otherwise it may have
        more blocks than the prompt's tokens fill.
        """
        kernel_blocks = len(by_group(meta.remote.block_ids)[0])
        offered = kernel_blocks // self._physical_blocks_per_logical_kv_block
        block_tokens = self.vllm_config.cache_config.block_size
        return max(offered, -(-claim.identity.tokens // block_tokens))

    def _refuse(self, req_id: str, why: Unproved) -> None:
        self._agent.outcomes.failed[req_id] = why
        self._handle_failed_transfer(req_id, None, self._recv_failures)

    def _handle_failed_transfer(
        self, req_id: str, handle: Any, failed_req_ids: set[str] | None = None, **more: Any
    ) -> bool:
        """Count a failed request once, however many transfers it had."""
        meta = self._recving_metadata.get(req_id)
        why = self._agent.outcomes.failed.pop(
            req_id, Unproved("unreachable", "the handshake or the transfer failed")
        )
        counted = req_id in self._recv_failures or req_id in (failed_req_ids or ())
        if meta is not None and not counted:
            told = [req_id, meta.remote.engine_id, why.kind, str(why)]
            self.xfer_stats.data[UNPROVED].append(told)
        released: bool = super()._handle_failed_transfer(req_id, handle, failed_req_ids, **more)
        return released

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

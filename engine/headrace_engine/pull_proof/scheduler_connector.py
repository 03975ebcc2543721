"""The scheduler's side of the pull connector: gives hand-outs an identity, and pulls the claims to
prove."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from vllm.config import VllmConfig

from headrace_engine.kv_transfer.handoff import CHECK_KEY
from headrace_engine.pull_proof.block_ids import by_group
from headrace_engine.pull_proof.identity import (
    ID_BYTES,
    PARAMS_KEY,
    Claim,
    Identity,
    Unproved,
    read_claim,
)
from headrace_engine.pull_proof.prompt_digests import PromptDigests
from headrace_engine.pull_proof.records import Grants
from headrace_engine.pull_proof.settings import Sampling
from headrace_engine.pull_proof.step_work import StepWork, ToSum, geometry_of, settings_of
from headrace_engine.vllm.connectors import NixlPullConnectorScheduler, yield_req_data
from headrace_kvstore.protocol.address import host_port

logger = logging.getLogger("headrace.engine")

LISTEN_AGAIN_S = 0.1
"""Pause after a message that cannot be read. It limits a flood of them to ten a second."""


@dataclass
class _Summed:
    """A checked request, until its prompt is computed."""

    request: Any
    row: int
    identity: Identity
    blocks: list[int] = field(default_factory=list)


class ProvenScheduler(NixlPullConnectorScheduler):
    """The scheduler's side: gives hand-outs their identity, and pulls the claims to prove."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        settings, groups = settings_of(vllm_config), len(kv_cache_config.transfer_groups)
        if settings.check == "all" and groups != 1:
            raise ValueError("integrity.check: all needs a model with one kind of attention")
        self.digests = PromptDigests(vllm_config)
        self._pulls = self.digests.is_known
        self.grants = Grants(
            geometry_of(vllm_config).rows,
            secrets.token_bytes(ID_BYTES),
            Sampling(settings, possible=groups == 1),
        )
        self.places: dict[tuple[int, int], int] = {}
        self._row_bytes = geometry_of(vllm_config).row_bytes
        self._work = StepWork()
        self.to_sum: dict[str, _Summed] = {}
        self.pulled: dict[str, int] = {}
        """By request: the tokens that it pulls or has pulled, until it ends."""
        self._computing: set[str] = set()
        """Requests that will hand out KV and have not ended."""

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self.places = {rank: payload.records_at for rank, payload in metadata.items()}
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

    def _prefill_backoff(self) -> int:
        """Return how many tokens at the end of a prompt the producer leaves to the puller.

        The puller computes the prompt's last token in any case. Layers with windows or chunks need
        other blocks for it than for the token after the prompt, and vLLM frees all blocks that the
        tokens after those computed do not need. So the producer stops before the last token.
        """
        return max(super()._prefill_backoff(), int(self._is_hma_required))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and num_external_tokens > 0:
            self._work.claims[request.request_id] = self._claim(request, params)
            self.pulled[request.request_id] = num_external_tokens
        if params.get("do_remote_decode"):
            self._begin(request, params)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _begin(self, request: Any, params: dict[str, Any]) -> None:
        request_id, ids = request.request_id, request.prompt_token_ids or []
        digest = self.digests.of(request, ids)
        if digest is not None and self.grants.held(request_id) is None:
            demanded = bool(params.get(CHECK_KEY))
            grant = self.grants.begin(request_id, digest, len(ids), demanded)
            if grant is None:
                logger.warning("more hand-outs are out than have records; one will not be pulled")
                return
            row, identity = grant
            self._computing.add(request_id)
            self._work.begun.append((request_id, row, identity.record()))
            if identity.checked:
                self.to_sum[request_id] = _Summed(request, row, identity)

    def _claim(self, request: Any, params: dict[str, Any]) -> Claim | Unproved:
        try:
            claim = read_claim(params)
            tokens = claim.identity.tokens
            prompt_tokens = len(request.prompt_token_ids or ())
            if not 0 < tokens <= prompt_tokens:
                raise Unproved("reference", "the reference is of a longer prompt")
            due = self._get_remote_prefill_token_count(prompt_tokens)
            if -(-tokens // self.block_size) != -(-due // self.block_size):  # vLLM pairs the last
                raise Unproved("reference", f"the reference is of {tokens} tokens, not of {due}")
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
        if not self.to_sum:
            return
        for request_id, groups, resumed in yield_req_data(scheduler_output):
            summed = self.to_sum.get(request_id)
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
                del self.to_sum[request_id]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._computing.discard(request.request_id)
        self.pulled.pop(request.request_id, None)
        held, params = super().request_finished(request, block_ids)
        grant = self.grants.held(request.request_id)
        if grant is None:
            return held, params
        if not held or params is None:
            self._end(request.request_id)
            return held, params
        row, identity = grant
        places = {rank: at + row * self._row_bytes for rank, at in self.places.items()}
        proof = identity.proof(by_group(params["remote_block_ids"]))
        return held, {**params, PARAMS_KEY: Claim(identity, places, proof).params()}

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_sending or ():
            self.grants.end(request_id)  # the workers have erased its record
            self.to_sum.pop(request_id, None)

    def shutdown(self) -> None:
        super().shutdown()
        self.digests.close()

    def _end(self, request_id: str) -> None:
        self.grants.end(request_id)
        self.to_sum.pop(request_id, None)
        self._work.ended.append(request_id)

"""The messages from the scheduler's side of the pull connector to the worker's side.

The scheduler's side decides, and the worker's side reads and writes memory. The decisions of a step
travel with vLLM's own metadata of the step (`StepWork`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace_engine.pull_proof.identity import Claim, Identity, Unproved
from headrace_engine.pull_proof.records import Geometry
from headrace_engine.pull_proof.settings import IntegritySettings
from headrace_engine.vllm.connectors import NixlHandshakePayload


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
    """Work of one step that the scheduler's side gives to the worker's side."""

    ended: list[str] = field(default_factory=list)
    """Requests that will hand out no blocks."""
    begun: list[tuple[str, int, bytes]] = field(default_factory=list)
    """Requests that will hand out blocks: id, row, record."""
    sums: list[ToSum] = field(default_factory=list)
    claims: dict[str, Claim | Unproved] = field(default_factory=dict)
    """By id of a request that pulls: the claim to prove, or why the request must not pull."""


def geometry_of(vllm_config: Any) -> Geometry:
    """Return the geometry of an engine's table; it is the same in both sides."""
    longest, block = vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size
    return Geometry.of(longest, block)


def settings_of(vllm_config: Any) -> IntegritySettings:
    """Return an engine's settings. Raises ValueError if they cannot be used."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return IntegritySettings.parse(transfer.kv_connector_extra_config)

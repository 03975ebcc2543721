"""Two engines' worth of KV memory in one process, with real NIXL between them.

Records, fingerprints and the agent that proves are the engines' own code. The model and vLLM's
bookkeeping are left out. Tests and the benchmark use it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace_engine.kv_transfer.nixl_cpu_usage import event_driven
from headrace_engine.pull_proof.content import BlockSums, block_seeds
from headrace_engine.pull_proof.identity import Claim, prompt_digest
from headrace_engine.pull_proof.proving_agent import ProvingAgent, Pull
from headrace_engine.pull_proof.records import Geometry, Grants, RecordTable
from headrace_engine.pull_proof.settings import IntegritySettings, Sampling


def agent(name: str) -> Any:
    """A NIXL agent as an engine has it."""
    from nixl._api import nixl_agent, nixl_agent_config

    return event_driven(nixl_agent(name, nixl_agent_config(num_threads=1, capture_telemetry=True)))


@dataclass(frozen=True)
class Shape:
    """Shape of a KV cache of vLLM on a CPU: `[blocks, heads, tokens, 2 x width]` for each layer,
    bfloat16."""

    layers: int
    blocks: int
    heads: int
    tokens: int
    width: int

    def caches(self) -> dict[str, torch.Tensor]:
        """Empty ones, by name."""
        shape = self.blocks, self.heads, self.tokens, 2 * self.width
        return {f"layers.{n}": torch.zeros(shape, dtype=torch.bfloat16) for n in range(self.layers)}

    def descriptors(self, caches: dict[str, torch.Tensor]) -> list[tuple[int, int, int]]:
        """Block by block of each layer, as vLLM numbers them."""
        each = next(iter(caches.values()))[0].nbytes
        return [
            (c.data_ptr() + b * each, each, 0) for c in caches.values() for b in range(self.blocks)
        ]

    def ids(self, blocks: list[int]) -> list[int]:
        """Numbers of their descriptors."""
        return [layer * self.blocks + block for layer in range(self.layers) for block in blocks]


def digest(tokens: list[int]) -> bytes:
    """Return the digest of a prompt of one model and tenant."""
    return prompt_digest(b"model", "tenant", b"", tokens)


@dataclass
class Producer:
    """A prefill engine's memory, records and rules; `restart` is a new one in its place."""

    agent: Any
    shape: Shape

    def __post_init__(self) -> None:
        self.caches = self.shape.caches()
        self.geometry = Geometry.of(self.shape.blocks * self.shape.tokens, self.shape.tokens)
        self.table = RecordTable(self.geometry)
        self.sums = BlockSums(self.caches, self.shape.blocks)
        for cache in self.caches.values():
            self._register(cache.data_ptr(), cache.nbytes)
        self._register(self.table.address, self.geometry.nbytes)
        self.restart()

    def _register(self, address: int, size: int) -> None:
        self.agent.register_memory([(address, size, 0, "")], mem_type="DRAM")

    def restart(self) -> None:
        """A new engine with the same memory."""
        settings = IntegritySettings(check="off")
        incarnation = np.random.default_rng().bytes(16)
        self.grants = Grants(self.geometry.rows, incarnation, Sampling(settings))
        for row in range(self.geometry.rows):
            self.table.erase(row)

    def compute(self, tokens: list[int], blocks: list[int]) -> None:
        """KV that depends on the tokens, in these blocks."""
        made = torch.Generator().manual_seed(sum(tokens))
        for cache in self.caches.values():
            cache[blocks] = torch.randn((len(blocks), *cache.shape[1:]), generator=made).bfloat16()

    def prefill(
        self, request_id: str, tokens: list[int], blocks: list[int], *, demanded: bool = False
    ) -> Claim:
        """Compute a prompt, hand its blocks out: the reference, as a puller reads it."""
        grant = self.grants.begin(request_id, digest(tokens), len(tokens), demanded)
        assert grant is not None
        row, identity = grant
        self.table.write(row, identity.record())
        self.compute(tokens, blocks)
        if identity.checked:
            sums = self.sums.of(blocks, block_seeds(identity, range(len(blocks))))
            assert self.table.put_sums(row, identity.generation, sums)
        at = self.table.address + row * self.geometry.row_bytes
        return Claim(identity, {(0, 0): at}, identity.proof([blocks]))

    def free(self, request_id: str) -> None:
        """The lease ended, or the blocks were pulled."""
        row = self.grants.end(request_id)
        assert row is not None
        self.table.erase(row)

    def notes(self) -> list[bytes]:
        """Return the pullers' notifications since the last call."""
        return [note for notes in self.agent.get_new_notifs().values() for note in notes]


class Consumer:
    """A decode engine's side."""

    def __init__(self, agent: Any, producer: Producer, timeout_s: float = 10.0) -> None:
        self.shape, self.caches = producer.shape, producer.shape.caches()
        self.sums = BlockSums(self.caches, self.shape.blocks)
        self.agent = ProvingAgent(agent, producer.geometry.row_bytes, self, timeout_s)
        for cache in self.caches.values():
            agent.register_memory([(cache.data_ptr(), cache.nbytes, 0, "")], mem_type="DRAM")
        self.peer = agent.add_remote_agent(producer.agent.get_agent_metadata())
        ends = self.shape.descriptors(self.caches), self.shape.descriptors(producer.caches)
        self.local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", ends[0], "DRAM")
        self.remote = agent.prep_xfer_dlist(self.peer, ends[1], "DRAM")

    def start(self, blocks: Any, positions: Any, claim: Claim) -> Any:
        """`proving_agent.Sums`."""
        return self.sums.start(blocks, block_seeds(claim.identity, positions))

    def begin(self, claim: Claim, theirs: list[int], ours: list[int], request_id: str = "r") -> Any:
        """Start to pull the last blocks of a prompt; the transfer's handle."""
        positions = range(len(theirs) - len(ours), len(theirs))
        places = Pull(request_id, "engine", self.peer, claim.places[0, 0], claim, ours, positions)
        ids = self.shape.ids
        with self.agent.pulling(places):
            handle = self.agent.make_prepped_xfer(
                *("READ", self.local, ids(ours), self.remote, ids(theirs[-len(ours) :])),
                notif_msg=b"pulled",
            )
        self.agent.transfer(handle)
        return handle

    def end(self, handle: Any) -> str:
        """DONE or ERR."""
        deadline = time.monotonic() + 10
        while (state := self.look(handle)) == "PROC":
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        self.agent.release_xfer_handle(handle)
        return state

    def look(self, handle: Any) -> str:
        """Check a transfer's state, as vLLM does in each step."""
        self.agent.new_step()
        return self.agent.check_xfer_state(handle)

    def pull(self, claim: Claim, theirs: list[int], ours: list[int]) -> str:
        """DONE, or the kind of what is wrong."""
        if self.end(self.begin(claim, theirs, ours)) == "DONE":
            return "DONE"
        return self.agent.outcomes.failed.pop("r").kind

"""States of recurrent layers in tiers below DRAM: an engine finds those that make a hit, and reads
them like other blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.vllm.kv_cache import BlockHasher
from headrace_kvstore.lookup.availability import AvailableRun
from headrace_kvstore.lookup.lookup_client import LookupClient
from headrace_kvstore.lookup.store_view import StoreView
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.nvme.record import PAGE_BYTES
from headrace_kvstore.settings.node_settings import NodeSettings
from tests.support.kvnode import until
from tests.support.recurrent import Recurrent
from tests.support.scheduled import BLOCK
from tests.support.windowed import GOOD, LAYER_BYTES, counted

PROMPT = 6 * BLOCK + 8
STEP_TOKENS = 2 * BLOCK + 40
TEXT = [*range(20, 20 + PROMPT)]
BLOCK_BYTES = 2 * LAYER_BYTES


class Machine:
    """An engine, and a node with a disk."""

    def __init__(self, folder: Path, **store: Any) -> None:
        self._folder = folder
        below = {
            "node": True,
            "priced": False,
            "socket_folder": str(folder),
            "node_timeout_s": 10.0,
        }
        self.engine = Recurrent(
            folder, blocks=64, step_tokens=STEP_TOKENS, store=below | {"lease_s": 20.0} | store
        )
        self.node = StoreNode(
            NodeSettings(
                name="ahead",
                folder=folder,
                dram_bytes=64 << 20,
                block_bytes=BLOCK_BYTES,
                layers=2,
                nvme_folder=folder / "nvme",
                nvme_bytes=1 << 26,
                segment_bytes=PAGE_BYTES + 16 * (BLOCK_BYTES + 2 * PAGE_BYTES),
                socket_folder=folder,
                sweep_s=0.05,
            )
        ).start()

    @property
    def on_disk(self) -> int:
        return int(self.node.operations.stats()["tiers"]["nvme"].get("blocks", 0))

    def evict(self, *names: bytes) -> None:
        """Drop blocks from DRAM."""
        self.engine.connector.arena.discard(self.engine.connector._opened.row, names)

    def expected(self, prompt: list[int]) -> list[AvailableRun]:
        """What a planner expects the store to supply."""
        opened = self.engine.connector._opened
        view = StoreView(
            opened.settings,
            lambda: opened.digest,
            BlockHasher("sha256_cbor", BLOCK),
            BLOCK,
            LookupClient("ahead", limit_s=20.0, socket_folder=self._folder),
            states=lambda: opened.groups.states.recurrent,
        )
        found = asyncio.run(view.available_runs(prompt, "", 1.0))
        view.close()
        return found

    def close(self) -> None:
        self.engine.close()
        self.node.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    made.engine.store(TEXT)
    until(lambda: made.on_disk >= 6 + 2 * 3)
    yield made
    made.close()


def test_kv_and_states_are_read_from_disk(machine: Machine) -> None:
    engine = machine.engine
    assert machine.expected(TEXT) == [AvailableRun("dram", 6 * BLOCK)]
    engine.connector.arena.clear()
    assert machine.expected(TEXT) == [AvailableRun("nvme", 6 * BLOCK)]
    request = engine.answer(TEXT)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded_nvme") == 6 + 2 and not counted(engine, "loaded_dram")
    assert not counted(engine, "lost")


def kv(request: Any) -> list[bytes]:
    return [bytes(each) for each in request.block_hashes[:6]]


def states(machine: Machine, request: Any, blocks: int) -> list[bytes]:
    return [machine.engine.state_name(request, blocks, group) for group in (0, 2)]


@pytest.mark.parametrize("what", ["states", "one state", "KV", "some KV", "some KV and a state"])
def test_a_part_is_read_from_disk(machine: Machine, what: str) -> None:
    engine = machine.engine
    request = engine.add("again", TEXT, 5)
    after = states(machine, request, 6)
    gone = {
        "states": after,
        "one state": after[1:],
        "KV": kv(request),
        "some KV": kv(request)[2:4],
        "some KV and a state": [*kv(request)[4:], after[0]],
    }[what]
    machine.evict(*gone)
    assert sum(run.length for run in machine.expected(TEXT)) == 6 * BLOCK
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded_nvme") == len(gone)
    assert counted(engine, "loaded") == 6 + 2 and not counted(engine, "lost")


def test_the_last_state_may_be_on_disk_beside_an_earlier_one_in_dram(machine: Machine) -> None:
    """The longer hit is taken."""
    engine = machine.engine
    request = engine.add("again", TEXT, 5)
    machine.evict(*states(machine, request, 6))
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert counted(engine, "loaded") == 6 + 2


def test_a_hit_ends_at_the_last_state_that_any_tier_has(machine: Machine) -> None:
    """The prompts have five blocks in common, and there is a state after four."""
    engine = machine.engine
    engine.connector.arena.clear()
    prompt = [*TEXT[: 5 * BLOCK], *range(900, 900 + BLOCK)]
    assert machine.expected(prompt) == [AvailableRun("nvme", 4 * BLOCK)]
    request = engine.answer(prompt)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded_nvme") == 4 + 2


def test_without_the_kv_below_a_state_dram_alone_makes_the_hit(machine: Machine) -> None:
    engine = machine.engine
    request = engine.add("again", TEXT, 5)
    lost = kv(request)[4]
    machine.evict(lost)
    nvme = machine.node.operations.tiers.nvme
    assert nvme is not None
    assert nvme.discard(engine.connector._opened.digest, lost)
    assert machine.expected(TEXT) == [AvailableRun("dram", 4 * BLOCK)]
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded") == counted(engine, "loaded_dram") == 4 + 2


def test_a_damaged_state_on_disk_has_the_request_computed(machine: Machine) -> None:
    engine = machine.engine
    request = engine.add("again", TEXT, 5)
    machine.evict(*states(machine, request, 6))
    nvme = machine.node.operations.tiers.nvme
    assert nvme is not None
    place = nvme.locate(engine.connector._opened.digest, states(machine, request, 6)[0])
    assert place is not None
    with open(place.path, "r+b") as file:
        file.seek(place.payload_offset)
        file.write(bytes(range(64)))
    engine.steps.clear()
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert sum(step.get("again", 0) for step in engine.steps) >= PROMPT
    assert counted(engine, "lost_corrupt_nvme") == 1


def test_a_node_that_is_away_costs_hits_below_dram_only(machine: Machine) -> None:
    engine = machine.engine
    machine.node.close()
    request = engine.add("again", TEXT, 5)
    machine.evict(*states(machine, request, 6))
    assert machine.expected(TEXT) == [AvailableRun("dram", 4 * BLOCK)]
    engine.until(lambda: "again" not in engine.scheduler.requests)
    assert list(request.output_token_ids) == [GOOD] * 5
    assert counted(engine, "loaded_dram") == 4 + 2
    assert engine.connector._node.unanswered

"""Real vLLM engines that load what an engine of another machine computed: over NIXL from that
machine's StoreNode, and out of an object store.

Two machines on loopback and an S3 server. The owner's engine, of one rank, computes the prompts and
is gone; its node has them in DRAM, on NVMe and in objects. The reader's engine, of two ranks, has
none of its own: its node is first a peer of the owner's, then knows the objects only. Then
everything is restarted but files and objects, and a third engine, of one rank, finds all again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from headrace_engine.kv_transfer.ports import free_port_block
from tests.support.kvobjects import BUCKET, Line, s3_options, s3_server
from tests.support.machine import BLOCK, Machine, assert_same, full_tokens, until
from tests.support.prompts import noise
from tests.support.stored import Stored, StoredEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = [128, 129, 1000, 2500, 7000]
PROMPTS = [noise(length, 100 + seed) for seed, length in enumerate(LENGTHS)]
MIDDLE, LONG = 2, 3
"""The prompts of 1,000 and of 2,500 tokens."""
each_length = pytest.mark.parametrize("number", range(len(PROMPTS)), ids=map(str, LENGTHS))

PATIENT = {"pull_limit_s": 60.0, "peer_lease_s": 90.0, "heal_s": 0.2}
PATIENT_ENGINE = {"node_timeout_s": 60.0, "lease_s": 120.0}
"""A pull over one busy machine may take long. An engine that does not wait for it computes the
prompt, and makes the machine busier. Nothing here kills the node that an engine waits for, which
would take as long."""


@dataclass
class Story:
    """Two machines, and the line from the reader to the object store."""

    owner: Machine
    reader: Machine
    line: Line
    address: str
    tier: str = ""

    def reads_from(self, tier: str) -> None:
        """Give the reader's node one source, "remote" or "object", and wait until it knows what is
        there."""
        if self.tier == tier:
            return
        self.tier = tier
        if tier == "remote":
            self.reader.change_node(peers=self.address, **PATIENT)
            until(lambda: self.remote()["peer"]["blocks"]["NVME"] > 0)
        else:
            self.reader.change_node(**objects(self.line.port), object_refresh_s=0.5, **PATIENT)
            until(lambda: self.object()["blocks"] > 0)

    def remote(self) -> dict[str, Any]:
        """What the reader's node says of its pulls, and of its only peer under `peer`."""
        said = dict(self.reader.node.stats()["remote"])
        [said["peer"]] = said["peers"].values()
        return said

    def object(self) -> dict[str, Any]:
        """What the reader's node says of the object tier."""
        return dict(self.reader.node.stats()["tiers"]["object"])

    def brought(self) -> int:
        """Blocks that have come from the reader's source, verified."""
        if self.tier == "remote":
            return int(self.remote()["pull"].get("pulled", 0))
        return int(self.object().get("reads_good", 0))

    def served(self, engine: StoredEngine, number: int, salt: str | None = None) -> Stored:
        """The answer to a prompt, all of whose full blocks came from the reader's source."""
        before, loaded = self.brought(), engine.events()
        answer = self.reader.from_below(engine, PROMPTS[number], salt)
        blocks = full_tokens(PROMPTS[number]) // BLOCK
        assert self.brought() - before >= blocks
        events = engine.events() - loaded
        assert events["loaded_dram"] >= blocks
        assert not [name for name in events if name.startswith("lost_")]
        return answer


def objects(port: int) -> dict[str, Any]:
    """Settings of a node that shares a prefix with the others."""
    options = json.dumps(s3_options(port))
    return {
        "object_url": f"s3://{BUCKET}/kv",
        "object_options": options,
        "object_sweep_s": 0.2,
        "object_bytes_per_s": "1GiB",
        "object_timeout_s": 60.0,
    }


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with s3_server() as port:
        address = f"127.0.0.1:{free_port_block(1, '127.0.0.1')}"
        owner = Machine(
            listen=address,
            nvme_folder=tmp_path_factory.mktemp("nvme"),
            nvme_bytes=4 << 30,
            **objects(port),
            **PATIENT,
        )
        story = Story(owner, Machine(), Line(port), address)
        try:
            yield story
        finally:
            owner.end()
            story.reader.end()
            story.line.close()


@pytest.fixture(scope="module")
def cold(story: Story) -> list[Stored]:
    """What the owner's engine answers, that has nothing to load. It used all its blocks again, as
    those must be that are shared as objects, and is gone; they are in each tier."""
    story.owner.node.start()
    engine = story.owner.engine(priced=False)
    story.reader.engine(ranks=2, priced=False, **PATIENT_ENGINE)
    engine.ready()
    prompts, salts = [*PROMPTS, PROMPTS[MIDDLE]], [None] * len(PROMPTS) + ["tenant-a"]
    answers = engine.answers(prompts, salts)
    assert [answer.cached for answer in answers] == [0] * len(answers)
    blocks = sum(full_tokens(prompt) for prompt in prompts) // BLOCK
    until(lambda: story.owner.ready_blocks() >= blocks)
    engine.answers(prompts, salts, anew=True)

    def kept() -> bool:
        tiers = story.owner.node.stats()["tiers"]
        return all(tiers[tier]["blocks"] >= blocks for tier in ("nvme", "object"))

    until(kept)
    engine.kill()
    return answers[: len(PROMPTS)]


@pytest.fixture(scope="module")
def engine(story: Story, cold: list[Stored]) -> StoredEngine:
    """The reader's."""
    return story.reader.engines[0].ready()


@pytest.fixture
def remote(story: Story, engine: StoredEngine) -> Story:
    """The reader knows the owner's blocks."""
    story.reads_from("remote")
    return story


@pytest.fixture
def shared(story: Story, engine: StoredEngine) -> Story:
    """The reader knows the objects; there is no owner."""
    story.owner.node.kill()
    story.reads_from("object")
    return story


class TestRemote:
    @each_length
    def test_what_a_peer_holds_is_loaded_from_there(
        self, remote: Story, engine: StoredEngine, cold: list[Stored], number: int
    ) -> None:
        assert_same([remote.served(engine, number)], [cold[number]])

    def test_a_salt_finds_its_own_blocks_and_no_other_does(
        self, remote: Story, engine: StoredEngine, cold: list[Stored]
    ) -> None:
        own = remote.served(engine, MIDDLE, "tenant-a")
        before = remote.brought()
        [other] = engine.answers([PROMPTS[MIDDLE]], ["tenant-b"], anew=True)
        assert (other.cached, remote.brought()) == (0, before)
        assert own.tokens == other.tokens == cold[MIDDLE].tokens

    def test_an_owner_killed_while_requests_wait_for_it_costs_hits_only(
        self, remote: Story, engine: StoredEngine, cold: list[Stored]
    ) -> None:
        before = remote.remote()
        remote.reader.forget_dram()
        remote.owner.node.stop()
        numbers = [MIDDLE, LONG, 1]
        engine.ask([PROMPTS[n] for n in numbers], together=True, anew=True)
        until(lambda: remote.remote()["pulls"] > before["pulls"])
        remote.owner.node.kill()
        assert_same(engine.answer(), [cold[n] for n in numbers])
        until(lambda: any(remote.remote()["peer"].get(f"failed_{why}") for why in ("lost", "down")))
        until(lambda: remote.remote()["peer"]["state"] == "down")

    def test_an_owner_that_was_restarted_lends_what_its_disk_has(
        self, remote: Story, engine: StoredEngine, cold: list[Stored]
    ) -> None:
        remote.owner.remove_dram()
        remote.owner.node.start()
        until(lambda: remote.remote()["peer"]["blocks"]["NVME"] > 0)
        assert_same([remote.served(engine, LONG)], [cold[LONG]])
        leases = remote.owner.node.stats()["remote"]["lease_server"]
        assert leases["raised_from_nvme"] >= full_tokens(PROMPTS[LONG]) // BLOCK


class TestObject:
    @each_length
    def test_what_is_in_objects_only_is_loaded_from_there(
        self, shared: Story, engine: StoredEngine, cold: list[Stored], number: int
    ) -> None:
        assert_same([shared.served(engine, number)], [cold[number]])

    def test_a_salt_finds_its_own_blocks_and_no_other_does(
        self, shared: Story, engine: StoredEngine, cold: list[Stored]
    ) -> None:
        own = shared.served(engine, MIDDLE, "tenant-a")
        before = shared.brought()
        [other] = engine.answers([PROMPTS[MIDDLE]], ["tenant-c"], anew=True)
        assert (other.cached, shared.brought()) == (0, before)
        assert own.tokens == other.tokens == cold[MIDDLE].tokens

    def test_an_endpoint_that_dies_while_requests_wait_for_it_costs_hits_until_it_is_back(
        self, shared: Story, engine: StoredEngine, cold: list[Stored]
    ) -> None:
        before = shared.object()
        shared.reader.forget_dram()
        shared.line.set("held")
        numbers = [MIDDLE, LONG, 1]
        engine.ask([PROMPTS[n] for n in numbers], together=True, anew=True)
        until(lambda: shared.object().get("reads", 0) > before.get("reads", 0))
        shared.line.set("dead")
        assert_same(engine.answer(), [cold[n] for n in numbers])
        reasons = ("reads_unreachable", "reads_failed", "reads_timeout", "reads_breaker")
        after = shared.object()
        assert any(after.get(name, 0) > before.get(name, 0) for name in reasons)
        shared.line.set("whole")
        assert_same([shared.served(engine, LONG)], [cold[LONG]])


@pytest.fixture(scope="module")
def restarted(story: Story, engine: StoredEngine, cold: list[Stored]) -> StoredEngine:
    """Everything was gone but files and objects; another engine came under the reader's name."""
    engine.kill()
    for machine in (story.owner, story.reader):
        machine.node.kill()
        machine.remove_dram()
    story.tier = ""
    return story.reader.engine(priced=False, **PATIENT_ENGINE).ready()


class TestRestart:
    @each_length
    def test_what_the_owner_s_files_hold_is_loaded_from_there(
        self, story: Story, restarted: StoredEngine, cold: list[Stored], number: int
    ) -> None:
        if story.tier != "remote":
            story.owner.node.start()
            story.reads_from("remote")
        assert_same([story.served(restarted, number)], [cold[number]])

    @each_length
    def test_what_is_in_objects_is_loaded_from_there(
        self, story: Story, restarted: StoredEngine, cold: list[Stored], number: int
    ) -> None:
        story.reads_from("object")
        assert_same([story.served(restarted, number)], [cold[number]])

"""Two memories over a gossip log: what arrives, what does not, and that nothing is ever raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.draft_memory.one_row import OneRowMemory
from headrace_decode.speculative.replication import segment_replicator
from headrace_decode.speculative.replication.replication_log import ReplicationLog
from headrace_decode.speculative.replication.segment_replicator import SegmentReplicator
from headrace_decode.speculative.retrieval.draft_memory import MemorySettings
from headrace_decode.speculative.settings import ReplicationSettings, SpeculationSettings
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.gossip_log import GossipEntry, GossipLog
from headrace_kvstore.protocol.server import NodeServer
from tests.support.kvnode import until

MIB = 1 << 20


class Node:
    """A node that has a gossip log and nothing else."""

    def __init__(self, folder: Path, generation: str = "first") -> None:
        self.gossip_log = GossipLog(16 * MIB, generation)
        self.server = NodeServer(wire.socket_path("store", folder), self.handle)

    def handle(self, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.AppendEntry):
            if request.generation == self.gossip_log.generation:
                self.gossip_log.append(request.entry)
            return wire.EntryPage(self.gossip_log.generation, 0, self.gossip_log.head)
        if isinstance(request, wire.ReadEntries):
            place = request.after, request.most_bytes
            writer = request.except_writer
            return self.gossip_log.read(*place, generation=request.generation, except_writer=writer)
        return wire.Failed("only a gossip log")


class Replica:
    """A memory and its replicator."""

    def __init__(self, number: int, folder: Path, **settings: Any) -> None:
        self.memory = OneRowMemory(MemorySettings(capacity_bytes=4 * MIB, replica=number))
        usual = {"poll_s": 0.01, "timeout_s": 0.3, "bytes_per_s": 64.0 * MIB}
        self.replicator = SegmentReplicator(
            ReplicationLog(self.memory),
            ReplicationSettings("store", str(folder), **(usual | settings)),
        )

    def answered(self, start: int, tenant: str = "x", count: int = 40) -> None:
        handle = self.memory.open_request("past", run(7, 1), tenant)
        self.memory.extend(handle, run(start, count))
        self.memory.close_request(handle)

    def drafts(self, start: int, tenant: str = "x") -> bool:
        """Whether an answer is known here."""
        handle = self.memory.open_request("now", run(start, 5), tenant)
        tokens = self.memory.draft(handle, 4).tokens.tolist()
        self.memory.close_request(handle, keep=False)
        return bool(tokens == run(start + 5, 4).tolist())

    def stats(self) -> dict[str, Any]:
        return self.replicator.stats()


def run(start: int, count: int) -> NDArray[np.int32]:
    return np.arange(start, start + count, dtype=np.int32)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.server.close()


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    """Makes replicas, begun unless they shall not."""
    with ExitStack() as stack:

        def make(number: int, *, begun: bool = True, **settings: Any) -> Replica:
            made = Replica(number, tmp_path, **settings)
            stack.callback(made.replicator.close)
            if begun:
                made.replicator.start()
            return made

        yield make


class TestSharing:
    def test_answers_of_one_replica_are_drafted_by_the_other(
        self, node: Node, replica: Callable[..., Replica]
    ) -> None:
        a, b = replica(1), replica(2)
        a.answered(100)
        until(lambda: b.drafts(100))
        b.answered(200)
        until(lambda: a.drafts(200))
        assert not b.drafts(100, "another tenant")

    def test_a_replica_that_starts_later_gets_all_that_is_in_the_log(
        self, node: Node, replica: Callable[..., Replica]
    ) -> None:
        a = replica(1)
        for n in range(20):
            a.answered(1000 * n, f"tenant {n % 3}", 300)
        until(lambda: a.stats()["pending"] == 0 and a.stats()["posted"] > 0)
        a.replicator.close()
        late = replica(2)
        until(lambda: late.stats()["records"] == 20)
        assert all(late.drafts(1000 * n, f"tenant {n % 3}") for n in range(20))
        assert late.stats()["unread"] == 0

    def test_answers_from_before_the_start_are_sent(
        self, node: Node, replica: Callable[..., Replica]
    ) -> None:
        a, b = replica(1, begun=False), replica(2)
        a.answered(100)
        a.replicator.start()
        until(lambda: b.drafts(100))

    def test_a_note_is_no_longer_than_it_must_be(
        self, node: Node, replica: Callable[..., Replica]
    ) -> None:
        a = replica(1, begun=False)
        for n in range(30):
            a.answered(3000 * n, count=3000)
        a.replicator.start()
        until(lambda: a.stats()["posted"] > 0 and a.stats()["pending"] == 0)
        entries = node.gossip_log.read(0, 1 << 30, generation="first").entries
        segment = 4 * 3000 + 200
        assert all(
            len(each.data) <= segment_replicator.MAX_BATCH_BYTES + segment for each in entries
        )
        assert sum(len(each.data) for each in entries) >= 30 * 4 * 3000

    def test_a_partition_with_many_entries_delays_no_other(
        self, node: Node, replica: Callable[..., Replica]
    ) -> None:
        a = replica(1, begun=False)
        for n in range(40):
            a.answered(3000 * n, "loud", count=3000)
        a.answered(100, "quiet")
        a.replicator.start()
        until(lambda: a.stats()["pending"] == 0 and a.stats()["posted"] > 2)
        entries = node.gossip_log.read(0, 1 << 30, generation="first").entries
        assert len({each.stream for each in entries[:2]}) == 2


class TestFaults:
    def test_without_a_node_it_waits_for_one(
        self, tmp_path: Path, replica: Callable[..., Replica]
    ) -> None:
        a, b = replica(1), replica(2)
        until(lambda: a.stats()["state"] == b.stats()["state"] == "away")
        a.answered(100)
        assert a.drafts(100)
        assert a.stats()["pending"] == 1
        node = Node(tmp_path)
        try:
            until(lambda: b.drafts(100))
            assert a.stats()["state"] == "up"
        finally:
            node.server.close()

    def test_replicas_send_their_segments_again_to_a_restarted_node(
        self, tmp_path: Path, replica: Callable[..., Replica]
    ) -> None:
        a, b = replica(1), replica(2)
        node = Node(tmp_path)
        a.answered(100)
        until(lambda: b.drafts(100))
        node.server.close()
        until(lambda: a.stats()["lost_node"] == 1)
        a.answered(200)
        node = Node(tmp_path, "second")
        try:
            until(lambda: b.drafts(200))
            late = replica(3)
            until(lambda: late.drafts(100) and late.drafts(200))
            assert b.stats()["records"] == 2, "nothing is taken in twice"
        finally:
            node.server.close()

    def test_damaged_notes_are_refused_and_counted_and_the_next_is_taken(
        self, node: Node, replica: Callable[..., Replica]
    ) -> None:
        b = replica(2)
        a = replica(1, begun=False)
        a.answered(100)
        told = a.replicator.log.pending_batch(MIB)
        assert told is not None
        data = told[1]
        for number, bad in enumerate((b"", b"junk", data[:-1], data[:-1] + b"\1", data), 1):
            node.gossip_log.append(GossipEntry(b"somebody", b"stream", number, bad))
        until(lambda: b.stats()["applied"] == 1)
        assert b.drafts(100)
        assert b.stats()["damaged"] == 4

    def test_an_entry_that_cannot_be_written_down_costs_that_entry(
        self,
        node: Node,
        replica: Callable[..., Replica],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        a, b = replica(1, begun=False), replica(2)
        next_batch = a.replicator.log.pending_batch
        failures = [OverflowError("a name of 5 GB")]

        def broken(max_bytes: int) -> Any:
            told = next_batch(max_bytes)
            if told is not None and failures:
                raise failures.pop()
            return told

        monkeypatch.setattr(a.replicator.log, "pending_batch", broken)
        a.answered(100)
        a.replicator.start()
        until(lambda: a.stats()["failed"] == 1)
        a.answered(200)
        until(lambda: b.drafts(200))
        assert not b.drafts(100)
        assert a.stats()["failed"] == 1

    def test_a_node_that_cannot_do_it_counts_as_away(
        self, tmp_path: Path, replica: Callable[..., Replica]
    ) -> None:
        path = wire.socket_path("store", tmp_path)
        server = NodeServer(path, lambda request: wire.Failed("of another version"))
        try:
            a = replica(1)
            until(lambda: a.stats()["state"] == "away")
            a.answered(100)
            assert a.drafts(100)
        finally:
            server.close()


class TestSettings:
    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({}, "store"),
            ({"store": ""}, "length >= 1 - at `$.replication.store`"),
            ({"store": "s", "poll_s": 0}, "> 0.0 - at `$.replication.poll_s`"),
            ({"store": "s", "bytes_per_s": "fast"}, "$.replication.bytes_per_s"),
            ({"store": "s", "speed": 1}, "speed"),
        ],
    )
    def test_wrong_ones_are_refused_where_the_engine_is_configured(
        self, given: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(ValueError, match="headrace_speculation: ") as refused:
            SpeculationSettings.read({"replication": given})
        assert says in str(refused.value)

    def test_without_them_nothing_is_shared(self) -> None:
        assert SpeculationSettings.read({}).replication is None

"""The reader's side of a lease: what is read and published, and how each fault is named.

The owner is an arena in this process; its answers and the reads are made by the test.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_kvstore.arena.arena_map import NamespaceInfo
from headrace_kvstore.node.dram_service import open_arena
from headrace_kvstore.peers.block_tags import BlockTags
from headrace_kvstore.peers.messages import (
    HandshakeResponse,
    Lease,
    Leased,
    LeasedBlock,
    Release,
    Tags,
)
from headrace_kvstore.peers.nixl_agent import Pull, PullError
from headrace_kvstore.peers.peer_source import READ_BYTES, PeerSource, PullLimits
from headrace_kvstore.peers.pull_cost import PeerRun, pull_cost
from headrace_kvstore.staging.prefetch import Prefetcher
from tests.support.kvnode import DIGEST, SECRET, SHAPE, Engine, keys, settings, until
from tests.support.kvsums import forge


class Peer:
    """A peer that holds what its engine stored; `fault` says what goes wrong."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.engine = Engine(settings(folder))
        self.fault = ""
        self.released: list[Release] = []
        self.succeeded_bytes = 0
        self.failures: list[str] = []
        self.leased: list[LeasedBlock] = []

    # As `Peers`

    def runs(self, digest: bytes, hashes: Sequence[bytes]) -> list[PeerRun]:
        return (
            []
            if self.fault == "unknown"
            else [PeerRun("peer", (("DRAM", len(hashes), pull_cost()),))]
        )

    def handshake(self, address: str) -> HandshakeResponse:
        return HandshakeResponse("g", b"metadata")

    def lease(self, address: str, request: Lease, limit_s: float) -> Future[Leased]:
        answer: Future[Leased] = Future()
        if self.fault in ("down", "slow", "refused"):
            answer.set_exception(PullError(self.fault))
            return answer
        arena = self.engine.arena
        slots = arena.lookup(self.engine.row, request.hashes)
        there = np.flatnonzero(slots >= 0)
        where = dict(zip(there.tolist(), arena.addresses(slots[there]).tolist(), strict=True))
        rows = [LeasedBlock(i, address, 7, i, 0, 0.25) for i, address in where.items()]
        sums = arena.sums(slots[there]).astype("<u8").tobytes()
        if self.fault == "short sums":
            sums = sums[:-8]
        if self.fault == "strange row":
            rows[0].index = 99
        if self.fault == "strange parent":
            rows[0].parent = 1 << 64
        if self.fault == "strange seconds":
            rows[0].compute_s = float("nan")
        self.leased = rows
        answer.set_result(Leased(5, rows, sums))
        return answer

    def tags(self, address: str, lease: int, limit_s: float) -> Future[Tags]:
        answer: Future[Tags] = Future()
        if self.fault == "tags refused":
            answer.set_exception(PullError("refused"))
            return answer
        made = BlockTags(SECRET if self.fault != "another secret" else 16 * "x", "g")
        tags = [made.make(row.address, SHAPE.payload_bytes) for row in self.leased]
        answer.set_result(Tags(b"".join(tags)[: -1 if self.fault == "short tags" else None]))
        return answer

    def send(self, address: str, body: Any) -> None:
        self.released.append(body)

    def succeeded(self, address: str, medium: str, size_bytes: int, seconds: float) -> None:
        self.succeeded_bytes += size_bytes

    def failed(self, address: str, word: str) -> None:
        self.failures.append(word)

    # As `NixlAgent`

    def connect(self, metadata: bytes, limit_s: float) -> str:
        if self.fault == "metadata":
            raise PullError("refused")
        return "agent"

    def disconnect(self, peer: str) -> None:
        pass

    def read(
        self, peer: str, local: np.ndarray, remote: np.ndarray, lengths: np.ndarray, limit_s: float
    ) -> Pull:
        pull = Pull(peer, (local, remote, np.asarray(lengths)), time.monotonic() + limit_s)
        if self.fault == "lost":
            pull.set_exception(PullError("lost"))
            return pull
        for to, at, size in zip(local.tolist(), remote.tolist(), lengths.tolist(), strict=True):
            ctypes.memmove(int(to), int(at), int(size))
        pull.completed_s = time.monotonic()
        if self.fault == "forged":
            memory = (ctypes.c_char * SHAPE.payload_bytes).from_address(int(local[0]))
            forge(np.frombuffer(memory, np.uint8))
        if self.fault in ("bit", "overwritten"):
            ctypes.memset(int(local[0]) + 100, 0xA5, 1)
            pull.completed_s += 1e6 if self.fault == "overwritten" else 0
        pull.set_result(None)
        return pull


class Reader:
    def __init__(self, folder: Path, peer: Any) -> None:
        given = settings(folder)
        self.engine = Engine(given)
        self.arena = open_arena(given)
        self.source = PeerSource(
            *(peer, peer, lambda digest: self.namespace_info(digest), PullLimits(5.0, 20.0), SECRET)
        )
        self.puller = Prefetcher(self.arena, self.source, 2**24)

    def namespace_info(self, digest: bytes) -> NamespaceInfo | None:
        return next((s for s in self.arena.namespaces() if s.digest == digest), None)

    def pull(self, *numbers: int) -> int:
        return self.puller.fetch(DIGEST, keys(*numbers)).result(60)

    def close(self) -> None:
        assert self.puller.close(20)
        self.engine.close()
        self.arena.unlink()
        self.arena.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path / "peer")
    yield peer
    peer.engine.arena.unlink()
    peer.engine.close()


@pytest.fixture
def reader(tmp_path: Path, peer: Peer) -> Iterator[Reader]:
    reader = Reader(tmp_path, peer)
    yield reader
    assert reader.arena.stats()["writing"] == 0, "a slot leaked"
    reader.close()


def test_what_comes_is_published_with_its_place_in_the_prefix_and_released(
    peer: Peer, reader: Reader
) -> None:
    peer.engine.put(*range(12))
    assert reader.pull(*range(14)) == 12
    assert reader.engine.has(*range(14)) == [True] * 12 + [False] * 2
    [slot] = reader.arena.lookup(reader.engine.row, keys(3))
    record = reader.arena.table[slot]
    assert (record["parent"], record["depth"], record["compute_s"]) == (7, 3, 0.25)
    until(lambda: peer.released == [Release(5, [])])
    assert peer.succeeded_bytes == 12 * SHAPE.payload_bytes and peer.failures == []
    assert reader.puller.stats()["absent"] == 2


@pytest.mark.parametrize("fault", ["down", "slow", "refused", "metadata", "unknown"])
def test_a_peer_that_gives_no_lease_is_a_miss_with_a_name(
    peer: Peer, reader: Reader, fault: str
) -> None:
    peer.engine.put(0, 1)
    peer.fault = fault
    assert reader.pull(0, 1) == 0
    word = {"metadata": "refused", "unknown": "gone"}.get(fault, fault)
    assert reader.puller.stats()[f"dropped_{word}"] == 2
    assert peer.failures == ([] if fault == "unknown" else [word])
    peer.fault = ""
    assert reader.pull(0, 1) == 2


@pytest.mark.parametrize(
    "fault", ["short sums", "strange row", "strange parent", "strange seconds"]
)
def test_an_answer_without_sense_is_a_miss(peer: Peer, reader: Reader, fault: str) -> None:
    peer.engine.put(0, 1)
    peer.fault = fault
    assert reader.pull(0, 1) == 0
    assert reader.source.counts["failed_malformed"] == 2


@pytest.mark.parametrize(
    ("fault", "word", "blocks"),
    [
        ("lost", "lost", 4),
        ("bit", "corrupt", 1),
        ("forged", "corrupt", 1),
        ("overwritten", "lease_ran_out", 1),
        ("another secret", "corrupt", 4),
        ("short tags", "malformed", 4),
        ("tags refused", "refused", 4),
    ],
)
def test_what_does_not_arrive_right_is_told_and_not_published(
    peer: Peer, reader: Reader, fault: str, word: str, blocks: int
) -> None:
    peer.engine.put(*range(4))
    reader.source.split = lambda blocks, block_bytes: [blocks]  # type: ignore[method-assign]
    peer.fault = fault
    assert reader.pull(*range(4)) == 4 - blocks
    until(lambda: peer.released == [Release(5, list(range(blocks)))])
    until(lambda: peer.failures == [word])
    assert reader.source.counts[f"failed_{word}"] == blocks
    assert reader.puller.stats()["dropped_bad"] == blocks
    peer.fault = ""
    assert reader.pull(*range(4)) == blocks
    assert reader.engine.has(*range(4)) == [True] * 4


def test_a_second_wish_for_a_block_on_its_way_waits_for_the_same_pull(
    peer: Peer, reader: Reader
) -> None:
    peer.engine.put(*range(8))
    first = reader.puller.fetch(DIGEST, keys(*range(8)))
    second = reader.puller.fetch(DIGEST, keys(*range(4, 8)))
    assert first.result(60) == 8 and second.result(60) in (0, 4)
    assert reader.engine.has(*range(8)) == [True] * 8
    assert reader.puller.fetch(DIGEST, []).result(60) == 0


def test_a_block_wanted_anew_while_its_pull_ends_is_pulled_again(
    peer: Peer, reader: Reader
) -> None:
    peer.engine.put(0, 1)
    again: list[Future[int]] = []

    def released(address: str, body: Any) -> None:
        if not again:
            reader.arena.clear()
            again.append(reader.puller.fetch(DIGEST, keys(0, 1)))

    peer.send = released  # type: ignore[method-assign]
    assert reader.pull(0, 1) == 2
    until(lambda: bool(again))
    assert again[0].result(60) == 2


@pytest.mark.parametrize("blocks", [1, 2, 3, 46, 64])
def test_reads_halve_down_to_one_block(blocks: int) -> None:
    block_bytes = 6 * 2**20
    sizes = PeerSource.split(object(), blocks, block_bytes)  # type: ignore[arg-type]
    assert sum(sizes) == blocks and sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) * block_bytes <= READ_BYTES
    assert PeerSource.split(object(), 2, 2 * READ_BYTES) == [1, 1]  # type: ignore[arg-type]

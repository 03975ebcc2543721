"""The NIXL agent of a node: reads of another one's memory, and peers that are not there."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from headrace_kvstore.peers.nixl_agent import NixlAgent, PullError

SIZE = 2**20
LIMIT_S, PATIENT_S = 60.0, 120.0


class Side:
    def __init__(self, fill: int) -> None:
        self.memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
        self.memory[:] = fill
        self.address = int(self.memory.ctypes.data)
        self.serves = False
        self.agent = NixlAgent(self.address, SIZE, lambda: self.serves)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    owner, reader = Side(7), Side(0)
    owner.serves = True
    owner.agent.wake()
    yield owner, reader
    owner.serves = False
    assert reader.agent.close(PATIENT_S)
    assert owner.agent.close(PATIENT_S)


def test_pieces_go_where_they_belong_and_nowhere_else(sides: tuple[Side, Side]) -> None:
    owner, reader = sides
    owner.memory[:] = np.arange(SIZE) // 4096 % 251
    name = reader.agent.connect(owner.agent.metadata).result(PATIENT_S)
    at = np.array([0, 8192, 65536], np.uint64)
    pull = reader.agent.read(
        name,
        np.uint64(reader.address) + at,
        np.uint64(owner.address) + at[::-1],
        np.full(3, 4096),
        LIMIT_S,
    )
    pull.result(PATIENT_S)
    for to, source in zip(at.tolist(), at[::-1].tolist(), strict=True):
        assert (reader.memory[to : to + 4096] == owner.memory[source : source + 4096]).all()
    assert not reader.memory[4096:8192].any() and not reader.memory[12288:65536].any()


def test_memory_that_was_not_registered_is_refused(sides: tuple[Side, Side]) -> None:
    owner, reader = sides
    name = reader.agent.connect(owner.agent.metadata).result(PATIENT_S)
    beyond = np.array([owner.address + SIZE])
    pull = reader.agent.read(name, np.array([reader.address]), beyond, np.array([4096]), LIMIT_S)
    with pytest.raises(PullError, match="refused"):
        pull.result(PATIENT_S)


def test_an_unknown_or_forgotten_peer_is_lost_and_can_be_met_again(
    sides: tuple[Side, Side],
) -> None:
    owner, reader = sides

    def read(name: str) -> None:
        here, there = np.array([reader.address]), np.array([owner.address])
        reader.agent.read(name, here, there, np.array([4096]), LIMIT_S).result(PATIENT_S)

    with pytest.raises(PullError, match="lost"):
        read("nobody")
    name = reader.agent.connect(owner.agent.metadata).result(PATIENT_S)
    read(name)
    reader.agent.disconnect(name)
    with pytest.raises(PullError, match="lost"):
        read(name)
    read(reader.agent.connect(owner.agent.metadata).result(PATIENT_S))


def test_metadata_that_is_none_is_refused(sides: tuple[Side, Side]) -> None:
    _, reader = sides
    for metadata in (b"", b"nonsense" * 50):
        with pytest.raises(PullError):
            reader.agent.connect(metadata).result(PATIENT_S)


def test_what_waits_too_long_is_slow_and_a_closed_agent_reads_nothing(
    sides: tuple[Side, Side],
) -> None:
    owner, reader = sides
    name = reader.agent.connect(owner.agent.metadata).result(PATIENT_S)
    columns = (np.array([reader.address]), np.array([owner.address]), np.array([4096]))
    with pytest.raises(PullError, match="slow"):
        reader.agent.read(name, *columns, -1.0).result(PATIENT_S)
    assert reader.agent.close(PATIENT_S)
    with pytest.raises(PullError, match="off"):
        reader.agent.read(name, *columns, LIMIT_S).result(PATIENT_S)
    with pytest.raises(PullError, match="off"):
        reader.agent.connect(owner.agent.metadata).result(PATIENT_S)

"""A NIXL agent made again to sleep: it costs nothing while idle, and peers read from it as before.

The holder calls NIXL no more once its memory is registered, like an engine that makes no steps.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import psutil
import pytest

from headrace_engine.kv_transfer.nixl_cpu_usage import event_driven

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SIZE_BYTES = 16 * 2**20
PIECE_BYTES = 8 * 2**10
"""So small that NIXL spreads a transfer over its worker threads (1,024 pieces or more)."""


def _content() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, SIZE_BYTES, dtype=np.uint8)


def _agent(name: str) -> Any:
    """As vLLM makes it, made again."""
    from nixl._api import nixl_agent, nixl_agent_config

    return event_driven(nixl_agent(name, nixl_agent_config(num_threads=4, capture_telemetry=True)))


def _holder(pipe: Connection) -> None:
    agent, buffer = _agent("holder"), _content()
    agent.register_memory([(buffer.ctypes.data, SIZE_BYTES, 0, "")], mem_type="DRAM")
    pipe.send((agent.get_agent_metadata(), buffer.ctypes.data))
    while pipe.recv() == "cpu":
        pipe.send(sum(psutil.Process().cpu_times()[:2]))
    pipe.send([note for notes in agent.get_new_notifs().values() for note in notes])


@dataclass
class Holder:
    process: BaseProcess
    pipe: Connection
    metadata: bytes
    address: int


@pytest.fixture(params=["", "tcp"], ids=["shared memory", "TCP"])
def holder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_holder, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.poll(60), "the holder did not start"
        yield Holder(process, ours, *ours.recv())
    finally:
        process.kill()
        process.join()


class Reader:
    """An agent with memory to read into."""

    def __init__(self, name: str, holder: Holder) -> None:
        self.agent, self.holder = _agent(name), holder
        self.target = np.zeros(SIZE_BYTES, dtype=np.uint8)
        self.agent.register_memory([(self.target.ctypes.data, SIZE_BYTES, 0, "")], mem_type="DRAM")
        self.agent.add_remote_agent(holder.metadata)

    def read(self, note: bytes) -> Any:
        """Start to read everything; the transfer's handle."""
        pieces = range(0, SIZE_BYTES, PIECE_BYTES)
        local, remote = (
            self.agent.get_xfer_descs(
                [(base + at, PIECE_BYTES, 0) for at in pieces], mem_type="DRAM"
            )
            for base in (self.target.ctypes.data, self.holder.address)
        )
        handle = self.agent.initialize_xfer("READ", local, remote, "holder", note)
        self.agent.transfer(handle)
        return handle

    def end(self, handle: Any, limit_s: float = 60.0) -> str:
        """How the transfer ends: DONE, ERR, or PROC if it never does."""
        deadline = time.monotonic() + limit_s
        state = "PROC"
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(0.001)
            try:
                state = self.agent.check_xfer_state(handle)
            except Exception:  # NIXL tells a lost peer by an exception
                state = "ERR"
        return state


def test_several_agents_read_from_one_that_makes_no_calls(holder: Holder) -> None:
    readers = [Reader(f"reader-{number}", holder) for number in range(2)]
    for _ in range(3):
        handles = [reader.read(reader.agent.name.encode()) for reader in readers]
        for reader, handle in zip(readers, handles, strict=True):
            assert reader.end(handle) == "DONE"
            assert reader.agent.get_xfer_telemetry(handle).totalBytes == SIZE_BYTES
            reader.agent.release_xfer_handle(handle)
            assert (reader.target == _content()).all()
            reader.target[:] = 0
    holder.pipe.send("notes")
    assert sorted(holder.pipe.recv()) == 3 * [b"reader-0"] + 3 * [b"reader-1"]


def test_an_idle_agent_keeps_no_core_busy_also_after_a_transfer(holder: Holder) -> None:
    reader = Reader("reader", holder)
    handle = reader.read(b"read")
    assert reader.end(handle) == "DONE"
    reader.agent.release_xfer_handle(handle)
    time.sleep(0.5)

    def cpu_s() -> tuple[float, float]:
        holder.pipe.send("cpu")
        return holder.pipe.recv(), sum(psutil.Process().cpu_times()[:2])

    before = cpu_s()
    time.sleep(2.0)
    used = [after - first for first, after in zip(before, cpu_s(), strict=True)]
    assert max(used) < 0.2, f"of 2 s, the holder and the reader used {used}"


def test_a_transfer_from_an_agent_that_is_killed_ends(holder: Holder) -> None:
    reader = Reader("reader", holder)
    process = psutil.Process(holder.process.pid)
    first = reader.read(b"first")
    assert reader.end(first) == "DONE"  # they are connected
    process.suspend()
    handle = reader.read(b"second")
    process.kill()
    holder.process.join()
    assert reader.end(handle, limit_s=90.0) in ("DONE", "ERR")  # shared memory needs no holder


def test_a_transfer_from_an_agent_that_hangs_ends_when_it_is_given_up(holder: Holder) -> None:
    """And no byte of it comes later: its memory may be used for something else."""
    reader = Reader("reader", holder)
    process = psutil.Process(holder.process.pid)
    assert reader.end(reader.read(b"first")) == "DONE"  # they are connected
    process.suspend()
    handle = reader.read(b"second")
    state = reader.end(handle, limit_s=0.5)
    reader.agent.remove_remote_agent("holder")
    if state == "PROC":  # shared memory needs no holder
        assert reader.end(handle, limit_s=5.0) == "ERR"
    reader.agent.release_xfer_handle(handle)
    reader.target[:] = 0
    process.resume()
    time.sleep(0.5)
    assert not reader.target.any()
    reader.agent.add_remote_agent(holder.metadata)
    assert reader.end(reader.read(b"third")) == "DONE"
    assert (reader.target == _content()).all()

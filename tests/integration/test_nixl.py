"""NIXL between two processes on the CPU: what one registers, the other reads, byte for byte."""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SIZE_BYTES = 8 * 2**20
PIECE_BYTES = 64 * 2**10


def _content() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, SIZE_BYTES, dtype=np.uint8)


def _holder(pipe: Connection) -> None:
    """Register a buffer, tell where it is, keep it until told that it was read."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("holder", nixl_agent_config(backends=["UCX"]))
    buffer = _content()
    agent.register_memory([(buffer.ctypes.data, SIZE_BYTES, 0, "")], mem_type="DRAM")
    pipe.send((agent.get_agent_metadata(), buffer.ctypes.data))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        notes = agent.get_new_notifs().get("reader", [])
        if b"read" in notes:
            pipe.send("released")
            break
        time.sleep(0.001)
    pipe.recv()


def test_pieces_that_one_process_holds_are_read_by_another() -> None:
    from nixl._api import nixl_agent, nixl_agent_config

    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    holder = context.Process(target=_holder, args=(theirs,), daemon=True)
    holder.start()
    try:
        assert ours.poll(60), "the holder did not start"
        metadata, address = ours.recv()
        agent = nixl_agent("reader", nixl_agent_config(backends=["UCX"]))
        assert agent.add_remote_agent(metadata) in ("holder", b"holder")
        target = np.zeros(SIZE_BYTES, dtype=np.uint8)
        agent.register_memory([(target.ctypes.data, SIZE_BYTES, 0, "")], mem_type="DRAM")

        # Every second piece, in another order than they lie: blocks are never one run of memory.
        pieces = list(range(0, SIZE_BYTES, 2 * PIECE_BYTES))
        order = np.random.default_rng(1).permutation(len(pieces))
        local = [(target.ctypes.data + pieces[i], PIECE_BYTES, 0) for i in order]
        remote = [(address + pieces[i], PIECE_BYTES, 0) for i in order]
        transfer = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(local, mem_type="DRAM"),
            agent.get_xfer_descs(remote, mem_type="DRAM"),
            "holder",
            b"read",
        )
        state = agent.transfer(transfer)
        deadline = time.monotonic() + 60
        while state != "DONE":
            assert state != "ERR" and time.monotonic() < deadline, state
            time.sleep(0.001)
            state = agent.check_xfer_state(transfer)

        wanted = _content().reshape(-1, PIECE_BYTES)
        got = target.reshape(-1, PIECE_BYTES)
        assert (got[0::2] == wanted[0::2]).all()
        assert not got[1::2].any(), "bytes were written that were not asked for"
        assert ours.poll(60) and ours.recv() == "released", "the holder was not told"
        ours.send("bye")
        agent.release_xfer_handle(transfer)
    finally:
        holder.join(10)
        if holder.is_alive():
            holder.kill()

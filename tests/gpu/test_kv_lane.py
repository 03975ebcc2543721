"""Time, copies and streams on a GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

CYCLES = 500_000_000
"""Of a kernel that only takes time: tenths of a second on any card."""
SIZE = 1 << 20


def registered(size_bytes: int) -> tuple[np.ndarray, object]:
    from headrace_kvstore.device.copy_stream import RegisteredMemory
    from headrace_kvstore.nvme.segment import page_memory

    memory, address = page_memory(size_bytes)
    held = RegisteredMemory(torch.device("cuda"))
    held.add(address, size_bytes)
    return np.frombuffer(memory, np.uint8), held


def test_a_step_takes_what_the_device_takes() -> None:
    from headrace_kvstore.device.clock import CudaClock, StepTimer

    timer: StepTimer[str] = StepTimer(CudaClock(torch.device("cuda")))
    torch.cuda.synchronize()
    timer.begin()
    began_s = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    called_s = time.perf_counter() - began_s
    timer.end("step")
    assert timer.ended() == [], "nothing waits for the step"
    torch.cuda.synchronize()
    [(_, seconds)] = timer.ended()
    assert seconds > 10 * called_s


def test_a_wait_is_no_part_of_a_step() -> None:
    from headrace_kvstore.device.clock import CudaClock, StepTimer

    timer: StepTimer[str] = StepTimer(CudaClock(torch.device("cuda")))
    torch.cuda.synchronize()
    timer.begin()
    timer.pause()
    time.sleep(0.3)
    timer.resume()
    timer.end("step")
    torch.cuda.synchronize()
    [(_, seconds)] = timer.ended()
    assert seconds < 0.2


@pytest.mark.parametrize("known", [True, False], ids=["registered", "pageable"])
@pytest.mark.parametrize("piece_bytes", [4096, 32768, SIZE])
def test_a_batch_of_copies_moves_the_bytes(known: bool, piece_bytes: int) -> None:
    from headrace_engine.vllm.kv_cache import copy_batch
    from headrace_kvstore.device.copy_stream import CopyStream

    count = 16
    if known:
        memory, held = registered(2 * count * piece_bytes)
    else:
        memory, held = np.zeros(2 * count * piece_bytes, np.uint8), None
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), dtype=np.uint8)
    lane = CopyStream(torch.device("cuda"), count * piece_bytes, copy_batch)
    order = np.random.default_rng(1).permutation(count).astype(np.uint64) * np.uint64(piece_bytes)
    host = np.uint64(memory.ctypes.data)
    there = np.uint64(lane.staging.data_ptr()) + np.arange(count, dtype=np.uint64) * np.uint64(
        piece_bytes
    )
    with lane.exclusive():
        lane.copy(there, host + order, piece_bytes)
        lane.copy(host + np.uint64(count * piece_bytes) + order, there, piece_bytes)
    lane.drain()
    half = count * piece_bytes
    assert (memory[half:] == memory[:half]).all()
    if held is not None:
        held.close()


def test_a_lane_begins_behind_what_the_engine_has_queued() -> None:
    from headrace_engine.vllm.kv_cache import copy_batch
    from headrace_kvstore.device.copy_stream import CopyStream

    lane = CopyStream(torch.device("cuda"), 4096, copy_batch)
    value = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    value += 7
    lane.wait_for_current()
    with lane.exclusive():
        found = lane.fetch(value)
    assert found()[0] == 7


def test_a_copy_does_not_hold_up_the_engines_stream() -> None:
    from headrace_engine.vllm.kv_cache import copy_batch
    from headrace_kvstore.device.copy_stream import CopyStream

    lane = CopyStream(torch.device("cuda"), 4096, copy_batch)
    done = torch.cuda.Event()

    def step() -> None:
        (torch.ones(8, device="cuda") * 2).sum()
        done.record()
        done.synchronize()

    # The first time, kernels are loaded and memory is pinned, both of which wait for the device.
    step()
    with lane.exclusive():
        lane.fetch(lane.staging)()
    torch.cuda.synchronize()
    with lane.exclusive():
        torch.cuda._sleep(CYCLES)
        busy = lane.fetch(lane.staging)
    step()
    mark = lane.clock.mark()
    assert lane.clock.seconds(mark, mark) is None, "the lane is still busy"
    busy()


def test_memory_that_cannot_be_registered_is_told_and_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from headrace_kvstore.device.copy_stream import RegisteredMemory

    held = RegisteredMemory(torch.device("cuda"))
    held.add(4096, 4096)  # nobody's memory
    assert "cannot be registered" in caplog.text
    held.close()
    torch.zeros(1, device="cuda").sum().item()

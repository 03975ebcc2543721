"""Steps and loads are timed by the device that does the work, not by the calls that ask for it."""

from __future__ import annotations

import time

import numpy as np
import pytest

from headrace_engine.connector.loading.layer_pipeline import LayerPipeline
from headrace_engine.connector.messages import LoadSample, StepSample
from headrace_engine.connector.store_work import BlockLoad, StepShape, StoreWork
from headrace_engine.connector.worker_connector import WorkerConnector
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.device.clock import PENDING_STEPS, HostClock, StepTimer
from headrace_kvstore.settings.store_settings import StoreSettings
from tests.support.fake_device import FakeDevice, FakeStream
from tests.support.kvworker import HASHES, LAYERS, NAMES, Node, PlainCache, save, seeds

PROMPT = StepShape(100, 2, 0, 60, 5050)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def test_a_step_takes_what_the_device_takes(device: FakeDevice) -> None:
    stream = FakeStream(device)
    timer: StepTimer[str] = StepTimer(stream)
    timer.begin()
    stream.launch(0.5)
    timer.end("step")
    assert device.now_s == 0.0, "the calls took no time"
    assert timer.ended() == [], "and nothing waits for the step"
    device.passes(0.6)
    assert timer.ended() == [("step", pytest.approx(0.5))]
    assert timer.ended() == [], "each is told once"


def test_a_step_begins_when_the_one_before_has_left_the_device(device: FakeDevice) -> None:
    stream = FakeStream(device)
    timer: StepTimer[int] = StepTimer(stream)
    for step in range(3):
        timer.begin()
        stream.launch(0.1 * (step + 1))
        timer.end(step)
    device.passes(0.35)
    assert [label for label, _ in timer.ended()] == [0, 1]
    device.passes(1.0)
    assert timer.ended() == [(2, pytest.approx(0.3))]


def test_only_the_time_in_which_the_device_idles_is_a_wait(device: FakeDevice) -> None:
    stream = FakeStream(device)
    timer: StepTimer[str] = StepTimer(stream)
    timer.begin()
    stream.launch(0.2)
    timer.pause()
    device.passes(0.5)  # the device is busy for 0.2 of it
    timer.resume()
    stream.launch(0.1)
    timer.pause()
    device.passes(0.05)  # and all through this
    timer.resume()
    timer.end("step")
    device.passes(1.0)
    assert timer.ended() == [("step", pytest.approx(0.3))]


def test_a_step_without_a_label_or_a_begin_is_not_timed(device: FakeDevice) -> None:
    timer: StepTimer[str] = StepTimer(FakeStream(device))
    timer.end("no begin")
    timer.begin()
    timer.end(None)
    timer.end("ended before")
    assert timer.ended() == []


def test_a_device_that_hangs_keeps_no_more_than_a_few_steps(device: FakeDevice) -> None:
    stream = FakeStream(device)
    timer: StepTimer[int] = StepTimer(stream)
    for step in range(3 * PENDING_STEPS):
        timer.begin()
        stream.launch(1.0)
        timer.end(step)
    device.passes(1e6)
    assert len(timer.ended()) == PENDING_STEPS


def test_on_a_host_the_call_is_the_work() -> None:
    clock = HostClock()
    timer: StepTimer[str] = StepTimer(clock)
    timer.begin()
    time.sleep(0.01)
    timer.end("step")
    [(_, seconds)] = timer.ended()
    assert seconds >= 0.01


class OnDevice(PlainCache):
    """An engine's cache on a device: a layer arrives `layer_s` after it was asked for, and not
    before what was computing has ended."""

    def __init__(self, device: FakeDevice, layer_s: float) -> None:
        super().__init__(fill=1)
        self.compute, self.bus, self.layer_s = FakeStream(device), FakeStream(device), layer_s
        self.step_clock, self.load_clock = self.compute, self.bus

    def fence(self) -> float:
        self.bus.wait_for(self.compute)
        return self.bus.mark()

    def load(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        self.bus.launch(self.layer_s)
        self.bus.wait(self.bus.mark())
        return super().load(layer, blocks, payloads, seeds)


def on(device: FakeDevice, node: Node, layer_s: float = 0.25) -> tuple[WorkerConnector, OnDevice]:
    """A worker whose cache is on a device."""
    node.engine(3)
    arena = Arena.attach("a", node.folder)
    cache = OnDevice(device, layer_s)
    worker = WorkerConnector(arena, 0, cache, seeds, StoreSettings())
    node.workers.append(worker)
    return worker, cache


def test_a_workers_step_takes_what_the_device_takes(device: FakeDevice, node: Node) -> None:
    worker, cache = on(device, node)
    worker.open()
    worker.begin(StoreWork(shape=PROMPT))
    cache.compute.launch(2.0)
    worker.end()
    assert worker.samples() == [], "it is still computing"
    worker.open()
    worker.begin(StoreWork())
    worker.end()
    device.passes(3.0)
    [sample] = worker.samples()
    assert isinstance(sample, StepSample)
    assert sample == (*PROMPT, pytest.approx(2.0))


def test_a_workers_load_takes_what_the_bus_takes(device: FakeDevice, node: Node) -> None:
    worker, cache = on(device, node)
    save(worker, [0, 1])
    cache.compute.launch(5.0)  # the step before this one is no part of the load
    worker.open()
    worker.begin(StoreWork(load=BlockLoad([[0, 1]], HASHES[:2])))
    for name in NAMES:
        worker.wait(name)
    worker.end()
    assert worker.samples() == [LoadSample("dram", 2, pytest.approx(0.25 * LAYERS))]
    assert worker.loads() == [("dram", 2, pytest.approx(0.25 * LAYERS))]


def test_what_a_worker_waits_for_kv_is_no_part_of_its_step(
    device: FakeDevice, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, cache = on(device, node, layer_s=0.0)
    save(worker, [0])
    monkeypatch.setattr(LayerPipeline, "wait", lambda *_: device.passes(0.75))
    worker.open()
    worker.begin(StoreWork(load=BlockLoad([[0]], HASHES[:1]), shape=PROMPT))
    for name in NAMES:
        worker.wait(name)
        cache.compute.launch(0.5)
    worker.end()
    device.passes(10.0)
    [step] = [sample for sample in worker.samples() if isinstance(sample, StepSample)]
    assert step.seconds == pytest.approx(0.5 * LAYERS)

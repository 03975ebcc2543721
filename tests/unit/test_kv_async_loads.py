"""Loads that would hold up a step are made ahead of it, beside the engine's other requests."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CUDAGraphMode

from headrace_engine.connector.connector import HeadraceConnector
from headrace_engine.connector.load_price import LoadPrice, TierRun
from headrace_engine.connector.messages import StepMetadata, StepSample
from headrace_engine.connector.store_work import BlockLoad, StoreWork
from headrace_engine.connector.worker_connector import WorkerConnector
from headrace_engine.step_time import StepTime
from headrace_engine.vllm.kv_cache import runs_layer_hooks
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.settings.store_settings import StoreSettings
from tests.support.fake_device import FakeDevice, FakeStream
from tests.support.kvscheduling import B, Engine, Store, Tiers, request
from tests.support.kvworker import HASHES, LAYERS, NAMES, Node, PlainCache, save, seeds
from tests.unit.test_kv_device_clock import PROMPT

# Which loads


def price(token_s: float = 1e-3, dram_s: float | None = 1e-4) -> LoadPrice:
    """An engine that computes a token in `token_s` and loads a block of DRAM in `dram_s`."""
    made = LoadPrice(B, 32, StepTime())
    for tokens in (64, 256, 1024) * 40:
        made.computed(tokens, 0, 0, 0, 0, token_s * tokens)
    for blocks in (1, 8, 64) * 20:
        if dram_s is not None:
            made.loaded("dram", blocks, dram_s * blocks)
    return made


def test_a_load_that_the_step_hides_is_made_under_it() -> None:
    assert not price().ahead([TierRun("dram", 100)], 100 * B, 200 * B, others=3)


def test_a_load_that_others_would_wait_for_is_made_ahead() -> None:
    assert price(dram_s=0.1).ahead([TierRun("dram", 100)], 100 * B, 100 * B + 1, others=1)


def test_alone_a_request_has_nothing_from_loading_ahead() -> None:
    assert not price(dram_s=0.1).ahead([TierRun("dram", 100)], 100 * B, 100 * B + 1, others=0)


def test_many_others_are_worth_a_short_wait() -> None:
    """A step hides all but the first layer's load: 1/32 of it, for each of the others."""
    dear, tail = price(dram_s=1e-3), 200 * B
    chosen = [dear.ahead([TierRun("dram", 100)], 100 * B, tail, others) for others in (1, 16, 40)]
    assert chosen == [False, False, True]


def test_what_nobody_measured_is_loaded_under_the_step_and_measured_there() -> None:
    assert not price(dram_s=None).ahead([TierRun("dram", 100)], 100 * B, 101 * B, others=50)


class Busy(Engine):
    """An engine that computes another request, too."""

    def others(self, *names: str) -> None:
        none = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[])
        none.num_computed_tokens = []
        self.scheduler.step(
            SimpleNamespace(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=none,
                num_scheduled_tokens=dict.fromkeys(names, 1),
                scheduled_spec_decode_tokens={},
            )
        )


def test_a_request_that_would_hold_up_another_one_is_loaded_ahead_of_its_step() -> None:
    req = request(5 * B)
    engine = Busy(Store(set(req.block_hashes)), req, costs=price(dram_s=0.1))
    engine.others("other")
    assert engine.scheduler.matched(req, 0) == 4 * B
    assert engine.scheduler.loads_ahead(req)
    engine.scheduler.allocated(req, [engine.blocks], 4 * B)
    work = engine.idle()
    assert work.load == BlockLoad()
    assert work.ahead == {"r": BlockLoad([engine.blocks[:4]], req.block_hashes[:4])}


def test_an_engine_that_computes_nothing_else_loads_under_the_step() -> None:
    req = request(5 * B)
    engine = Busy(Store(set(req.block_hashes)), req, costs=price(dram_s=0.1))
    assert engine.admit() == 4 * B
    assert not engine.idle().ahead
    engine.others("r")
    assert engine.scheduler.matched(req, 0) and not engine.scheduler.loads_ahead(req), (
        "it is no other"
    )


def test_what_did_not_come_is_not_loaded_ahead_again() -> None:
    req = request(5 * B)
    engine = Busy(Store(set(req.block_hashes)), req, costs=price(dram_s=0.1))
    engine.others("other")
    engine.admit()
    engine.others("other")
    assert engine.scheduler.matched(req, 0) == 4 * B
    assert not engine.scheduler.loads_ahead(req)


def test_where_vllm_recovers_no_load_under_a_step_all_are_made_ahead() -> None:
    req = request(5 * B)
    engine = Busy(Store(set(req.block_hashes)), req, costs=price(), under_steps=False)
    assert engine.admit() == 4 * B
    work = engine.idle()
    assert work.load == BlockLoad() and work.ahead["r"].blocks == [engine.blocks[:4]]
    assert engine.scheduler.matched(req, 0) == 0, "what did not come is computed"
    engine.step(4 * B, new=True)
    engine.request.num_computed_tokens = 0
    assert engine.scheduler.matched(req, 0) == 4 * B, "after a preemption it is loaded again"
    assert engine.scheduler.loads_ahead(req)


def test_ahead_of_a_step_nothing_hides_a_load() -> None:
    costs = price(token_s=1e-3)
    for blocks in (1, 8, 64) * 20:
        costs.loaded("nvme", blocks, 1.5e-3 * B * blocks)
    offered = [TierRun("nvme", 10)]
    assert costs.choose(0, offered, 100 * B).blocks == 10
    assert costs.choose(0, offered, 100 * B, ahead=True).blocks <= 1, "at most to try the disk"


def test_a_load_ahead_of_a_slow_tier_keeps_its_limit() -> None:
    req = request(5 * B)
    tiers, costs = Tiers(*req.block_hashes), price()
    costs.loaded("nvme", 4, 0.05)
    engine = Busy(Store(), req, slow=tiers, price=costs, costs=costs)
    engine.others("other")
    tiers.ready = True
    assert engine.scheduler.matched(req, 0) == 4 * B and engine.scheduler.loads_ahead(req)
    engine.scheduler.allocated(req, [engine.blocks], 4 * B)
    load = engine.idle().ahead["r"]
    assert set(load.places) == set(req.block_hashes[:4])
    assert load.limits_s == [pytest.approx(costs.compute_s(0, 4 * B))]


# How they run


class SlowCache(PlainCache):
    """A cache whose loads ahead come when the test lets them; others take no time."""

    def __init__(self, device: FakeDevice, fill: int = 1) -> None:
        super().__init__(fill)
        self.device, self.compute = device, FakeStream(device)
        self.step_clock = self.compute
        self.comes, self.asked = threading.Event(), threading.Event()
        self.fenced = self.drained = 0

    def beside(self) -> SlowCache:
        other = SlowCache(self.device)
        other.data, self.other = self.data, other
        return other

    def fence(self) -> None:
        self.fenced += 1

    def drain(self) -> None:
        self.drained += 1

    def load(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        if not hasattr(self, "other"):  # this is the one beside
            self.asked.set()
            assert self.comes.wait(20)
        return super().load(layer, blocks, payloads, seeds)


def slow(node: Node) -> tuple[WorkerConnector, SlowCache, FakeDevice]:
    node.engine(3)
    arena, device = Arena.attach("a", node.folder), FakeDevice()
    cache = SlowCache(device)
    worker = WorkerConnector(arena, 0, cache, seeds, StoreSettings())
    node.workers.append(worker)
    return worker, cache, device


def decode(worker: WorkerConnector, cache: SlowCache, device: FakeDevice, work: StoreWork) -> None:
    """A step of 10 ms on the device, by layers."""
    worker.open(ahead=bool(work.ahead))
    worker.begin(work)
    for name in NAMES:
        worker.wait(name)
        cache.compute.launch(0.01 / LAYERS)
    worker.end()
    device.passes(0.011)


def ended(worker: WorkerConnector) -> None:
    """Let the thread of loads ahead come to the end of what it has."""
    worker.dram_thread_ahead.submit(lambda: None).result(20)


def test_a_slow_copy_does_not_lengthen_a_decode_step(node: Node) -> None:
    worker, cache, device = slow(node)
    save(worker, [0, 1])
    decode(worker, cache, device, StoreWork(shape=PROMPT))
    ahead = {"r": BlockLoad([[0, 1]], HASHES[:2])}
    decode(worker, cache, device, StoreWork(ahead=ahead, shape=PROMPT))
    assert cache.other.asked.wait(20), "the copy is under way"
    for _ in range(3):
        decode(worker, cache, device, StoreWork(shape=PROMPT))
        assert worker.loaded_ahead() == set()
    steps = [sample.seconds for sample in worker.samples() if isinstance(sample, StepSample)]
    assert steps == [pytest.approx(0.01)] * 5
    cache.other.comes.set()
    ended(worker)
    decode(worker, cache, device, StoreWork())
    assert worker.loaded_ahead() == {"r"}
    assert worker.loaded_ahead() == set(), "told once"
    assert worker.failed_blocks() == set() and worker.counts["loaded_dram"] == 2


def test_a_steps_own_load_waits_for_no_load_ahead(node: Node) -> None:
    worker, cache, device = slow(node)
    save(worker, [0, 1, 2])
    cache.data[:, 2] = 0
    ahead = {"r": BlockLoad([[0, 1]], HASHES[:2])}
    work = StoreWork(load=BlockLoad([[2]], HASHES[2:3]), ahead=ahead)
    decode(worker, cache, device, work)
    assert cache.data[:, 2].any() and worker.loaded_ahead() == set()
    assert cache.other.fenced == 1, "blocks may still be in use by steps that were queued before"
    cache.other.comes.set()


def test_blocks_that_do_not_come_ahead_are_told_with_their_request(node: Node) -> None:
    worker, cache, device = slow(node)
    save(worker, [0])
    cache.other.comes.set()
    decode(worker, cache, device, StoreWork(ahead={"r": BlockLoad([[0, 1]], HASHES[:2])}))
    ended(worker)
    decode(worker, cache, device, StoreWork())
    assert (worker.loaded_ahead(), worker.failed_blocks()) == ({"r"}, {1})


def test_a_load_ahead_that_fails_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, cache, device = slow(node)
    save(worker, [0])

    def broken(*_: object) -> np.ndarray:
        raise MemoryError("no")

    monkeypatch.setattr(cache.other, "load", broken)
    decode(worker, cache, device, StoreWork(ahead={"r": BlockLoad([[0]], HASHES[:1])}))
    ended(worker)
    decode(worker, cache, device, StoreWork())
    assert (worker.loaded_ahead(), worker.failed_blocks()) == ({"r"}, {0})
    assert cache.other.drained, "nothing arrives later in blocks that are computed"
    monkeypatch.setattr(worker, "_sources", broken)
    decode(worker, cache, device, StoreWork(ahead={"s": BlockLoad([[0]], HASHES[:1])}))
    ended(worker)
    decode(worker, cache, device, StoreWork())
    assert (worker.loaded_ahead(), worker.failed_blocks()) == ({"s"}, {0})


# Graphs


def context(mode: CUDAGraphMode, metadata: Any = "a step") -> SimpleNamespace:
    return SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=mode)


def test_full_graphs_stay_on() -> None:
    assert not HeadraceConnector.requires_piecewise_for_cudagraph({})


def test_layers_are_waited_for_where_vllm_asks_for_them() -> None:
    assert runs_layer_hooks(context(CUDAGraphMode.NONE))
    assert runs_layer_hooks(context(CUDAGraphMode.PIECEWISE))
    assert not runs_layer_hooks(context(CUDAGraphMode.FULL))
    assert not runs_layer_hooks(context(CUDAGraphMode.NONE, None))


@pytest.mark.parametrize(
    ("mode", "by_layers"), [(CUDAGraphMode.FULL, False), (CUDAGraphMode.PIECEWISE, True)]
)
def test_the_connector_says_how_a_step_waits(mode: CUDAGraphMode, by_layers: bool) -> None:
    asked: list[tuple[StoreWork, bool]] = []
    work = StoreWork()
    connector = object.__new__(HeadraceConnector)
    connector._worker = SimpleNamespace(begin=lambda *call: asked.append(call))  # type: ignore
    connector._get_connector_metadata = lambda: StepMetadata(work)  # type: ignore[method-assign]
    connector.start_load_kv(context(mode))
    assert asked == [(work, by_layers)]


def test_a_full_graph_begins_when_all_its_kv_is_there(node: Node) -> None:
    worker, cache, _ = slow(node)
    save(worker, [0, 1])
    truth = cache.data[:, :2].copy()
    cache.data[:] = 0
    worker.open()
    worker.begin(StoreWork(load=BlockLoad([[0, 1]], HASHES[:2])), by_layers=False)
    assert (cache.data[:, :2] == truth).all()
    worker.end()
    assert worker.failed_blocks() == set()


def test_a_step_without_a_load_waits_for_nothing_and_may_be_a_full_graph(node: Node) -> None:
    worker, cache, device = slow(node)
    worker.open()
    worker.begin(StoreWork(shape=PROMPT), by_layers=False)
    cache.compute.launch(0.01)  # one launch, and no call of the connector inside
    worker.end()
    device.passes(0.02)
    [step] = worker.samples()
    assert step.seconds == pytest.approx(0.01)
    assert cache.fenced == 0

"""A decode replica's planner and the machine's KV store: which engine is taken to load what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headrace.observability.metrics import RayPlanMetrics
from headrace.replica.planner import ReplicaPlanner
from headrace.router import Geometry, Plan, Router, RouterSettings
from headrace_engine.kv_transfer.handoff import PrefillResult
from headrace_engine.meter import EngineMeter, Step, StoreLoad
from headrace_kvstore.lookup.availability import AvailableRun

BLOCK = 16
PROMPT = range(10 * BLOCK + 1)


class Store:
    """A `StoreView` that finds the same of every prompt."""

    def __init__(self, *found: AvailableRun) -> None:
        self.found = list(found)
        self.asked: list[tuple[int, str, float]] = []
        self.lookup_failures: dict[str, int] = {}

    async def available_runs(
        self, token_ids: Sequence[int], salt: str, compute_s: float
    ) -> list[AvailableRun]:
        self.asked.append((len(token_ids), salt, compute_s))
        await asyncio.sleep(0)
        return self.found


def planner(store: Store | None, meter: EngineMeter | None = None) -> ReplicaPlanner:
    router = Router(RouterSettings(policy="remote"), Geometry(BLOCK, 1000, 100, 100))
    return ReplicaPlanner(router, meter or EngineMeter(), store, "here")  # type: ignore[arg-type]


def plan(planner: ReplicaPlanner, local_only: str | None = None) -> Plan:
    return asyncio.run(planner.plan("r", PROMPT, "tenant", local_only))


def prefilled(machine: str, *loads: tuple[str, int, float]) -> PrefillResult:
    return PrefillResult({}, 0.0, 0.1, 0, 1, machine=machine, loads=loads)


def test_a_prompt_that_lies_on_nvme_only_is_planned_as_loaded() -> None:
    store = Store(AvailableRun("nvme", 10 * BLOCK))
    mine = planner(store)
    mine.policy = "local"
    made = plan(mine)
    assert (made.loaded_tokens, made.loaded_from) == (10 * BLOCK, {"nvme": 10 * BLOCK})
    [(tokens, salt, compute_s)] = store.asked
    assert (tokens, salt) == (len(PROMPT), "tenant") and compute_s > 0


def test_questions_that_the_store_did_not_answer_are_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, told = Store(), list[dict[str, int]]()
    mine = planner(store)
    monkeypatch.setattr(mine.metrics, "lookups_failed", told.append)
    plan(mine)
    assert told == []
    store.lookup_failures = {"NodeUnavailable": 2}
    plan(mine)
    assert told == [{"NodeUnavailable": 2}]
    RayPlanMetrics().lookups_failed({"NodeUnavailable": 2})


@pytest.mark.parametrize(("machine", "loaded"), [("here", 10 * BLOCK), ("elsewhere", 0)])
def test_only_engines_of_this_machine_load_from_its_store(machine: str, loaded: int) -> None:
    mine = planner(Store(AvailableRun("nvme", 10 * BLOCK)))
    mine.prefill_done("an earlier one", prefilled(machine), 0.2)
    made = plan(mine)
    assert (made.kind, made.loaded_tokens) == ("remote", loaded)


def test_without_a_store_nothing_is_loaded() -> None:
    assert plan(planner(None)).loaded_tokens == 0


def test_what_must_be_computed_is_not_looked_for() -> None:
    store = Store(AvailableRun("dram", 10 * BLOCK))
    assert plan(planner(store), "prompt logprobs").loaded_tokens == 0
    assert store.asked == []


def test_loads_teach_their_own_medium_s_speed() -> None:
    meter = EngineMeter()
    mine = planner(Store(), meter)
    for size in (10**6, 10**7) * 60:
        loads = [StoreLoad("dram", size, size / 1e9), StoreLoad("nvme", size, size / 1e7)]
        meter.store({}, loads, [])
        mine.prefill_done("r", prefilled("here", ("object", size, size / 1e8)), 0.2)
    costs = mine.router.costs
    for medium, speed in (("dram", 1e9), ("nvme", 1e7), ("object", 1e8)):
        assert costs.load(medium).seconds(10**7) == pytest.approx(10**7 / speed, rel=0.1)
    assert {"load_dram", "load_nvme"} <= mine.snapshot()["fits"].keys()


def test_a_prefill_engines_step_times_price_prompts_here() -> None:
    mine, there = planner(None), EngineMeter()
    for _ in range(30):
        there.step(Step(1000, 0, 0, 0, 0, 5.0))
    told = replace(prefilled("here"), step_time=there.step_time.to_dict())
    mine.prefill_done("r", told, 5.1)
    assert mine.router.costs.prefill_step.seconds(1000) == there.step_time.seconds(1000)
    mine.prefill_done("r", replace(told, step_time={"state": "nonsense"}), 5.1)
    assert mine.router.costs.prefill_step.seconds(1000) == there.step_time.seconds(1000)


@pytest.mark.parametrize("given", [None, b"a gateway's"])
def test_a_prompt_that_reuses_kv_at_other_places_is_priced_by_what_is_computed(
    given: bytes | None,
) -> None:
    store = Store()
    mine = planner(store)
    mine.policy = "local"
    made = asyncio.run(mine.plan("r", PROMPT, "its own", None, given, computed=2 * BLOCK + 1))
    assert (made.compute_tokens, made.loaded_from) == (2 * BLOCK + 1, {"dram": 8 * BLOCK})
    assert store.asked == []

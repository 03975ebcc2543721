"""The metrics that the dashboards brought along: of the store's nodes, and of plans' outcomes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.observability import metrics, store, totals
from headrace.observability.metrics import RayPlanMetrics
from headrace.observability.store import RayStoreMetrics
from tests.unit.test_speculation_report_poller import Recorded


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ignored:
        def __init__(self, *args: Any, **fields: Any) -> None: ...

    for module in (metrics, totals):
        monkeypatch.setattr(module, "Counter", Recorded)
    for module in (metrics, store):
        monkeypatch.setattr(module, "Gauge", Recorded)
    monkeypatch.setattr(metrics, "Histogram", Ignored)
    monkeypatch.setattr(Recorded, "values", {})


def node(evicted: int = 0, nvme: str = "on", **more: Any) -> dict[str, Any]:
    """What a node tells."""
    dram = {"state": "on", "bytes": 60, "size_bytes": 100, "blocks": 6, "evicted_total": evicted}
    disk = {"state": nvme, "bytes": 500, "size_bytes": 1000, "blocks": 50, "writes": 7}
    return {"tiers": {"dram": dram, "nvme": disk, "object": {"state": "off"}}, **more}


def value(name: str, *tags: str) -> float | None:
    return Recorded.values.get((f"headrace_store_{name}", *(tags or ("",))))


def test_nodes_are_counted_and_tiers_summed() -> None:
    peers = {"a": {"state": "up", "left_alone": False}, "b": {"state": "up", "left_alone": True}}
    RayStoreMetrics(("dram", "nvme"))(
        {"m1": node(remote={"peers": peers}), "m2": node(nvme="read-only"), "m3": None}
    )
    assert (value("nodes", "yes"), value("nodes", "no")) == (2, 1)
    assert (value("tiers", "nvme", "on"), value("tiers", "nvme", "read-only")) == (1, 1)
    assert (value("bytes", "dram"), value("size_bytes", "dram")) == (120, 200)
    assert (value("peers", "up"), value("peers", "down")) == (1, 1)
    assert value("block_events", "nvme", "stored") == 14


def test_a_tier_that_is_not_configured_is_not_called_off() -> None:
    RayStoreMetrics(("dram",))({"m1": node()})
    assert value("tiers", "object", "off") is None


def test_an_object_store_that_takes_no_writes_is_read_only() -> None:
    assert store.state({"state": "on", "writing": "off"}) == "read-only"
    assert store.state({"state": "off", "writing": "off"}) == "off"


def test_counts_only_grow_though_nodes_start_anew_and_leave() -> None:
    tell = RayStoreMetrics(("dram",))
    told = (node(5), node(8), None, node(2))
    for stats in told:
        tell({"m1": stats})
    assert value("block_events", "dram", "evicted") == 8 + 2
    tell({})
    tell({"m1": node(3)})
    assert value("block_events", "dram", "evicted") == 8 + 2 + 3


def test_what_came_of_plans_becomes_counters() -> None:
    sums = {
        "prompt_tokens": 100,
        "reachable_tokens": 60,
        "reached_tokens": 50,
    }
    tell = RayPlanMetrics()
    tell.update_totals(1, sums)
    tell.update_totals(0, {**sums, "prompt_tokens": 150})
    found = Recorded.values
    assert found["headrace_plan_prompt_tokens", "all"] == 150
    assert found["headrace_plan_prompt_tokens", "reused"] == 50
    assert found["headrace_prefill_replicas_failing", ""] == 0


def test_totals_since_a_start_are_counters() -> None:
    """A counter may begin again at 0; of a gauge, Prometheus' `rate` makes nonsense then."""
    tell = RayPlanMetrics()
    for total in (10, 25, 4):  # the third is of a process that was started again
        tell.transferred(total)
        tell.lookups_failed({"NodeUnavailable": total})
    assert Recorded.values["headrace_nixl_bytes", ""] == 29
    assert Recorded.values["headrace_kv_lookup_failures", "NodeUnavailable"] == 29


def test_the_pages_of_several_nodes_become_one_with_each_family_in_one_group() -> None:
    def page(node: str) -> bytes:
        return (
            f"# HELP ray_vllm_a Of {node}.\n# TYPE ray_vllm_a counter\n"
            f'ray_vllm_a_total{{node="{node}"}} 1\n'
            "# HELP ray_headrace_h H.\n# TYPE ray_headrace_h histogram\n"
            f'ray_headrace_h_bucket{{le="+Inf",node="{node}"}} 2\n'
            f'ray_headrace_h_count{{node="{node}"}} 2\n'
            "# HELP ray_other O.\n# TYPE ray_other gauge\nray_other 3\n# EOF\n"
        ).encode()

    text = metrics.merged([page("x"), b"", page("y"), page("x")]).decode()
    assert text.splitlines() == [
        "# HELP ray_vllm_a Of x.",
        "# TYPE ray_vllm_a counter",
        'ray_vllm_a_total{node="x"} 1',
        'ray_vllm_a_total{node="y"} 1',
        "# HELP ray_headrace_h H.",
        "# TYPE ray_headrace_h histogram",
        'ray_headrace_h_bucket{le="+Inf",node="x"} 2',
        'ray_headrace_h_count{node="x"} 2',
        'ray_headrace_h_bucket{le="+Inf",node="y"} 2',
        'ray_headrace_h_count{node="y"} 2',
    ]

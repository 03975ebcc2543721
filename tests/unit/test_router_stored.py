"""What a plan makes of KV in each tier: what is loaded, at which speed, after which wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.router import Geometry, Plan, PlanRequest, Router, RouterSettings
from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.place import place
from headrace.router.placement.request import PlacementRequest
from headrace_kvstore.lookup.availability import AvailableRun

BLOCK, TOKEN_BYTES = 16, 1000


def placed(
    available_runs: Sequence[AvailableRun], cached: int = 0, tokens: int = 1000, **fixed_s: float
) -> Plan:
    """One engine with blocks of 8 tokens. A medium's load takes what is said here, or nothing."""
    view = ClusterView(8, TOKEN_BYTES)
    view.add("d", "decode", view.node("here"), hbm=0)
    for medium in ("dram", "nvme"):
        view.set_load(0, medium, fixed_s.get(medium, 0.0), 0.0)
    held = np.array([cached // 8], np.int32)
    return place(view, PlacementRequest("a", tokens, held=held, available_runs=[available_runs]))


RUNS = [AvailableRun("dram", 32), AvailableRun("nvme", 64), AvailableRun("remote", 16, 0.001)]


def test_all_is_taken_where_loading_is_cheaper() -> None:
    plan = placed(RUNS)
    assert plan.loaded_from == {"dram": 32, "nvme": 64, "remote": 16}
    assert plan.predicted["local.pull"] == 0.001


def test_the_leading_run_in_dram_is_taken_in_any_case_and_nothing_behind_it() -> None:
    assert placed(RUNS, dram=30.0, nvme=90.0).loaded_from == {"dram": 32}
    assert placed(RUNS[1:], dram=30.0, nvme=90.0).loaded_from == {}


def test_equal_prices_are_loaded() -> None:
    """All of it comes under the load of the first run."""
    runs = [*RUNS[:2], AvailableRun("remote", 16)]
    assert placed(runs, dram=10.0).loaded_from == {"dram": 32, "nvme": 64, "remote": 16}


def test_a_run_is_taken_to_its_end_or_not_at_all() -> None:
    late = [*RUNS[:2], AvailableRun("remote", 16, 0.5)]
    assert placed(late).loaded_from == {"dram": 32, "nvme": 64}


def test_what_the_engine_itself_has_is_neither_loaded_nor_waited_for() -> None:
    for cached, loaded, wait_s in (
        (48, {"nvme": 48, "remote": 16}, 0.001),
        (104, {"remote": 8}, 0.0005),
        (112, {}, 0.0),
        (504, {}, 0.0),
    ):
        plan = placed(RUNS, cached)
        assert (plan.loaded_from, plan.predicted["local.pull"]) == (loaded, wait_s)


def test_no_more_is_loaded_than_is_of_use() -> None:
    for tokens, loaded, wait_s in (
        (105, {"dram": 32, "nvme": 64, "remote": 8}, 0.0005),
        (104, {"dram": 32, "nvme": 64}, 0.0),
        (1, {}, 0.0),
    ):
        plan = placed(RUNS, tokens=tokens)
        assert (plan.loaded_from, plan.predicted["local.pull"]) == (loaded, wait_s)


def test_what_is_pulled_is_read_from_dram() -> None:
    def load_s(*runs: AvailableRun) -> float:
        p = placed(runs, dram=0.3, nvme=0.4, tokens=1601).predicted
        return p["local.compute"] + p["local.load"]

    pulled = AvailableRun("remote", 1560), AvailableRun("object", 40)
    assert load_s(*pulled) == pytest.approx(0.3)
    assert load_s(AvailableRun("nvme", 1600)) == pytest.approx(0.4)
    assert load_s(AvailableRun("nvme", 800), AvailableRun("remote", 800)) == pytest.approx(0.7)


# In plans


@pytest.fixture
def router() -> Router:
    """Computes a token in 1 ms."""
    router = Router(RouterSettings(policy="local"), Geometry(BLOCK, TOKEN_BYTES, 1000, 1000))
    for _ in range(50):
        for tokens in (1, 100, 400):
            router.costs.decode_step.observe(tokens, 0, 0, 0, 0, 0.01 + 1e-3 * tokens)
            router.costs.prefill_step.observe(tokens, 0, 0, 0, 0, 0.01 + 1e-3 * tokens)
    return router


def measured(router: Router, medium: str, bytes_per_s: float) -> None:
    for _ in range(50):
        for size in (10**4, 10**6):
            router.observe_load(medium, size, size / bytes_per_s)


def plan(
    router: Router, *stored: AvailableRun, tokens: int = 20 * BLOCK + 1, name: str = "a"
) -> Plan:
    made = router.plan(PlanRequest(name, range(tokens), stored=stored))
    router.finished(name)
    return made


def test_a_prompt_that_lies_on_nvme_only_is_planned_as_loaded(router: Router) -> None:
    measured(router, "nvme", 1e7)
    made = plan(router, AvailableRun("nvme", 20 * BLOCK))
    assert (made.loaded_tokens, made.loaded_from) == (20 * BLOCK, {"nvme": 20 * BLOCK})
    assert made.to_dict()["loaded_from"] == {"nvme": 20 * BLOCK}
    computed = plan(router)
    assert computed.predicted_ttft_s == pytest.approx(0.01 + 0.321, rel=0.1)
    assert made.predicted_ttft_s == pytest.approx(0.032, rel=0.1), "320 kB at 10 MB/s"


def test_each_medium_is_priced_at_its_own_speed(router: Router) -> None:
    measured(router, "dram", 1e9)
    measured(router, "nvme", 1e6)
    fast = plan(router, AvailableRun("dram", 10 * BLOCK))
    assert fast.loaded_from == {"dram": 10 * BLOCK}
    slow = plan(router, AvailableRun("dram", 5 * BLOCK), AvailableRun("nvme", 5 * BLOCK))
    assert slow.loaded_from == {"dram": 5 * BLOCK, "nvme": 5 * BLOCK}
    assert slow.predicted["local.load"] == 0.0, "80 ms under 171 ms of computing"
    alone = plan(router, AvailableRun("nvme", 20 * BLOCK))
    assert alone.predicted["local.load"] > 0.25


def test_a_disk_slower_than_computing_is_planned_as_computed(router: Router) -> None:
    measured(router, "nvme", 1e5)
    made = plan(router, AvailableRun("dram", 2 * BLOCK), AvailableRun("nvme", 18 * BLOCK))
    assert (made.loaded_tokens, made.loaded_from) == (2 * BLOCK, {"dram": 2 * BLOCK})


def test_the_wait_for_a_peer_is_part_of_the_price(router: Router) -> None:
    measured(router, "dram", 1e9)
    made = plan(router, AvailableRun("remote", 20 * BLOCK, 0.1))
    assert made.loaded_from == {"remote": 20 * BLOCK}
    assert made.predicted["local.pull"] == 0.1
    p = made.predicted
    parts = ("queue", "pull", "compute", "load", "stall")
    assert p["local.total"] == pytest.approx(sum(p[f"local.{part}"] for part in parts))
    assert "pull 0.100" in made.reasons[-1]
    late = plan(router, AvailableRun("remote", 20 * BLOCK, 10.0))
    assert late.loaded_from == {} and late.predicted["local.pull"] == 0.0


def test_the_last_token_is_computed_whatever_the_store_holds(router: Router) -> None:
    made = plan(router, AvailableRun("nvme", 4 * BLOCK), tokens=4 * BLOCK)
    assert made.loaded_tokens == 3 * BLOCK

"""What a plan makes of KV in each tier: what is loaded, at which speed, after which wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from headrace.router import Geometry, Plan, PlanRequest, PrefillReport, Router, RouterSettings
from headrace.router.stored import Loaded, worth_loading
from headrace_kvstore.supply import Supply

BLOCK, TOKEN_BYTES = 16, 1000


def cheapest(
    supplies: Sequence[Supply],
    price: Callable[[Loaded], float],
    cached: int = 0,
    useful: int = 10**6,
) -> tuple[dict[str, int], float]:
    loaded = worth_loading(supplies, cached, useful, price)
    return dict(loaded.by_medium), loaded.wait_s


def most(loaded: Loaded) -> float:
    return -loaded.tokens


def least(loaded: Loaded) -> float:
    return loaded.tokens


RUNS = [Supply("dram", 32), Supply("nvme", 64), Supply("remote", 16, 0.5)]


def test_all_is_taken_where_loading_is_cheaper() -> None:
    assert cheapest(RUNS, most) == ({"dram": 32, "nvme": 64, "remote": 16}, 0.5)


def test_the_leading_run_in_dram_is_taken_in_any_case_and_nothing_behind_it() -> None:
    assert cheapest(RUNS, least) == ({"dram": 32}, 0.0)
    assert cheapest(RUNS[1:], least) == ({}, 0.0)


def test_equal_prices_are_loaded() -> None:
    assert cheapest(RUNS, lambda loaded: 1.0)[0] == {"dram": 32, "nvme": 64, "remote": 16}


def test_only_the_ends_of_runs_are_compared() -> None:
    assert cheapest(RUNS, lambda loaded: abs(loaded.tokens - 90))[0] == {"dram": 32, "nvme": 64}


def test_what_the_engine_itself_has_is_neither_loaded_nor_waited_for() -> None:
    assert cheapest(RUNS, most, cached=48) == ({"nvme": 48, "remote": 16}, 0.5)
    assert cheapest(RUNS, most, cached=104) == ({"remote": 8}, 0.25)
    assert cheapest(RUNS, most, cached=112) == ({}, 0.0)
    assert cheapest(RUNS, most, cached=500) == ({}, 0.0)


def test_no_more_is_loaded_than_is_of_use() -> None:
    assert cheapest(RUNS, most, useful=104) == ({"dram": 32, "nvme": 64, "remote": 8}, 0.25)
    assert cheapest(RUNS, most, useful=96) == ({"dram": 32, "nvme": 64}, 0.0)
    assert cheapest(RUNS, most, useful=0) == ({}, 0.0)


def test_what_is_pulled_is_read_from_dram() -> None:
    loaded = Loaded({"dram": 1, "nvme": 2, "remote": 4, "object": 8})
    assert loaded.bytes_read(10) == {"dram": 130, "nvme": 20}


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


def plan(router: Router, *stored: Supply, tokens: int = 20 * BLOCK + 1, name: str = "a") -> Plan:
    made = router.plan(PlanRequest(name, range(tokens), stored_decode=stored))
    router.finished(name)
    return made


def test_a_prompt_that_lies_on_nvme_only_is_planned_as_loaded(router: Router) -> None:
    measured(router, "nvme", 1e7)
    made = plan(router, Supply("nvme", 20 * BLOCK))
    assert (made.loaded_tokens, made.loaded_from) == (20 * BLOCK, {"nvme": 20 * BLOCK})
    assert made.to_dict()["loaded_from"] == {"nvme": 20 * BLOCK}
    computed = plan(router)
    assert computed.predicted_ttft_s == pytest.approx(0.01 + 0.321, rel=0.1)
    assert made.predicted_ttft_s == pytest.approx(0.032, rel=0.1), "320 kB at 10 MB/s"


def test_each_medium_is_priced_at_its_own_speed(router: Router) -> None:
    measured(router, "dram", 1e9)
    measured(router, "nvme", 1e6)
    fast = plan(router, Supply("dram", 10 * BLOCK))
    assert fast.loaded_from == {"dram": 10 * BLOCK}
    slow = plan(router, Supply("dram", 5 * BLOCK), Supply("nvme", 5 * BLOCK))
    assert slow.loaded_from == {"dram": 5 * BLOCK, "nvme": 5 * BLOCK}
    assert slow.predicted["local.load"] == 0.0, "80 ms under 171 ms of computing"
    alone = plan(router, Supply("nvme", 20 * BLOCK))
    assert alone.predicted["local.load"] > 0.25


def test_a_disk_slower_than_computing_is_planned_as_computed(router: Router) -> None:
    measured(router, "nvme", 1e5)
    made = plan(router, Supply("dram", 2 * BLOCK), Supply("nvme", 18 * BLOCK))
    assert (made.loaded_tokens, made.loaded_from) == (2 * BLOCK, {"dram": 2 * BLOCK})


def test_the_wait_for_a_peer_is_part_of_the_price(router: Router) -> None:
    measured(router, "dram", 1e9)
    made = plan(router, Supply("remote", 20 * BLOCK, 0.1))
    assert made.loaded_from == {"remote": 20 * BLOCK}
    assert made.predicted["local.pull"] == 0.1
    p = made.predicted
    parts = ("queue", "pull", "compute", "load", "stall")
    assert p["local.total"] == pytest.approx(sum(p[f"local.{part}"] for part in parts))
    assert "pull 0.100" in made.reasons[-1]
    late = plan(router, Supply("remote", 20 * BLOCK, 10.0))
    assert late.loaded_from == {} and late.predicted["local.pull"] == 0.0


def test_the_last_token_is_computed_whatever_the_store_holds(router: Router) -> None:
    made = plan(router, Supply("nvme", 4 * BLOCK), tokens=4 * BLOCK)
    assert made.loaded_tokens == 3 * BLOCK


def test_a_pull_at_the_prefill_engine_is_no_queue_of_others(router: Router) -> None:
    router.settings = RouterSettings(policy="remote")
    for name in "abcdef":
        request = PlanRequest(
            name,
            range(ord(name) * 1000, ord(name) * 1000 + 20 * BLOCK + 1),
            stored_prefill=(Supply("object", 20 * BLOCK, 0.2),),
        )
        made = router.plan(request)
        assert (made.kind, made.loaded_from) == ("remote", {"object": 20 * BLOCK})
        assert made.predicted["remote.pull"] == 0.2
        assert made.timeout_s > 0.2
        router.prefill_done(name, PrefillReport(0.25, 0.2, 0.03, 0, 1))
        router.first_token(name, 0.3, 0)
        router.finished(name)
    assert router.sides[""].others.seconds() < 0.02

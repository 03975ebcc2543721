"""Which engines each placement policy chooses, and that its choices become whole plans."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from headrace.placement_policies import RULES
from headrace.router.placement import policies
from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.place import place, place_engines
from headrace.router.placement.policies import LeastLoaded, make_policy, policy_names
from headrace.router.placement.request import NoDecodeReplicaError, PlacementRequest
from headrace.router.plan import Plan, RouterSettings

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = 16
PROMPT = 100 * BLOCK + 1


class Bench:
    """A policy and a view, each engine on a node of its own; holder i is the cache of engine i."""

    def __init__(self, name: str, prefills: int = 2, decodes: int = 2) -> None:
        self.policy = make_policy(name)
        self.view = cluster(prefills, decodes)

    def ask(self, held: tuple[int, ...] = (), **more: object) -> Plan:
        blocks = np.array(held, np.int32)
        request = PlacementRequest("a", PROMPT, held=blocks, **more)  # type: ignore[arg-type]
        return place(self.view, request, self.policy)

    def busy(self, name: str, running: int) -> None:
        self.view.engines[self.view.row(name)]["running"] = running


def cluster(prefills: int, decodes: int) -> ClusterView:
    view = ClusterView(BLOCK, 1000.0, RouterSettings())
    for at in range(prefills + decodes):
        role = "prefill" if at < prefills else "decode"
        name = f"{role[0]}{at if at < prefills else at - prefills}"
        view.add(name, role, view.node(str(at)), hbm=at)  # type: ignore[arg-type]
    return view


def test_round_robin_takes_engines_in_turn() -> None:
    bench = Bench("round-robin", prefills=2, decodes=3)
    plans = [bench.ask() for _ in range(6)]
    assert [plan.replica for plan in plans] == ["p0", "p1"] * 3
    assert [plan.decode for plan in plans] == ["d0", "d1", "d2"] * 2


def test_least_loaded_takes_the_engines_with_the_fewest_requests() -> None:
    bench = Bench("least-loaded")
    bench.busy("d0", 3), bench.busy("d1", 2)
    bench.view.engines[bench.view.row("p0")]["prompts"] = 1
    plan = bench.ask()
    assert (plan.replica, plan.decode) == ("p1", "d1")


def test_prefix_affinity_takes_the_longest_prefix_of_an_engine_that_is_not_overloaded() -> None:
    bench = Bench("prefix-affinity", prefills=0, decodes=3)
    assert bench.ask((0, 90, 50)).decode == "d1"
    bench.busy("d1", 2)
    assert bench.ask((0, 90, 50)).decode == "d2", "its load is above the bound"


def test_prompts_with_the_same_beginning_meet_before_any_cache_is_known() -> None:
    bench = Bench("prefix-affinity", prefills=4, decodes=1)
    chosen = {bench.ask(affinity=7).replica for _ in range(5)}
    spread = {bench.ask(affinity=number).replica for number in range(40)}
    assert len(chosen) == 1 and len(spread) == 4


@pytest.mark.parametrize("name", policies.POLICIES)
def test_a_choice_becomes_a_whole_plan(name: str) -> None:
    bench = Bench(name)
    plan = bench.ask((40, 40, 0, 0))
    assert plan.kind == "remote" and plan.timeout_s > 0.0
    assert plan.compute_tokens == PROMPT - 40 * BLOCK
    assert sum(run.tokens for run in plan.runs) == PROMPT
    assert plan.predicted["remote.total"] > 0.0
    local = bench.ask(local_only="n > 1")
    assert local.kind == "local" and local.replica == ""


@pytest.mark.parametrize("name", policies.POLICIES)
def test_engines_that_may_not_be_asked_get_nothing(name: str) -> None:
    bench = Bench(name)
    for off in ("p0", "d1"):
        for role in ("prefill", "decode"):
            bench.view.engines[bench.view.row(off)][role] = False
    for _ in range(4):
        plan = bench.ask()
        assert (plan.replica, plan.decode) == ("p1", "d0")
    bench.view.engines[bench.view.row("p1")]["prefill"] = False
    assert bench.ask().kind == "local"
    assert place_engines(bench.view, PlacementRequest("a", PROMPT), bench.policy) == (
        -1,
        bench.view.row("d0"),
    )
    bench.view.engines[bench.view.row("d0")]["decode"] = False
    with pytest.raises(NoDecodeReplicaError):
        bench.ask()


@pytest.mark.parametrize("name", policies.POLICIES)
def test_the_forced_kind_local_holds_for_every_policy(name: str) -> None:
    bench = Bench(name)
    bench.view.settings = RouterSettings(policy="local")
    assert bench.ask().kind == "local"


def test_packages_add_policies_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("fewest", f"{LeastLoaded.__module__}:LeastLoaded", policies.GROUP)
    monkeypatch.setattr(policies, "entry_points", lambda group: [point])
    assert policy_names() == ("cost", *policies.POLICIES, "fewest")
    assert isinstance(make_policy("fewest"), LeastLoaded)
    assert make_policy("cost") is None
    with pytest.raises(ValueError, match=r"router\.placement must be one of cost, .*fewest"):
        make_policy("cheapest")


def test_each_policy_has_a_rule_which_the_docs_tell() -> None:
    assert tuple(RULES) == ("cost", *policies.POLICIES)
    rows = (DOCS / "routing.md").read_text().splitlines()
    for name, rule in RULES.items():
        assert any(row.startswith(f"| `{name}`") and f"| {rule}" in row for row in rows), name
    listed = ", ".join(f"`{name}`" for name in policies.POLICIES)
    assert (
        f"| {listed} | the gateway's other [placement policies]"
        in (DOCS / "simulate.md").read_text()
    )

"""`place` against a naive search over all pairs, on small clusters of every shape."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.place import place
from headrace.router.placement.pricing import full_step_s, prefill_s, step_s
from headrace.router.placement.request import PlacementRequest
from headrace.router.plan import Plan, RouterSettings
from headrace.router.plan_codec import MAX_BYTES, decode, encode
from headrace_engine.step_time import StepTime
from headrace_kvstore.lookup.availability import MEDIA, AvailableRun
from tests.support.naive_placement import Cluster, Engine, Naive, Node

FEW = settings(max_examples=150)
MORE = settings(max_examples=250)


@cache
def steps(number: int) -> StepTime:
    """A few machines: one never measured, one slow, one fast, one that pads."""
    fit = StepTime((8, 16, 64, 256) if number == 3 else ())
    base, token = ((0.03, 1e-3), (0.2, 4e-3), (0.01, 1e-4), (0.015, 2e-4))[number]
    for size in (1, 30, 700, 2000) * (0 if number == 0 else 10):
        fit.observe(size, 4, 0, 500, size * size / 2, base + token * size)
    return fit


fixed_s, seconds = st.sampled_from([0.0, 0.001, 0.02, 0.5]), st.floats(0.0, 2.0)
byte_s = st.sampled_from([0.0, 1e-9, 1e-7, 1e-6])
fits = st.tuples(fixed_s, byte_s)
blocks = st.integers(0, 40)
waits = st.sampled_from([0.0, 0.01, 0.3])
runs = st.lists(
    st.builds(
        lambda medium, number, wait_s: AvailableRun(medium, 16 * number, wait_s),
        st.sampled_from(MEDIA),
        st.integers(1, 20),
        waits,
    ),
    max_size=4,
)


@st.composite
def clusters(draw: st.DrawFn, targets: bool = True) -> Cluster:
    nodes = draw(st.integers(1, 3))
    engines = [
        Engine(
            name=f"{role[0]}{at}",
            role=role,
            node=draw(st.integers(0, nodes - 1)),
            step=steps(draw(st.integers(0, 3))),
            step_tokens=draw(st.sampled_from([64, 200, 2048])),
            queued_tokens=(queued := draw(st.sampled_from([0, 0, 1, 50, 900]))),
            queued_pairs=queued * queued // 2,
            running=(running := draw(st.sampled_from([0, 0, 1, 5, 40]))) * (role == "decode"),
            prompts=draw(st.sampled_from([0, 1, 7])),
            context=running * 300 * (role == "decode"),
            free_blocks=draw(st.sampled_from([-1, 5, 1000])),
            drift=draw(st.sampled_from([0.0, 0.0, 0.1])),
            age_s=draw(st.sampled_from([0.0, 0.2, 3.0])),
            call_s=draw(fixed_s),
            handoff_s=draw(fixed_s),
            held=draw(blocks),
            adapter_s=(adapter_s := draw(fixed_s)),
            reload_s=draw(st.sampled_from([0.0, adapter_s])),
            usable=draw(st.integers(0, 9)) > 0,
        )
        for role, most in (("decode", 4), ("prefill", 5))
        for at in range(draw(st.integers(1 if role == "decode" else 0, most)))
    ]
    if not any(engine.usable for engine in engines if engine.role == "decode"):
        engines[0].usable = True
    optional = st.one_of(st.none(), fits)
    made = []
    for _ in range(nodes):
        loads = {m: draw(optional) for m in ("dram", "nvme")}
        known = {medium: fit for medium, fit in loads.items() if fit is not None}
        made.append(Node(draw(runs), known))
    target = st.sampled_from([None, 0.05, 0.5, 5.0]) if targets else st.none()
    return Cluster(
        engines,
        made,
        elsewhere=draw(fits),
        within=draw(fits),
        settings=RouterSettings(
            itl_target_s=draw(target),
            ttft_target_s=draw(target),
        ),
    )


tokens = st.integers(0, 700)


def placed(cluster: Cluster, number: int, **more: object) -> Plan:
    held = np.array(cluster.held(), np.int32)
    request = PlacementRequest(
        *("a", number, cluster.now_s, held),
        available_runs=[node.runs for node in cluster.nodes],
        adapter_s=np.array(cluster.adapter_s()),
        **more,  # type: ignore[arg-type]
    )
    return place(cluster.view(), request)


def total(plan: Plan) -> float:
    return plan.predicted[f"{plan.kind}.total"]


@MORE
@given(clusters(), tokens)
def test_the_plan_is_the_least_of_all_pairs(cluster: Cluster, number: int) -> None:
    plan = placed(cluster, number)
    naive = Naive(cluster, number)
    best = naive.best()
    assert total(plan) == pytest.approx(best.total_s, rel=1e-9)
    [same] = [e for e in naive.all() if (e.prefill, e.decode) == (plan.replica, plan.decode)]
    assert total(plan) == pytest.approx(same.total_s, rel=1e-9)
    assert plan.predicted_ttft_s == pytest.approx(same.ttft_s, rel=1e-9)
    assert bool(plan.broken) == (best.broken > 0)


@FEW
@given(
    clusters(targets=False),
    tokens,
    st.integers(0, 2),
    st.sampled_from(["prefill", "decode"]),
)
def test_one_replica_more_never_makes_an_answer_slower(
    cluster: Cluster, number: int, like: int, role: str
) -> None:
    """It stands on a node of its own and has nothing to do."""
    model = cluster.engines[like % len(cluster.engines)]
    more = Engine("new", role, len(cluster.nodes), model.step, model.step_tokens, held=model.held)
    grown = replace(cluster, engines=[*cluster.engines, more], nodes=[*cluster.nodes, Node()])
    before, after = placed(cluster, number), placed(grown, number)
    if bool(before.broken) == bool(after.broken):
        assert total(after) <= total(before) * (1 + 1e-9)
    else:
        assert not after.broken


@FEW
@given(clusters(), tokens, st.sampled_from(["local", "remote"]))
def test_a_forced_policy_is_kept_and_the_best_of_its_kind_taken(
    cluster: Cluster, number: int, policy: str
) -> None:
    cluster.settings = replace(cluster.settings, policy=policy)  # type: ignore[arg-type]
    plan = placed(cluster, number)
    some = [e for e in Naive(cluster, number).all() if bool(e.prefill) == (policy == "remote")]
    if not some:
        assert plan.kind == "local" and plan.reasons[0] == "no prefill replica runs"
        return
    best = min(some, key=lambda e: (e.broken, e.total_s))
    assert plan.kind == policy
    assert total(plan) == pytest.approx(best.total_s, rel=1e-9)


@FEW
@given(clusters(), tokens)
def test_a_plan_covers_its_prompt_and_comes_back_from_its_bytes(
    cluster: Cluster, number: int
) -> None:
    plan = placed(cluster, number)
    assert sum(run.tokens for run in plan.runs) == number
    assert all(run.tokens > 0 for run in plan.runs)
    computed = sum(run.tokens for run in plan.runs if run.source == "compute")
    assert computed == plan.compute_tokens or number == 0
    data = encode(plan)
    assert len(data) <= MAX_BYTES and data.isascii()
    back = decode(data)
    assert encode(back) == data
    assert replace(back, predicted={}) == replace(plan, predicted={})
    assert back.predicted == pytest.approx(dict(plan.predicted), rel=1e-5)


@FEW
@given(clusters(), tokens, st.randoms())
def test_callers_that_know_the_same_in_another_order_choose_alike(
    cluster: Cluster, number: int, random: object
) -> None:
    plan = placed(cluster, number, affinity=7)
    shuffled = list(cluster.engines)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = placed(replace(cluster, engines=shuffled), number, affinity=7)
    assert (again.decode, again.replica) == (plan.decode, plan.replica)


shapes = st.tuples(st.integers(0, 5000), st.integers(0, 300), st.integers(0, 10**6))


@FEW
@given(st.integers(0, 3), shapes, st.floats(0, 1e9), st.integers(1, 4096))
def test_engines_are_priced_exactly_as_their_step_times_say(
    number: int, shape: tuple[int, int, int], pairs: float, budget: int
) -> None:
    prompt, rows, context = shape
    fit = steps(number)
    view = ClusterView(16, 1000.0)
    row = view.add("a", "decode", view.node("n"), step_tokens=budget)
    view.set_steps(row, fit)
    engine = view.engines[row], view.curves, view.padded, row
    told = step_s(*engine, float(prompt), float(rows), float(context), pairs)
    assert told == fit.seconds(prompt, rows, 0, context, pairs)
    view.engines[row]["running"], view.engines[row]["context"] = rows, context
    told = prefill_s(*engine, prompt, pairs, full_step_s(*engine, prompt))
    assert told == fit.prefill_s(prompt, pairs, step_tokens=budget, rows=rows, context=context)


@FEW
@given(st.binary(max_size=300))
def test_bytes_that_are_no_plan_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


def test_every_number_of_a_plan_is_finite() -> None:
    cluster = Cluster([Engine("d", "decode", 0, steps(0))], [Node()])
    for number in (0, 1, 1 << 20):
        assert all(math.isfinite(s) for s in placed(cluster, number).predicted.values())

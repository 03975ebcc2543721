"""Where a request goes: by price, by constraint, and alike for all who ask."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.place import place
from headrace.router.placement.request import NoDecodeReplicaError, PlacementRequest
from headrace.router.plan import Plan, RouterSettings
from headrace.router.plan_codec import MAX_BYTES, decode, encode
from headrace_engine.step_time import StepTime, pairs_of
from headrace_kvstore.lookup.availability import AvailableRun

BLOCK = 16
PROMPT = 100 * BLOCK + 1


def cluster(prefills: int = 2, decodes: int = 2, **settings: object) -> ClusterView:
    """Each engine on a node of its own; holder i is the cache of engine i."""
    view = ClusterView(BLOCK, 1000.0, RouterSettings(**settings))  # type: ignore[arg-type]
    for at in range(prefills + decodes):
        role = "prefill" if at < prefills else "decode"
        name = f"{role[0]}{at if at < prefills else at - prefills}"
        view.add(name, role, view.node(str(at)), hbm=at)  # type: ignore[arg-type]
    return view


def busy(view: ClusterView, name: str, running: int = 8, context: int = 4000) -> None:
    view.engines[view.row(name)]["running"] = running
    view.engines[view.row(name)]["context"] = context


def queue(view: ClusterView, name: str, tokens: int, now_s: float = 0.0) -> None:
    view.set_queue(view.row(name), tokens, pairs_of(0, tokens), now_s)


def holding(view: ClusterView, **blocks: int) -> np.ndarray:
    held = np.zeros(len(view), np.int32)
    for name, number in blocks.items():
        held[view.engines[view.row(name)]["hbm"]] = number
    return held


def ask(
    view: ClusterView, held: np.ndarray | None = None, tokens: int = PROMPT, **more: object
) -> Plan:
    held = np.zeros(0, np.int32) if held is None else held
    return place(view, PlacementRequest("a", tokens, held=held, **more))  # type: ignore[arg-type]


# By price


def test_before_the_first_measurement_an_idle_engine_prefills_for_itself() -> None:
    plan = ask(cluster())
    assert (plan.kind, plan.replica, plan.timeout_s) == ("local", "", 0.0)
    assert plan.reasons[0].startswith("local saves 0.0")


def test_before_the_first_measurement_busy_engines_leave_long_prompts_to_prefill_engines() -> None:
    view = cluster()
    busy(view, "d0"), busy(view, "d1")
    assert ask(view).kind == "remote"
    busy(view, "d0", running=2), busy(view, "d1", running=2)
    assert ask(view, tokens=10).kind == "local"


def test_a_prefix_draws_the_request_to_the_engine_that_has_it() -> None:
    view = cluster()
    plan = ask(view, holding(view, p1=90))
    assert (plan.kind, plan.replica, plan.cached_prefill_tokens) == ("remote", "p1", 90 * BLOCK)
    assert ask(view, holding(view, d1=90)).decode == "d1"
    assert ask(view, holding(view, d1=90, p1=90)).kind == "local"


def test_a_hot_prefix_is_computed_again_elsewhere_once_the_queue_costs_more_than_that() -> None:
    view = cluster(policy="remote")
    held = holding(view, p0=90)
    chosen = []
    for _ in range(40):
        plan = ask(view, held)
        chosen.append(plan.replica)
        row, end = view.row(plan.replica), plan.prompt_tokens
        view.reserve(row, plan.compute_tokens, pairs_of(end - plan.compute_tokens, end), 0.0)
        if plan.replica == "p1":
            held = holding(view, p0=90, p1=90)
    first = chosen.index("p1")
    assert first > 5, "a few requests wait for the copy"
    again_s = ask(cluster(policy="remote")).predicted["remote.compute"]
    assert ask(view, held).predicted["remote.queue"] < 3 * again_s, "and then both serve it"
    assert {"p0", "p1"} == set(chosen[first + 1 :])


def test_work_ahead_sends_the_next_request_elsewhere_and_time_takes_it_off() -> None:
    view = cluster(prefills=0)
    first = ask(view).decode
    view.reserve(view.row(first), PROMPT, pairs_of(0, PROMPT), 0.0)
    assert ask(view).decode != first
    queue_s = view.engines[view.row(first)]["queue_s"]
    soon, later = (ask(view, now_s=queue_s * part).predicted for part in (0.5, 1.0))
    assert soon["local.queue"] == later["local.queue"] == 0.0, "the other one is idle"
    view.remove({"d0": "d1", "d1": "d0"}[first])
    assert ask(view, now_s=0.5 * queue_s).predicted["local.queue"] == pytest.approx(queue_s / 2)
    assert ask(view, now_s=queue_s).predicted["local.queue"] == 0.0


def test_what_is_reserved_is_priced_with_what_is_left_and_taken_back_whole() -> None:
    view = cluster(prefills=0, decodes=1)
    view.reserve(0, 1000, pairs_of(0, 1000), 0.0)
    one_s = float(view.engines[0]["queue_s"])
    view.reserve(0, 1000, pairs_of(0, 1000), one_s / 2)
    assert view.engines[0]["queued_tokens"] == 1500
    view.reserve(0, -1500, -1e9, one_s / 2)
    assert view.engines[0]["queue_s"] == 0.0


def test_an_engine_not_heard_of_for_long_is_no_longer_taken_to_be_idle() -> None:
    view = cluster(prefills=0)
    for name in ("d0", "d1"):
        view.engines[view.row(name)]["drift"] = 0.04
    queue(view, "d0", 0, now_s=0.0)
    queue(view, "d1", 0, now_s=3.9)
    plan = ask(view, now_s=4.0)
    assert plan.decode == "d1"
    assert plan.predicted["local.queue"] == pytest.approx(0.3989 * (0.04 * 0.1) ** 0.5, rel=1e-3)


def test_reports_teach_how_far_an_old_one_may_be_off() -> None:
    view = cluster(prefills=0, decodes=1)
    engine, drifts = view.engines[0], list[float]()
    for at in range(4000):
        queue(view, "d0", 1000 * (at % 20 == 0), now_s=0.05 * at)
        drifts.append(float(engine["drift"]))
    jump_s = float(StepTime().prefill_s(1000, pairs_of(0, 1000), step_tokens=2048))
    variance = jump_s**2 + (jump_s - 0.05) ** 2  # it comes, and is gone with the next report
    assert np.mean(drifts[2000:]) == pytest.approx(variance, rel=0.05), "once a second"
    for at in range(40):
        queue(view, "d0", 0, now_s=200.0 + at)
    assert engine["drift"] < 1e-5
    view.reserve(0, 1000, pairs_of(0, 1000), 300.0)
    assert engine["reported_s"] == 239.0 and engine["drift"] < 1e-5, (
        "its own reservation is no news"
    )


def test_a_jump_counts_about_the_same_if_only_some_reports_are_read() -> None:
    drifts = []
    for every in (1, 6):
        view = cluster(prefills=0, decodes=1)
        for at in range(0, 25, every):
            queue(view, "d0", 20_000 * (at == 6), now_s=0.15 * at)
        drifts.append(float(view.engines[0]["drift"]))
    assert drifts[1] == pytest.approx(drifts[0], rel=0.25) and drifts[0] > 0


# Stores


def test_runs_come_from_the_store_as_long_as_that_is_cheaper_than_computing() -> None:
    view = ClusterView(BLOCK, 1000.0)
    view.add("d", "decode", view.node("a"), hbm=0)
    available_runs = [AvailableRun("dram", 20 * BLOCK, 0.0), AvailableRun("nvme", 20 * BLOCK, 0.0)]
    available_runs += [
        AvailableRun("remote", 20 * BLOCK, 0.002),
        AvailableRun("object", 20 * BLOCK, 0.002),
    ]
    held = np.array([10], np.int32)
    plan = ask(view, held, available_runs=[available_runs])
    sources = [("hbm", 10), ("dram", 10), ("nvme", 20), ("remote", 20), ("object", 20)]
    assert [(r.source, r.tokens // BLOCK) for r in plan.runs[:-1]] == sources
    assert plan.runs[-1] == ("compute", PROMPT - 80 * BLOCK)
    assert plan.loaded_from == {s: n * BLOCK for s, n in sources[1:]}
    available_runs[3] = AvailableRun("object", 20 * BLOCK, 100.0)
    assert ask(view, held, available_runs=[available_runs]).runs[-2].source == "remote"


def test_waits_that_a_node_predicts_count_as_it_says_them() -> None:
    view = cluster(prefills=0, decodes=1)
    plan = ask(view, available_runs=[[AvailableRun("remote", 96 * BLOCK, 0.25)]])
    assert plan.predicted["local.pull"] == 0.25
    assert ask(view, available_runs=[[AvailableRun("remote", 96 * BLOCK, 9.0)]]).loaded_tokens == 0


# Constraints


def test_an_engine_without_room_for_the_kv_is_passed_over() -> None:
    view = cluster(prefills=0)
    view.engines[view.row("d0")]["free_blocks"] = 100
    assert {ask(view, affinity=n).decode for n in range(20)} == {"d1"}
    view.engines[view.row("d0")]["free_blocks"] = 101
    assert {ask(view, affinity=n).decode for n in range(20)} == {"d0", "d1"}
    view.engines[view.row("d0")]["free_blocks"] = 1
    assert ask(view, holding(view, d0=100)).decode == "d0", "it has a hundred already"


def test_streams_keep_their_itl_target_if_any_choice_keeps_it() -> None:
    view = cluster(decodes=1, itl_target_s=0.2)
    busy(view, "d0", running=1, context=0)
    queue(view, "p0", 9000), queue(view, "p1", 9000)
    plan = ask(view)
    assert plan.kind == "remote" and plan.broken == ()
    assert plan.reasons[0] == "local prefill breaks the ITL target, remote prefill does not"
    assert ask(view, tokens=20).kind == "local", "a short prompt keeps it"
    busy(view, "d0", running=0, context=0)
    assert ask(view).kind == "local", "the target is nobody's if nothing runs"


def test_if_every_choice_is_late_the_plan_is_the_best_and_says_so() -> None:
    view = cluster(ttft_target_s=1.0)
    plan = ask(view)
    assert plan.kind == "local" and plan.broken == ("breaks the TTFT target",)
    assert ask(view, ttft_target_s=60.0).broken == ()


def test_the_choice_that_is_in_time_is_taken_though_it_costs_others_more() -> None:
    view = cluster(prefills=1, decodes=1)
    busy(view, "d0", running=8)
    alone = ask(view, tokens=400)
    assert alone.kind == "remote"
    queue(view, "p0", 600)
    late = ask(view, tokens=400)
    assert late.kind == "remote" and late.predicted_ttft_s > 0.9
    assert ask(view, tokens=400, ttft_target_s=0.9).kind == "local"


def test_a_request_that_is_late_anyway_takes_nobodys_room() -> None:
    view = cluster(prefills=0, ttft_target_s=0.1)
    view.engines[view.row("d0")]["free_blocks"] = 1
    queue(view, "d1", 3000)
    plan = ask(view)
    assert plan.decode == "d1"
    assert plan.broken == ("breaks the TTFT target",)


def test_where_nobody_has_room_the_plan_says_so() -> None:
    view = cluster(prefills=0, decodes=1)
    busy(view, "d0", running=4)
    view.engines[0]["free_blocks"] = 0
    assert ask(view).broken == ("has no room for the KV",)


def test_what_must_stay_local_stays_and_forced_kinds_are_kept() -> None:
    view = cluster(policy="remote")
    assert ask(view, local_only="logprobs").reasons[0] == "local only: logprobs"
    assert ask(view).reasons[0] == "policy is remote"
    assert ask(cluster(policy="local")).reasons[0] == "policy is local"
    assert ask(cluster(prefills=0, policy="remote")).reasons[0] == "no prefill replica runs"


def test_a_view_without_a_decode_engine_has_no_plan() -> None:
    view = cluster(decodes=1)
    view.engines[view.row("d0")]["decode"] = False
    with pytest.raises(NoDecodeReplicaError):
        ask(view)


# Alike for all who ask


def test_a_new_prefix_goes_to_one_engine_of_equals_and_prefixes_spread_over_them() -> None:
    def of(view: ClusterView, affinity: int) -> tuple[str, str]:
        plan = ask(view, affinity=affinity)
        return plan.decode, plan.replica

    views = [cluster(4, 4, policy="remote") for _ in range(2)]
    chosen = [of(views[0], n * 0x9E3779B97F4A7C15 % (1 << 64)) for n in range(200)]
    assert chosen == [of(views[1], n * 0x9E3779B97F4A7C15 % (1 << 64)) for n in range(200)]
    assert len({d for d, _ in chosen}) == len({p for _, p in chosen}) == 4


def test_losing_an_engine_moves_only_what_it_had() -> None:
    view = cluster(prefills=0, decodes=5)
    before = [ask(view, affinity=n).decode for n in range(100)]
    view.remove("d3")
    after = [ask(view, affinity=n).decode for n in range(100)]
    assert all(a == b for a, b in zip(after, before, strict=True) if b != "d3")


def test_the_engine_that_computed_nothing_for_longest_is_measured_again() -> None:
    view = cluster(prefills=2, decodes=2)
    best = ask(view, may_explore=True)
    assert (best.kind, best.explores) == ("local", False), "nobody wants to know"
    for name, age_s in (("p0", 61.0), ("p1", 62.0), ("d0", 0.0), ("d1", 59.0)):
        view.engines["measured_s"][view.row(name)] = -age_s
    plan = ask(view, may_explore=True)
    assert (plan.kind, plan.replica, plan.explores) == ("remote", "p1", True)
    assert "measuring remote prefill on p1 again after 62 s" in plan.reasons[0]
    assert not ask(view).explores
    assert not ask(view, may_explore=True, local_only="n > 1").explores
    view.engines["measured_s"][view.row("d1")] = -63.0
    to_d0 = next(n for n in range(50) if ask(view, affinity=n).decode == "d0")
    plan = ask(view, may_explore=True, local_only="n > 1", affinity=to_d0)
    assert (plan.decode, plan.explores) == ("d1", True)


def test_an_engine_that_is_too_dear_is_not_measured_yet() -> None:
    view = cluster(prefills=1, decodes=1)
    view.engines["measured_s"][view.row("p0")] = -61.0
    view.engines["call_s"][view.row("p0")] = 9.0
    assert not ask(view, may_explore=True).explores
    view.engines["measured_s"][view.row("p0")] = -6000.0
    assert ask(view, may_explore=True).explores


def test_what_breaks_a_target_is_not_measured_where_the_best_keeps_it() -> None:
    view = cluster(prefills=1, decodes=1, ttft_target_s=ask(cluster()).predicted_ttft_s + 0.01)
    view.engines["measured_s"][view.row("p0")] = -61.0
    assert not ask(view, may_explore=True).explores


# The view


def test_rows_are_used_again_and_names_are_unique() -> None:
    view = cluster(prefills=1, decodes=1)
    with pytest.raises(ValueError, match="already"):
        view.add("d0", "decode", 0)
    busy(view, "d0")
    row = view.row("d0")
    view.remove("d0")
    assert "d0" not in view and len(view) == 1
    assert view.add("d9", "decode", 1) == row
    assert view.engines[row]["running"] == 0
    for number in range(50):
        view.add(f"x{number}", "decode", view.node(f"n{number}"))
    assert len(view) == 52 and view.name(view.row("x49")) == "x49"


@pytest.mark.parametrize("wrong", [(0, 1.0), (16, 0.0), (16, float("nan"))])
def test_impossible_sizes_are_refused(wrong: tuple[int, float]) -> None:
    with pytest.raises(ValueError):
        ClusterView(*wrong)


# On the wire


def test_a_plan_with_everything_long_still_fits_its_bytes() -> None:
    view = ClusterView(BLOCK, 1000.0, RouterSettings(ttft_target_s=1e-6))
    node = view.node("n")
    for number in range(3):
        view.add("d" * 100 + str(number), "decode", node)
        view.add("p" * 100 + str(number), "prefill", node)
    runs = [AvailableRun(("dram", "nvme")[n % 2], BLOCK) for n in range(90)]
    plan = ask(view, available_runs=[runs], local_only="why " * 500)
    data = encode(plan)
    assert len(data) < MAX_BYTES
    back = decode(data)
    assert sum(run.tokens for run in back.runs) == PROMPT and len(back.runs) <= 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_tokens", -1),
        ("prompt_tokens", 1.5),
        ("timeout_s", "1"),
        ("decode", "x" * 129),
        ("runs", [["tape", 1]]),
        ("runs", [["hbm", 1]] * 33),
        ("predicted", {f"local.{number}": 1.0 for number in range(33)}),
        ("predicted", {"local.total": float("inf")}),
        ("reasons", ["why"] * 5),
        ("broken", ["x"] * 5),
    ],
)
def test_a_header_out_of_bounds_is_refused(field: str, value: object) -> None:
    told = json.loads(encode(ask(cluster())))
    told[field] = value
    with pytest.raises(ValueError):
        decode(json.dumps(told).encode())

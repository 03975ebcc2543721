"""What a gateway makes of the replicas' reports: nothing counts twice, nothing is forgotten."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from headrace.replica_health import SILENT_S, Probe
from headrace.router.bookings import BOOKING_TIMEOUT_S
from headrace.router.cluster import Cluster, Prompt
from headrace.router.placement.request import NoDecodeReplicaError
from headrace.router.plan import RouterSettings
from headrace_engine.kv_groups import BlockUse
from headrace_engine.kv_transfer.compatibility import KvKind
from headrace_engine.reporting.report import Report
from headrace_engine.step_time import StepTime
from headrace_kvstore.lookup.availability import AvailableRun
from headrace_lab.simulate.hardware import default_steps

BLOCK = 16
KEYS = np.arange(1, 41, dtype=np.uint64)
PROMPT = Prompt(KEYS, 40 * BLOCK + 3)
STEPS = default_steps().to_dict()


def report(replica: str, seq: int = 0, **more: Any) -> Report:
    told: dict[str, Any] = {
        "role": "decode" if replica.startswith("d") else "prefill",
        "machine": f"of {replica}",
        "block_tokens": BLOCK,
        "token_bytes": 1000.0,
        "step_tokens": 2048,
        "free_blocks": 10_000,
        "steps": StepTime().to_dict(),
    }
    return Report(replica=replica, seq=seq, **{**told, **more})


def cluster(*replicas: str, **settings: Any) -> Cluster:
    """These replicas, each heard of at 0 s, each with an empty cache."""
    made = Cluster(RouterSettings(**settings), random.Random(1))
    for replica in replicas:
        made.events.add_source(replica, "e", 0.0)
        made.report(report(replica), 0.0)
    return made


def row(of: Cluster, replica: str) -> Any:
    assert of.view is not None
    return of.view.engines[of.view.row(replica)]


def hold(of: Cluster, replica: str, keys: np.ndarray) -> None:
    of.index.stored(of.events.holder(replica), None, keys)


# Where


def test_without_a_decode_replica_nobody_answers() -> None:
    for empty in (Cluster(RouterSettings()), cluster("p1")):
        assert empty.healthy_decodes() == 0
        with pytest.raises(NoDecodeReplicaError):
            empty.plan(PROMPT, 0.0)


def test_a_prompt_goes_where_its_blocks_are() -> None:
    two = cluster("d1", "d2")
    hold(two, "d2", KEYS)
    plan = two.plan(PROMPT, 0.0)
    assert (plan.decode, plan.cached_decode_tokens) == ("d2", 40 * BLOCK)
    assert two.stats(0.0)["plans"]["held_tokens"] == 40 * BLOCK


def test_the_next_prompt_already_sees_what_a_plan_will_make() -> None:
    two = cluster("d1", "d2")
    first = two.plan(PROMPT, 0.0)
    # Half of the first one is computed by then, so waiting for it takes less than computing anew.
    again = two.plan(PROMPT, 0.25)
    assert again.decode == first.decode
    assert again.cached_decode_tokens == 40 * BLOCK


def test_prompts_that_have_nothing_in_common_are_spread() -> None:
    four = cluster("d1", "d2", "d3", "d4")
    plans = [four.plan(Prompt(KEYS + np.uint64(100 * n), 643), 0.0) for n in range(4)]
    assert {plan.decode for plan in plans} == {"d1", "d2", "d3", "d4"}


def test_what_a_machines_store_supplies_is_loaded_there() -> None:
    one = cluster("d1")
    stored = [AvailableRun("dram", 40 * BLOCK)]
    plan = one.plan(Prompt(KEYS, PROMPT.tokens, machine="of d1", stored=stored), 0.0)
    assert plan.loaded_from == {"dram": 40 * BLOCK}


def test_a_replica_that_may_not_be_asked_gets_nothing() -> None:
    two = cluster("d1", "d2")
    hold(two, "d2", KEYS)
    two.replica_health.on_probe("d2", Probe.MISSED, 0.0)
    assert two.plan(PROMPT, 0.0).decode == "d1"
    two.replica_health.on_probe("d2", Probe.PASSED, 0.0)
    assert two.healthy_decodes() == 2, "it may be asked again"
    two.report(report("d2", 1, draining=True), 0.1)
    assert two.healthy_decodes() == 1
    two.replica_health.on_probe("d2", Probe.REFUSED, 0.1)
    two.replica_health.on_probe("d2", Probe.PASSED, 0.1)
    assert two.healthy_decodes() == 1, "it drains all the same"
    two.report(report("d2", 2), 0.2)
    two.report(report("d1", 1), SILENT_S + 0.1)
    two.expire(SILENT_S + 0.3)
    assert two.plan(PROMPT, SILENT_S + 0.3).decode == "d1", "d2 is silent"
    two.remove_replica("d1")
    two.report(report("d2", 3), SILENT_S + 0.4)
    assert two.plan(PROMPT, SILENT_S + 0.4).decode == "d2"


# What counts


def test_a_plan_counts_until_a_report_has_heard_of_it_and_never_twice() -> None:
    one = cluster("d1")
    plan = one.plan(PROMPT, 0.0)
    assert (row(one, "d1")["queued_tokens"], row(one, "d1")["running"]) == (643, 1)
    one.report(report("d1", 1), 0.0)
    assert (row(one, "d1")["queued_tokens"], row(one, "d1")["running"]) == (643, 1)
    assert row(one, "d1")["free_blocks"] == 10_000 - 41
    told = {"queued_tokens": 643, "running": 1, "free_blocks": 9_959}
    one.report(report("d1", 2, heard=(plan.request_id,), **told), 0.0)
    assert {name: row(one, "d1")[name] for name in told} == told
    one.report(report("d1", 3, **{**told, "queued_tokens": 0}), 0.1)
    assert row(one, "d1")["queued_tokens"] == 0


def test_a_plan_that_nobody_hears_of_is_taken_off() -> None:
    one = cluster("d1")
    one.plan(PROMPT, 0.0)
    one.expire(BOOKING_TIMEOUT_S + 0.1)
    assert (row(one, "d1")["queued_tokens"], row(one, "d1")["running"]) == (0, 0)
    assert one.counts["expired"] == 1


def test_a_plan_that_is_withdrawn_leaves_nothing() -> None:
    one = cluster("d1")
    plan = one.plan(PROMPT, 0.0)
    one.withdraw(plan, 0.0)
    assert (row(one, "d1")["queued_tokens"], row(one, "d1")["running"]) == (0, 0)
    assert one.plan(PROMPT, 0.0).cached_decode_tokens == 0


def test_a_remote_plan_is_booked_where_it_computes_and_where_it_answers() -> None:
    both = cluster("d1", "p1")
    both.report(report("d1", 1, policy="remote"), 0.0)
    plan = both.plan(PROMPT, 0.0)
    assert (plan.decode, plan.replica) == ("d1", "p1")
    assert (row(both, "p1")["queued_tokens"], row(both, "p1")["running"]) == (643, 0)
    assert (row(both, "d1")["queued_tokens"], row(both, "d1")["running"]) == (0, 1)


def test_reports_out_of_order_and_of_other_blocks_are_left_out() -> None:
    one = cluster("d1")
    one.report(report("d1", 5, running=7), 0.1)
    one.report(report("d1", 4, running=3), 0.2)
    assert row(one, "d1")["running"] == 7
    with pytest.raises(ValueError, match="blocks of 32 tokens"):
        one.report(report("d2", block_tokens=32), 0.2)
    assert one.healthy_decodes() == 1


def test_the_view_has_the_newest_report_of_each_replica_since_it_arrived() -> None:
    skipping, reading = cluster("d1"), cluster("d1")
    for number in range(1, 5):
        steps = {"steps": STEPS} if number >= 2 else {}
        at_s, newest = 0.1 * number, report("d1", number, queued_tokens=100 * number, **steps)
        for each in (skipping, reading):
            each.report(newest, at_s)
        assert row(reading, "d1")["queued_tokens"] == 100 * number
    of, fields = row(skipping, "d1"), ("queued_tokens", "queue_s", "reported_s", "at_s")
    assert of["reported_s"] == pytest.approx(0.4)
    assert [of[name] for name in fields] == [row(reading, "d1")[name] for name in fields]


def test_of_what_replicas_share_the_latest_report_decides() -> None:
    two = cluster("d1", "d2")
    for seq, (name, policy) in enumerate([("d1", "cost"), ("d2", "cost"), ("d1", "local")], 1):
        two.report(report(name, seq, policy=policy), 0.1 * seq)
    assert two.view is not None and two.view.settings.policy == "local"


def test_a_replica_that_fails_again_after_its_view_was_read_gets_nothing() -> None:
    two = cluster("d1", "d2")
    hold(two, "d2", KEYS)
    two.replica_health.on_probe("d2", Probe.REFUSED, 0.0)
    assert two.healthy_decodes() == 1
    two.replica_health.on_probe("d2", Probe.PASSED, 0.0)
    two.report(report("d2", 1), 0.1)
    assert row(two, "d2")["decode"]
    two.replica_health.on_probe("d2", Probe.REFUSED, 0.1)
    assert two.plan(PROMPT, 0.1).decode == "d1"


def test_step_times_that_are_none_are_refused_when_they_arrive() -> None:
    one = cluster("d1")
    with pytest.raises(ValueError, match="not the state of a step-time model"):
        one.report(report("d1", 1, steps={**STEPS, "state": [0.0]}), 0.1)
    assert one.plan(PROMPT, 0.2).decode == "d1"


def test_what_decode_replicas_measure_of_calls_holds_for_all_prefill_replicas() -> None:
    four = cluster("d1", "d2", "p1", "p2")
    four.report(report("d1", 1, call=(0.2, 0.1)), 0.1)
    four.report(report("d2", 1, call=(0.4, 0.1)), 0.1)
    four.expire(0.2)
    assert row(four, "p1")["call_s"] == pytest.approx(0.3)
    assert row(four, "p2")["call_error_s"] == pytest.approx(0.1)


def test_an_engine_that_was_not_measured_for_long_is_measured_again() -> None:
    both = cluster("d1", "p1", remeasure_s=20.0)
    kinds = set[str]()
    for second in range(0, 400, 2):
        now_s = float(second)
        for name in ("d1", "p1"):
            both.report(report(name, second + 1), now_s)
        plan = both.plan(Prompt(KEYS + np.uint64(100 * second), 643), now_s)
        kinds.add(plan.kind)
        both.withdraw(plan, now_s)
    assert kinds == {"local", "remote"}
    assert both.counts["explored"] > 0


def test_an_engine_that_another_gateway_had_measured_is_not_measured_again() -> None:
    both = cluster("d1", "p1", remeasure_s=20.0)
    for second in range(0, 200, 2):
        now_s = float(second)
        for name in ("d1", "p1"):
            both.report(report(name, second + 1, computed_s=1.0), now_s)
        both.withdraw(both.plan(PROMPT, now_s), now_s)
    assert both.counts["explored"] == 0


def test_a_cache_whose_free_blocks_are_unknown_is_no_full_one() -> None:
    one = cluster("d1")
    one.report(report("d1", 1, free_blocks=-1), 0.0)
    one.plan(PROMPT, 0.0)
    assert row(one, "d1")["free_blocks"] == -1


def test_plans_do_not_count_for_the_holder_that_a_silent_replica_had() -> None:
    two = cluster("d1", "d2")
    silent = two.plan(PROMPT, 0.0).decode
    two.events.remove_source(silent)
    two.report(report(silent, 1), 0.1)
    two.expire(0.1)
    assert two._pending.match(KEYS).max() == 0


# What a report costs


def test_replicas_that_come_and_go_on_new_machines_leave_nothing() -> None:
    """Each pod has a machine's name of its own, so rolling restarts bring new ones for ever."""
    one = cluster("d0")
    for number in range(1, 200):
        one.report(report(f"d{number}", kv=f"kind-{number % 3}"), float(number))
        one.remove_replica(f"d{number - 1}")
    view = one.view
    assert view is not None
    assert len(view.loads) == 2


def test_a_machine_that_takes_the_place_of_another_has_none_of_its_prices() -> None:
    one = cluster("d0", "d1")
    assert one.view is not None
    fresh = one.view.loads[one.view.node("of d1")].copy()
    one.report(report("d0", 1, loads={"remote": (1.0, 2.0)}), 0.0)
    one.remove_replica("d0")
    one.report(report("d2"), 0.0)
    assert one.view.loads[one.view.node("of d2")].tolist() == fresh.tolist()


def test_blocks_stored_on_a_machine_without_replicas_are_no_supply() -> None:
    one = cluster("d1")
    prompt = Prompt(KEYS, 40 * BLOCK, machine="elsewhere", stored=(AvailableRun("dram", 20),))
    assert one.plan(prompt, 0.0).decode == "d1"
    assert one.view is not None and len(one.view.loads) == 1


def test_a_report_costs_the_same_however_many_replicas_there_are() -> None:
    class Counted(dict[str, Report]):
        walks = 0

        def values(self) -> Any:
            type(self).walks += 1
            return super().values()

    one = cluster(*(f"d{number}" for number in range(50)))
    one._reports = Counted(one._reports)
    one.report(report("d7", 1, kv="new"), 1.0)
    one.remove_replica("d8")
    assert Counted.walks == 0, "a report looked at all the others"


# Replicas of two kinds, during a rolling change


def mixed() -> Cluster:
    """The old decode replica has a queue; the new prefill replica is idle, the old one is not."""
    made = cluster()
    busy = {"queued_tokens": 50_000, "queued_pairs": 10**8, "prompts": 9}
    for name, kv, more in [
        ("d-old", "a", {"running": 3}),
        ("p-old", "a", busy),
        ("p-new", "b", {}),
    ]:
        made.events.add_source(name, "e", 0.0)
        made.report(report(name, kv=kv, **more), 0.0)
    return made


def test_engines_whose_kv_differs_are_never_paired() -> None:
    made = mixed()
    for _ in range(20):
        assert made.plan(PROMPT, 0.0).replica in ("", "p-old")
    made.report(report("d-new", kv="b"), 0.0)
    plans = [made.plan(PROMPT, 0.0) for _ in range(20)]
    assert {(plan.decode, plan.replica) for plan in plans} <= {
        *[("d-old", replica) for replica in ("", "p-old")],
        *[("d-new", replica) for replica in ("", "p-new")],
    }
    assert "d-new" in {plan.decode for plan in plans}, "the better of the two plans is taken"
    assert row(made, "p-new")["prefill"] and row(made, "d-old")["decode"], "the view is whole again"


def test_of_two_kinds_the_one_that_keeps_its_targets_is_taken_though_it_costs_more() -> None:
    made = cluster()
    for name, kv, more in [("d-old", "a", {"free_blocks": 1}), ("d-new", "b", {"running": 3})]:
        made.events.add_source(name, "e", 0.0)
        made.report(report(name, kv=kv, **more), 0.0)
    plans = [made.plan(PROMPT, 0.0) for _ in range(5)]
    assert {(plan.decode, plan.broken) for plan in plans} == {("d-new", ())}


def test_a_plan_that_fails_leaves_all_replicas_in_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mixed()
    made.report(report("d-new", kv="b"), 0.0)

    def fail(*_: object) -> None:
        raise RuntimeError("no plan today")

    with monkeypatch.context() as broken:
        broken.setattr("headrace.router.cluster.place", fail)
        with pytest.raises(RuntimeError, match="no plan today"):
            made.plan(PROMPT, 0.0)
    for name, role in [("d-old", "decode"), ("d-new", "decode"), ("p-old", "prefill")]:
        assert row(made, name)[role], name


def test_engines_of_unlike_sizes_are_paired_where_nixl_can_cut_heads() -> None:
    made = cluster()
    for name, ranks, layout in [("d", 2, "LBHNC"), ("p-one", 1, "LBHNC"), ("p-odd", 3, "LBHNC")]:
        made.events.add_source(name, "e", 0.0)
        busy = {"running": 3} if name == "d" else {}
        made.report(report(name, kv=str(KvKind("a", ranks, 6, layout)), **busy), 0.0)
    pairs = {made.plan(PROMPT, 0.0).replica for _ in range(40)}
    assert "p-one" in pairs and "p-odd" not in pairs


def test_a_replica_that_does_not_tell_its_kind_pairs_with_all() -> None:
    made = mixed()
    made.report(report("p-any"), 0.0)
    assert made.plan(PROMPT, 0.0).replica in ("", "p-old", "p-any")


def test_when_all_have_gone_replicas_of_other_blocks_may_come() -> None:
    made = cluster("d1")
    with pytest.raises(ValueError, match="blocks of 32 tokens"):
        made.report(report("d2", block_tokens=32), 0.0)
    made.remove_replica("d1")
    made.report(report("d2", block_tokens=32), 0.0)
    assert made.healthy_decodes() == 1


# KV cache groups


def test_a_request_counts_with_the_blocks_of_all_cache_groups() -> None:
    use = BlockUse(kept=1, windowed=5, window_blocks=30, prompt_blocks=90)
    one = cluster()
    one.report(report("d1", free_blocks=200, block_use=use), 0.0)
    plan = one.plan(PROMPT, 0.0)
    assert not plan.broken and row(one, "d1")["free_blocks"] == 200 - 41 - 30
    one.withdraw(plan, 0.0)
    assert row(one, "d1")["free_blocks"] == 200
    one.report(report("d1", seq=1, free_blocks=41 + 90 - 1, block_use=use), 0.0)
    assert one.plan(PROMPT, 0.0).broken
    one.report(report("d1", seq=2, free_blocks=41 + 90 - 1), 1.0)
    assert not one.plan(PROMPT, 1.0).broken, "one group takes 41 blocks"


def test_of_a_pulled_prompt_only_the_windows_need_room() -> None:
    use = BlockUse(kept=1, windowed=5, window_blocks=30, prompt_blocks=90)
    both = cluster("p1")
    both.report(report("d1", free_blocks=41 + 30, block_use=use), 0.0)
    plan = both.plan(PROMPT, 0.0)
    assert plan.replica == "p1" and not plan.broken


def test_a_hit_of_an_engine_with_windows_leaves_the_last_token_to_compute() -> None:
    """The window before the end of the prompt is there, that of one block less is not."""
    one = cluster()
    one.events.add_source("d1", "e", 0.0, windows=(4,))
    one.report(report("d1"), 0.0)
    hold(one, "d1", KEYS)
    one.index.stored(one.events.holder("d1"), int(KEYS[35]), KEYS[36:], window=1)
    plan = one.plan(PROMPT, 0.0)
    assert plan.cached_decode_tokens == 40 * BLOCK
    one.withdraw(plan, 0.0)
    assert one.plan(Prompt(KEYS, 40 * BLOCK), 0.0).cached_decode_tokens == 0


# LoRA adapters

LORA = {"adapter_slots": 2, "adapter_load_s": 5.0}


def adapter_prompt(adapter: str, number: int = 0) -> Prompt:
    """A prompt of its own for an adapter."""
    return Prompt(KEYS + np.uint64(1000 * number), PROMPT.tokens, adapter=adapter)


def two_with(d1: tuple[str, ...], d2: tuple[str, ...], **more: Any) -> Cluster:
    two = cluster("d1", "d2")
    for name, adapters in (("d1", d1), ("d2", d2)):
        two.report(report(name, 1, adapters=adapters, **LORA | more), 0.0)
    return two


def test_a_request_goes_where_its_adapter_is_loaded() -> None:
    for number in range(8):
        two = two_with(("a",), ("b",))
        assert two.plan(adapter_prompt("a", number), 0.0).decode == "d1"
        assert two.plan(adapter_prompt("b", number), 0.0).decode == "d2"


def test_requests_follow_the_one_that_makes_a_replica_load_their_adapter() -> None:
    two = two_with((), ())
    first = two.plan(adapter_prompt("a"), 0.0)
    assert first.predicted["local.load"] == 5.0
    again = two.plan(adapter_prompt("a", 1), 0.0)
    assert again.decode == first.decode and again.predicted["local.load"] == 0.0


def test_a_queue_that_is_longer_than_a_load_is_left() -> None:
    two = two_with(("a",), (), adapter_load_s=0.1)
    two.report(report("d1", 2, adapters=("a",), queued_tokens=20_000, prompts=4, **LORA), 0.0)
    plan = two.plan(adapter_prompt("a"), 0.0)
    assert (plan.decode, plan.predicted["local.load"]) == ("d2", 0.1)


def test_a_load_that_evicts_no_adapter_is_cheaper() -> None:
    for number in range(8):
        two = two_with(("a", "b"), ("c",))
        assert two.plan(adapter_prompt("new", number), 0.0).decode == "d2"


def test_no_engine_loads_an_adapter_to_be_measured() -> None:
    two = two_with(("a",), (), adapter_load_s=0.01)
    plan = two.plan(adapter_prompt("a"), 0.0)
    assert (plan.decode, plan.explores) == ("d1", False)


def test_requests_without_an_adapter_do_not_pay_for_loads() -> None:
    plan = two_with((), ()).plan(PROMPT, 0.0)
    assert plan.predicted["local.load"] == plan.predicted["local.behind"] == 0.0


def test_a_remote_prefill_pays_for_the_load_on_both_engines() -> None:
    both = cluster("d1", "p1")
    both.report(report("p1", 1, **LORA), 0.0)
    both.report(report("d1", 1, **LORA), 0.0)
    predicted = both.plan(adapter_prompt("a"), 0.0).predicted
    alone = cluster("d1", "p1").plan(PROMPT, 0.0).predicted
    assert predicted["remote.load"] == 5.0
    assert predicted["remote.decode"] == pytest.approx(alone["remote.decode"] + 5.0)

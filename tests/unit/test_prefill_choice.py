"""The decision between local and remote prefill, boundary by boundary."""

from collections.abc import Mapping

import numpy as np
import pytest

from headrace.router.placement.cluster_view import WITHIN, ClusterView
from headrace.router.placement.place import place
from headrace.router.placement.prefill_choice import (
    ModelErrors,
    choose_prefill,
    cost_formula,
    exploration_limit_s,
    remote_timeout_s,
)
from headrace.router.placement.request import PlacementRequest
from headrace.router.plan import Plan, RouterSettings
from headrace_engine.step_time import StepTime, pairs_of
from headrace_kvstore.lookup.availability import AvailableRun

SETTINGS = RouterSettings()
STEP = StepTime()
TOKEN_BYTES = 23_040.0


def pair(
    running: int = 0,
    context: int = 0,
    decode_queue_s: float = 0.0,
    prefill_queue_s: float = 0.0,
    settings: RouterSettings = SETTINGS,
) -> ClusterView:
    """A decode and a prefill engine on one machine, never measured, with blocks of one token."""
    view = ClusterView(1, TOKEN_BYTES, settings)
    for holder, (role, queue_s) in enumerate(
        (("decode", decode_queue_s), ("prefill", prefill_queue_s))
    ):
        row = view.add(
            *(role, role, view.node("here")),  # type: ignore[arg-type]
            hbm=holder,
            step_tokens=settings.max_step_tokens,
        )
        view.engines[row]["queue_s"] = queue_s
    view.engines[0]["running"], view.engines[0]["context"] = running, context
    return view


def plan(
    view: ClusterView,
    tokens: int = 1000,
    cached_decode: int = 0,
    cached_prefill: int = 0,
    stored: tuple[AvailableRun, ...] = (),
) -> Plan:
    held = np.array([cached_decode, cached_prefill], np.int32)
    return place(view, PlacementRequest("a", tokens, held=held, available_runs=[stored]))


def price(view: ClusterView, tokens: int = 1000, **more: int) -> Mapping[str, float]:
    return plan(view, tokens, **more).predicted  # type: ignore[arg-type]


def test_the_lesser_total_wins() -> None:
    assert choose_prefill(1.0, 0.9).kind == "remote"
    assert choose_prefill(0.9, 1.0).kind == "local"


def test_a_tie_goes_local() -> None:
    assert choose_prefill(1.0, 1.0).kind == "local"


def test_idle_and_equal_engines_prefill_locally() -> None:
    assert plan(pair()).kind == "local"


def test_running_streams_make_a_long_local_prefill_dear() -> None:
    p = price(pair(running=8))
    costs = 1000 * 0.00075 + pairs_of(0, 1000) * 4e-7
    assert p["local.stall"] == pytest.approx(8 * costs, rel=0.01)
    assert p["remote.total"] < p["local.total"]


def test_a_short_prompt_stays_local_even_with_running_streams() -> None:
    assert plan(pair(running=2), 20).kind == "local"


def test_as_many_prompts_as_are_ahead_come_behind_and_wait_for_what_it_adds_to_steps() -> None:
    view = pair()
    view.engines["prompts"] = 2, 3
    p, step_s = price(view), STEP.seconds(0, 1)
    assert p["local.behind"] == pytest.approx(2 * (p["local.compute"] - step_s))
    last_s = p["remote.decode"] - step_s
    assert p["remote.behind"] == pytest.approx(3 * (p["remote.compute"] - step_s) + 2 * last_s)
    ttft = place(view, PlacementRequest("a", 1000)).predicted_ttft_s
    assert ttft == pytest.approx(p["local.total"] - p["local.behind"])


def test_a_crowd_of_single_tokens_stays_since_the_last_one_is_computed_here_either_way() -> None:
    view = pair(decode_queue_s=5.0)
    view.engines["prompts"] = 1000, 0
    assert plan(view, 1).kind == "local"
    assert plan(view, 100).kind == "remote"


def test_a_prefix_on_the_prefill_engine_draws_the_request_there() -> None:
    assert plan(pair(), cached_prefill=999).kind == "remote"


def test_a_prefix_on_the_decode_engine_keeps_the_request_there() -> None:
    assert plan(pair(), cached_prefill=999, cached_decode=990).kind == "local"


def test_a_queue_at_prefill_adds_to_the_remote_price_only() -> None:
    queued, idle = price(pair(prefill_queue_s=3.0)), price(pair())
    assert queued["remote.total"] == pytest.approx(idle["remote.total"] + 3.0)
    assert queued["local.total"] == idle["local.total"]


def test_a_decode_queue_that_drains_while_the_kv_is_made_costs_remote_nothing() -> None:
    p = price(pair(decode_queue_s=0.5))
    assert p["local.queue"] == 0.5
    assert p["remote.decode_queue"] == 0.0


def test_a_decode_queue_that_outlasts_the_remote_prefill_costs_its_rest() -> None:
    p = price(pair(decode_queue_s=5.0))
    arrival = sum(p[f"remote.{k}"] for k in ("call", "queue", "compute", "transfer", "handoff"))
    assert p["remote.decode_queue"] == pytest.approx(5.0 - arrival)


@pytest.mark.parametrize("side", ["local", "remote"])
def test_the_total_is_the_sum_of_the_parts(side: str) -> None:
    p = price(pair(running=3, decode_queue_s=4.0, prefill_queue_s=1.0))
    parts = [v for k, v in p.items() if k.startswith(side) and not k.endswith("total")]
    assert p[f"{side}.total"] == pytest.approx(sum(parts))


def test_blocks_that_the_decode_engine_has_are_not_transferred() -> None:
    assert price(pair())["remote.transfer"] == pytest.approx(0.005 + 1000 * TOKEN_BYTES * 1e-9)
    less = price(pair(), cached_decode=900)["remote.transfer"]
    assert less == pytest.approx(0.005 + 100 * TOKEN_BYTES * 1e-9)
    assert price(pair(), 0)["remote.transfer"] == 0.0, "nothing to transfer costs nothing"


def test_a_prompt_longer_than_a_step_pays_each_step() -> None:
    p = price(pair(settings=RouterSettings(max_step_tokens=400)))
    pairs = pairs_of(0, 1000)
    assert p["local.compute"] == STEP.prefill_s(1000, pairs, step_tokens=400)
    assert p["local.compute"] == pytest.approx(
        2 * STEP.seconds(400, pairs=0.4 * pairs) + STEP.seconds(200, pairs=0.2 * pairs)
    )


def test_what_stands_before_the_computed_tokens_is_attended_to() -> None:
    behind = price(pair(), 9000, cached_decode=8000)["local.compute"]
    alone = price(pair())["local.compute"]
    assert behind - alone == pytest.approx(8000 * 1000 * 4e-7)


def test_the_context_of_running_streams_makes_each_step_longer() -> None:
    longer, shorter = price(pair(running=2, context=50_000)), price(pair(running=2))
    assert longer["remote.decode"] - shorter["remote.decode"] == pytest.approx(50_000 * 2e-6)
    assert longer["remote.stall"] == pytest.approx(shorter["remote.stall"])


def with_target(target_s: float, running: int = 1) -> ClusterView:
    """A busy prefill engine: only the target can make a short prompt go there."""
    settings = RouterSettings(itl_target_s=target_s, max_step_tokens=100)
    return pair(running, prefill_queue_s=9.0, settings=settings)


LOCAL_STEP_S = STEP.seconds(100, 1, 0, 0, pairs_of(900, 1000))
"""The longest local step is one full chunk, at the prompt's end."""
REMOTE_STEP_S = STEP.seconds(0, 2, 0, 1000)


def test_remote_wins_if_only_the_local_step_breaks_the_itl_target() -> None:
    made = plan(with_target(LOCAL_STEP_S * 0.999), cached_decode=900)
    assert made.kind == "remote"
    assert "ITL target" in made.reasons[0]


def test_a_step_equal_to_the_itl_target_keeps_it() -> None:
    assert plan(with_target(LOCAL_STEP_S), cached_decode=900).kind == "local"


def test_price_decides_if_both_steps_break_the_itl_target() -> None:
    made = plan(with_target(REMOTE_STEP_S * 0.999), cached_decode=900)
    assert made.kind == "local" and made.broken
    assert plan(with_target(REMOTE_STEP_S), cached_decode=900).kind == "remote"


def test_the_itl_target_is_nobodys_if_nothing_runs() -> None:
    assert plan(with_target(0.03, running=0), cached_decode=900).kind == "local"


def test_an_engine_is_measured_again_below_twice_the_best_price_once_it_is_stale() -> None:
    assert exploration_limit_s(1.0, 60.0, SETTINGS.remeasure_s) == 2.0
    assert exploration_limit_s(1.0, 59.9, SETTINGS.remeasure_s) == 0.0


def test_the_longer_unmeasured_the_dearer_a_measurement_may_be() -> None:
    assert exploration_limit_s(0.5, 540.0, SETTINGS.remeasure_s) == 5.0


EXACT = ModelErrors(0.0, 0.0, 0.0, 0.0)


def test_the_time_out_has_a_higher_floor_while_the_prefill_side_is_cold() -> None:
    p = price(pair(), 50, cached_prefill=49)
    assert remote_timeout_s(p, EXACT, SETTINGS, cold=True) == SETTINGS.timeout_cold_s
    assert remote_timeout_s(p, EXACT, SETTINGS, cold=False) == 1.0
    view = pair(settings=RouterSettings(policy="remote"))
    assert plan(view, 50).timeout_s == SETTINGS.timeout_cold_s
    view.engines["cold"] = False
    assert plan(view, 50).timeout_s < SETTINGS.timeout_cold_s


def test_the_time_out_is_at_least_the_factor_times_the_prediction() -> None:
    p = price(pair(prefill_queue_s=100.0))
    t = sum(p[f"remote.{k}"] for k in ("call", "queue", "compute", "transfer", "handoff"))
    assert remote_timeout_s(p, EXACT, SETTINGS, cold=False) == pytest.approx(4 * t)


def test_the_time_out_widens_with_the_models_own_errors() -> None:
    view = pair(settings=RouterSettings(policy="remote"))
    view.engines["cold"] = False
    before_s = plan(view, 50, cached_prefill=49).timeout_s
    view.engines["call_error_s"] = 1.0
    assert plan(view, 50, cached_prefill=49).timeout_s > max(6.0, before_s)
    view.engines["call_error_s"] = 0.0
    view.set_fit(WITHIN, 1.0, 0.0, 2.0)
    assert plan(view, 50, cached_prefill=49).timeout_s > 12.0


def test_the_formula_names_every_part_with_its_number() -> None:
    p = price(pair(running=3))
    line = cost_formula(p)
    assert all(f"{v:.3f}" in line for v in p.values())
    assert "\n" not in line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "fastest"),
        ("itl_target_s", 0.0),
        ("ttft_target_s", 0.0),
        ("remeasure_s", 0.0),
        ("max_step_tokens", 0),
        ("retry_s", float("nan")),
    ],
)
def test_an_impossible_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        RouterSettings(**{field: value})  # type: ignore[arg-type]


def test_what_the_store_supplies_costs_only_what_outlasts_the_computation() -> None:
    hidden = plan(pair(), 1000, stored=(AvailableRun("dram", 400),)).predicted
    assert hidden["local.load"] == 0.0, "15 ms of loading under 0.5 s of computing"
    seen = plan(pair(running=2), 40_001, stored=(AvailableRun("dram", 40_000),)).predicted
    load_s = 0.005 + 40_000 * TOKEN_BYTES * 1e-9
    assert seen["local.load"] == pytest.approx(load_s - STEP.seconds(0, 3, 0, 40_001))
    assert seen["local.stall"] == pytest.approx(2 * (load_s - STEP.seconds(0, 2)))


def test_a_prefix_in_the_store_of_the_prefill_engines_machine_draws_the_request_there() -> None:
    view = pair(running=40)
    here, there = view.node("here"), view.node("there")
    view.engines[1]["node"] = there
    stored = [[], [AvailableRun("dram", 4000)]]
    assert here == 0
    made = place(view, PlacementRequest("a", 4001, available_runs=stored))
    p = made.predicted
    assert p["remote.load"] == pytest.approx(
        0.005 + 4000 * TOKEN_BYTES * 1e-9 - p["remote.compute"]
    )
    assert made.kind == "remote"

"""The decision between local and remote prefill, boundary by boundary."""

from dataclasses import replace

import pytest

from headrace.router.cost import Costs
from headrace.router.plan import RouterSettings
from headrace.router.price import (
    Ages,
    Situation,
    Steps,
    choose,
    formula,
    longest_steps,
    price,
    remote_timeout_s,
)
from headrace_engine.steptime import pairs_of

SETTINGS = RouterSettings()
FRESH = Ages(0.0, 0.0)
ALONE = Steps(local_s=0.0, remote_s=0.0, running=0)
IDLE = Situation(
    uncached_decode_tokens=1000,
    uncached_prefill_tokens=1000,
    transfer_bytes=23_592_960,
    running=0,
    decode_queue_s=0.0,
    prefill_queue_s=0.0,
    prompt_tokens=1000,
)


def totals(local: float, remote: float) -> dict[str, float]:
    return {"local.total": local, "remote.total": remote}


def test_the_lesser_total_wins() -> None:
    assert choose(totals(1.0, 0.9), ALONE, FRESH, SETTINGS).kind == "remote"
    assert choose(totals(0.9, 1.0), ALONE, FRESH, SETTINGS).kind == "local"


def test_a_tie_goes_local() -> None:
    assert choose(totals(1.0, 1.0), ALONE, FRESH, SETTINGS).kind == "local"


def test_idle_and_equal_engines_prefill_locally() -> None:
    p = price(IDLE, Costs(), SETTINGS)
    assert p["local.total"] < p["remote.total"]


def test_running_streams_make_a_long_local_prefill_dear() -> None:
    p = price(replace(IDLE, running=8), Costs(), SETTINGS)
    costs = 1000 * 0.00075 + pairs_of(0, 1000) * 4e-7
    assert p["local.stall"] == pytest.approx(8 * costs, rel=0.01)
    assert p["remote.total"] < p["local.total"]


def test_a_short_prompt_stays_local_even_with_running_streams() -> None:
    short = replace(
        IDLE, uncached_decode_tokens=20, uncached_prefill_tokens=20, transfer_bytes=2_949_120
    )
    p = price(replace(short, running=2), Costs(), SETTINGS)
    assert p["local.total"] < p["remote.total"]


def test_stall_weight_zero_ignores_the_running_streams() -> None:
    p = price(replace(IDLE, running=8), Costs(), RouterSettings(stall_weight=0.0))
    assert p["local.stall"] == p["remote.stall"] == 0.0


def test_a_prefix_on_the_prefill_engine_draws_the_request_there() -> None:
    p = price(replace(IDLE, uncached_prefill_tokens=1), Costs(), SETTINGS)
    assert p["remote.total"] < p["local.total"]


def test_a_prefix_on_the_decode_engine_keeps_the_request_there() -> None:
    there = replace(IDLE, uncached_prefill_tokens=1)
    both = replace(there, uncached_decode_tokens=10, transfer_bytes=2_949_120)
    p = price(both, Costs(), SETTINGS)
    assert p["local.total"] < p["remote.total"]


def test_a_queue_at_prefill_adds_to_the_remote_price_only() -> None:
    queued = price(replace(IDLE, prefill_queue_s=3.0), Costs(), SETTINGS)
    idle = price(IDLE, Costs(), SETTINGS)
    assert queued["remote.total"] == pytest.approx(idle["remote.total"] + 3.0)
    assert queued["local.total"] == idle["local.total"]


def test_a_decode_queue_that_drains_while_the_kv_is_made_costs_remote_nothing() -> None:
    p = price(replace(IDLE, decode_queue_s=0.5), Costs(), SETTINGS)
    assert p["local.queue"] == 0.5
    assert p["remote.decode_queue"] == 0.0


def test_a_decode_queue_that_outlasts_the_remote_prefill_costs_its_rest() -> None:
    p = price(replace(IDLE, decode_queue_s=5.0), Costs(), SETTINGS)
    arrival = sum(p[f"remote.{k}"] for k in ("call", "queue", "compute", "transfer", "handoff"))
    assert p["remote.decode_queue"] == pytest.approx(5.0 - arrival)


@pytest.mark.parametrize("side", ["local", "remote"])
def test_the_total_is_the_sum_of_the_parts(side: str) -> None:
    p = price(replace(IDLE, running=3, decode_queue_s=4.0, prefill_queue_s=1.0), Costs(), SETTINGS)
    parts = [v for k, v in p.items() if k.startswith(side) and not k.endswith("total")]
    assert p[f"{side}.total"] == pytest.approx(sum(parts))


def test_nothing_to_transfer_costs_nothing() -> None:
    assert price(replace(IDLE, transfer_bytes=0), Costs(), SETTINGS)["remote.transfer"] == 0.0


def test_a_prompt_longer_than_a_step_pays_each_step() -> None:
    settings = RouterSettings(max_step_tokens=400)
    p = price(IDLE, Costs(), settings)
    step, pairs = Costs().decode_step, pairs_of(0, 1000)
    assert p["local.compute"] == step.prefill_s(1000, pairs, step_tokens=400)
    assert p["local.compute"] == pytest.approx(
        2 * step.seconds(400, pairs=0.4 * pairs) + step.seconds(200, pairs=0.2 * pairs)
    )


def test_what_stands_before_the_computed_tokens_is_attended_to() -> None:
    behind = price(replace(IDLE, prompt_tokens=9000), Costs(), SETTINGS)["local.compute"]
    alone = price(IDLE, Costs(), SETTINGS)["local.compute"]
    assert behind - alone == pytest.approx(8000 * 1000 * 4e-7)


def test_the_context_of_running_streams_makes_each_step_longer() -> None:
    busy = replace(IDLE, running=2, running_context=50_000)
    longer = price(busy, Costs(), SETTINGS)
    shorter = price(replace(busy, running_context=0), Costs(), SETTINGS)
    assert longer["remote.decode"] - shorter["remote.decode"] == pytest.approx(50_000 * 2e-6)
    assert longer["remote.stall"] == pytest.approx(shorter["remote.stall"])


def test_remote_wins_if_only_the_local_step_breaks_the_itl_target() -> None:
    settings = RouterSettings(itl_target_s=0.05)
    choice = choose(totals(0.1, 0.9), Steps(0.06, 0.02, running=1), FRESH, settings)
    assert choice.kind == "remote"
    assert "ITL target" in choice.why


def test_a_step_equal_to_the_itl_target_keeps_it() -> None:
    settings = RouterSettings(itl_target_s=0.06)
    choice = choose(totals(0.1, 0.9), Steps(0.06, 0.02, running=1), FRESH, settings)
    assert choice.kind == "local"


def test_price_decides_if_both_steps_break_the_itl_target() -> None:
    settings = RouterSettings(itl_target_s=0.01)
    choice = choose(totals(0.1, 0.9), Steps(0.06, 0.02, running=1), FRESH, settings)
    assert choice.kind == "local"


def test_the_itl_target_is_nobodys_if_nothing_runs() -> None:
    settings = RouterSettings(itl_target_s=0.05)
    assert choose(totals(0.1, 0.9), Steps(0.06, 0.02, 0), FRESH, settings).kind == "local"


def test_the_longest_local_step_is_one_full_chunk() -> None:
    steps = longest_steps(replace(IDLE, running=2), Costs(), RouterSettings(max_step_tokens=100))
    assert steps.local_s == Costs().decode_step.seconds(100, 2, 0, 0, pairs_of(900, 1000))
    assert steps.remote_s == Costs().decode_step.seconds(0, 3, 0, 1000)


def test_stale_remote_models_are_measured_again_below_twice_the_local_price() -> None:
    choice = choose(totals(1.0, 1.9), ALONE, Ages(0.0, 60.0), SETTINGS)
    assert (choice.kind, choice.explores) == ("remote", True)
    assert "measuring remote prefill again" in choice.why


def test_stale_remote_models_are_left_alone_at_twice_the_local_price() -> None:
    assert choose(totals(1.0, 2.0), ALONE, Ages(0.0, 60.0), SETTINGS).kind == "local"


def test_fresh_remote_models_are_not_measured_again() -> None:
    assert choose(totals(1.0, 1.1), ALONE, Ages(0.0, 59.9), SETTINGS).kind == "local"


def test_the_longer_unmeasured_the_dearer_a_measurement_may_be() -> None:
    assert choose(totals(1.0, 9.0), ALONE, Ages(0.0, 400.0), SETTINGS).kind == "local"
    assert choose(totals(1.0, 9.0), ALONE, Ages(0.0, 600.0), SETTINGS).kind == "remote"


def test_stale_local_models_are_measured_again_too() -> None:
    choice = choose(totals(1.9, 1.0), ALONE, Ages(60.0, 0.0), SETTINGS)
    assert (choice.kind, choice.explores) == ("local", True)


def test_the_cheaper_side_is_chosen_for_its_price_however_stale() -> None:
    choice = choose(totals(1.0, 9.0), ALONE, Ages(1e9, 0.0), SETTINGS)
    assert (choice.kind, choice.explores) == ("local", False)


def test_the_time_out_has_a_higher_floor_while_the_prefill_side_is_cold() -> None:
    costs = Costs()
    for _ in range(200):
        costs.handoff.observe(0.005)
        costs.call.observe(0.02)
    p = price(replace(IDLE, uncached_prefill_tokens=1, transfer_bytes=0), costs, SETTINGS)
    assert remote_timeout_s(p, costs, SETTINGS, cold=True) == SETTINGS.timeout_cold_s
    assert remote_timeout_s(p, costs, SETTINGS, cold=False) == SETTINGS.timeout_floor_s


def test_the_time_out_is_at_least_the_factor_times_the_prediction() -> None:
    costs = Costs()
    p = price(replace(IDLE, prefill_queue_s=100.0), costs, RouterSettings())
    settings = RouterSettings(timeout_errors=0.0)
    t = sum(p[f"remote.{k}"] for k in ("call", "queue", "compute", "transfer", "handoff"))
    assert remote_timeout_s(p, costs, settings, cold=False) == pytest.approx(4 * t)


def test_the_time_out_widens_with_the_models_own_errors() -> None:
    costs = Costs()
    for i in range(200):
        costs.handoff.observe(0.005)
        costs.call.observe(0.0 if i % 2 else 2.0)
    p = price(replace(IDLE, uncached_prefill_tokens=1), costs, SETTINGS)
    assert remote_timeout_s(p, costs, SETTINGS, cold=False) > 6.0


def test_the_formula_names_every_part_with_its_number() -> None:
    p = price(replace(IDLE, running=3), Costs(), SETTINGS)
    line = formula(p)
    assert all(f"{v:.3f}" in line for v in p.values())
    assert "\n" not in line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "fastest"),
        ("itl_target_s", 0.0),
        ("stall_weight", -1.0),
        ("remeasure_s", 0.0),
        ("timeout_factor", 0.5),
        ("timeout_errors", -1.0),
        ("max_step_tokens", 0),
        ("retry_s", float("nan")),
    ],
)
def test_an_impossible_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        RouterSettings(**{field: value})  # type: ignore[arg-type]


def test_what_the_store_supplies_costs_only_what_outlasts_the_computation() -> None:
    hidden = price(replace(IDLE, load_decode_bytes={"dram": 10_000_000}), Costs(), SETTINGS)
    assert hidden["local.load"] == 0.0, "15 ms of loading under 0.77 s of computing"
    seen = price(
        replace(IDLE, uncached_decode_tokens=1, load_decode_bytes={"dram": 10**9}, running=2),
        Costs(),
        SETTINGS,
    )
    step = Costs().decode_step
    assert seen["local.load"] == pytest.approx(1.005 - step.seconds(0, 3, 0, 1000))
    assert seen["local.stall"] == pytest.approx(2 * (1.005 - step.seconds(0, 2)))


def test_a_prefix_in_the_store_of_the_prefill_engines_machine_draws_the_request_there() -> None:
    there = replace(IDLE, uncached_prefill_tokens=1, load_prefill_bytes={"dram": 100_000_000})
    p = price(there, Costs(), SETTINGS)
    assert p["remote.load"] == pytest.approx(0.105 - p["remote.compute"])
    assert p["remote.total"] < p["local.total"]

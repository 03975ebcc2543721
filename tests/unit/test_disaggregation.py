"""Whether disaggregation pays, and how many replicas of each role it takes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from headrace.cli.show.status import advice as status_advice
from headrace.config.load import validate
from headrace.disaggregation import MIN_REQUESTS, TrafficLoad, advice_of, advise, split
from headrace_engine.step_time import StepTime


def load(**changes: Any) -> TrafficLoad:
    """A request a second: half a second of prompt, 200 tokens of answer."""
    told = {
        "rate": 1.0,
        "prompt_tokens": 2_000.0,
        "answer_tokens": 200.0,
        "local_s": 0.5,
        "local_square": 0.5,
        "remote_s": 0.5,
        "remote_square": 0.5,
        "move_s": 0.02,
        "steps": steps(),
        "most_running": 100,
    }
    return TrafficLoad(**{**told, **changes})


def steps() -> StepTime:
    """20 ms a step, whatever is in it."""
    fit = StepTime()
    for size in (1, 8, 64, 512) * 50:
        fit.observe(size, 0, 0, 0, 0, 0.02)
        fit.observe(0, size, 0, 1000 * size, 0, 0.02)
    return fit


def test_a_prompt_waits_for_those_before_it_as_in_a_queue_of_one_server() -> None:
    """Waiting: 1/s x 0.5 s^2 / (2 x (1 - 0.5)) = 0.5 s; then 0.5 s, the move and a step."""
    found = split(load(), 1, 1)
    assert found.ttft_s == pytest.approx(0.5 + 0.5 + 0.02 + found.token_s, rel=0.01)
    assert found.busy == pytest.approx(0.5)
    assert found.token_s == pytest.approx(0.02, rel=0.1)


def test_a_prompt_waits_less_for_two_engines_of_one_queue_than_for_one_of_half_the_load() -> None:
    one, two = split(load(), 1, 1), split(load(rate=2.0), 2, 2)
    assert 0.52 < two.ttft_s < one.ttft_s
    assert two.token_s == pytest.approx(one.token_s)


def test_streams_beside_prompts_get_the_rest_of_the_time() -> None:
    alone, beside = split(load(), 1, 1), split(load(), 0, 1)
    assert beside.token_s == pytest.approx(2 * alone.token_s, rel=0.1)


@pytest.mark.parametrize(
    "changes",
    [{"rate": 2.1}, {"most_running": 3}, {"answer_tokens": 6_000.0}],
    ids=["prompts", "little KV", "long answers"],
)
def test_an_overloaded_split_takes_for_ever(changes: dict[str, Any]) -> None:
    assert split(load(**changes), 1, 1).request_s == math.inf


def test_disaggregation_pays_if_prompts_would_hold_up_streams_not_if_they_are_short() -> None:
    assert advise(load(rate=3.0), 2, 2).disaggregation_pays
    short = load(local_s=0.001, local_square=1e-6, remote_s=0.03, remote_square=1e-3)
    assert not advise(short, 2, 2).disaggregation_pays


def test_the_best_split_is_the_least_dear_of_all_with_a_prefill_engine() -> None:
    wanted = load(rate=6.0)
    advice = advise(wanted, 4, 4)
    each = [split(wanted, p, 8 - p).request_s for p in range(8)]
    assert advice.best is not None and advice.best.request_s == min(each[1:])
    assert advice.now.request_s == each[4] and advice.colocated.request_s == each[0]


def test_the_traffic_takes_engines_that_are_busy_at_most_four_fifths() -> None:
    advice = advise(load(rate=8.0), 1, 1)
    assert advice.prefill == 5  # 8 x 0.5 s / 0.8
    assert advice.decode == 1  # 8 x 200 x 20 ms = 32 run, of 80 that may
    assert advise(load(rate=8.0, most_running=25), 1, 1).decode == 2  # 33 of 20


@pytest.mark.parametrize("rate", [0.01, 1.0, 3.0, 50.0])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (0, 2)])
def test_the_configuration_accepts_what_the_advice_recommends(
    prefill: int, decode: int, rate: float
) -> None:
    advice = advise(load(rate=rate), prefill, decode)
    assert advice.best is not None
    for one in (advice.best, advice):
        validate({"prefill": {"replicas": one.prefill}, "decode": {"replicas": one.decode}})
    words = status_advice(advice.to_dict() | {"rate": rate})
    assert "0 prefill" not in words
    if not advice.disaggregation_pays and prefill:
        assert "prefill.autoscaling.min_replicas: 0" in words
        validate({"prefill": {"autoscaling": {"min_replicas": 0, "max_replicas": prefill}}})


def test_one_engine_has_no_split_with_a_prefill_engine() -> None:
    advice = advise(load(), 0, 1)
    assert advice.best is None and not advice.disaggregation_pays
    assert "now" not in status_advice(advice.to_dict() | {"rate": 1.0})


@pytest.mark.parametrize(("prefill", "decode", "rate"), [(1, 0, 1.0), (0, 1, 0.0), (-1, 2, 1.0)])
def test_nothing_is_said_of_nothing(prefill: int, decode: int, rate: float) -> None:
    with pytest.raises(ValueError):
        advise(load(rate=rate), prefill, decode)


def test_of_very_many_engines_the_present_split_is_among_those_compared() -> None:
    advice = advise(load(rate=900.0), 999, 1_001)
    assert (advice.now.prefill, advice.now.decode) == (999, 1_001)
    assert advice.best is not None and advice.best.request_s <= advice.now.request_s


def status(requests: int, rate: float) -> list[dict[str, Any]]:
    traffic = {
        "requests": requests,
        "rate": rate,
        "prompt_tokens": 2000.0,
        "answer_tokens": 200.0,
        "computed_tokens": 2000.0,
        "local_s": 0.5,
        "local_s_square": 0.5,
        "remote_s": 0.5,
        "remote_s_square": 0.5,
        "move_s": 0.02,
    }
    router = {
        "outcomes": {"traffic": traffic if requests else {"requests": 0}},
        "engines": {"decode_blocks": 10_000, "block_tokens": 16},
        "prefill": {"p": {"same_machine": False}},
        "step_times": {"decode": steps().to_dict()},
    }
    return [
        {"role": "prefill", "router": {}},
        {"role": "decode", "router": router},
        {"role": "decode", "router": router},
    ]


def test_rates_of_all_decode_replicas_are_added_up() -> None:
    told = advice_of(status(MIN_REQUESTS, 0.5))
    assert told is not None and told["rate"] == pytest.approx(1.0)
    assert told["now"]["prefill"] == 1 and told["now"]["decode"] == 2
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize(("requests", "rate"), [(0, 0.0), (MIN_REQUESTS // 2 - 1, 1.0)])
def test_little_traffic_gives_no_advice(requests: int, rate: float) -> None:
    assert advice_of(status(requests, rate)) is None


def test_an_overloaded_cluster_is_told_as_null() -> None:
    told = advice_of(status(MIN_REQUESTS, 5.0))
    assert told is not None and told["now"]["ttft_s"] is None
    json.dumps(told, allow_nan=False)

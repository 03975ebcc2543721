"""Usage of a real engine equals what vLLM counts, with preemptions, aborts and draft tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.forked import told
from tests.support.program import IN_ONE_PROCESS
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

COUNTED = ("computed_tokens", "decode_tokens", "cached_tokens", "drafted_tokens", "accepted_tokens")


@pytest.fixture(scope="module")
def served() -> Any:
    return told("usage_engine", str(tiny_llama()), timeout_s=300.0, **IN_ONE_PROCESS)


def test_usage_is_what_vllm_counts(served: Any) -> None:
    [(tenant, total)] = served["totals"].items()
    assert tenant == "shop"
    assert {name: total.get(name, 0) for name in COUNTED} == {
        name: served["vllm"].get(name, 0) for name in COUNTED
    }
    assert total["drafted_tokens"] and total["cached_tokens"]


def test_the_sum_over_the_requests_is_the_total(served: Any) -> None:
    total = Counter[str]()
    for usage in served["requests"].values():
        total.update(usage)
    expected = served["totals"]["shop"]
    assert total.pop("engine_s") == pytest.approx(expected.pop("engine_s"))
    assert total == expected


def test_the_requests_share_the_seconds_of_the_steps(served: Any) -> None:
    seconds = sum(usage["engine_s"] for usage in served["requests"].values())
    assert seconds == pytest.approx(served["step_s"])


def test_a_prompt_is_computed_cached_or_both(served: Any) -> None:
    new, cached = served["requests"]["new"], served["requests"]["cached"]
    assert (new["computed_tokens"], new.get("cached_tokens", 0)) == (500, 0)
    assert (cached["computed_tokens"], cached["cached_tokens"]) == (500 - 384, 384)


def test_answers_are_counted_once_however_often_they_were_preempted(served: Any) -> None:
    requests = served["requests"]
    assert [requests[f"together-{n}"]["output_tokens"] for n in range(5)] == [200] * 5
    again = sum(
        usage["decode_tokens"] - usage.get("drafted_tokens", 0) - usage["output_tokens"]
        for name, usage in requests.items()
        if name.startswith("together")
    )
    assert again > 250, "some were preempted, and computed again"


def test_who_left_pays_for_what_was_computed(served: Any) -> None:
    for number in range(2):
        usage = served["requests"][f"left-{number}"]
        assert usage["requests"] == 1 and usage["computed_tokens"] == 100
        assert 3 <= usage["output_tokens"] < 300

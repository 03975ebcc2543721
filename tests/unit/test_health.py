"""An app's health: ok, degraded or failing, with every problem named."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.observability.health import assess


def replica(name: str, role: str = "decode", **parts: Any) -> dict[str, Any]:
    return {"role": role, "deployment": role, "replica_id": name, **parts}


def status(**parts: Any) -> dict[str, Any]:
    replicas = [replica("prefill1", "prefill"), replica("decode11"), replica("decode22")]
    return {"replicas": replicas, "expected_replicas": {"decode": 2, "prefill": 1}} | parts


def unhealthy(**states: str) -> dict[str, Any]:
    return {"router": {"unhealthy": states}}


def test_an_app_whose_replicas_all_answer_is_ok() -> None:
    found = assess(status(), {"error_rate": 0.0})
    assert (found.state, found.problems, found.missing) == ("ok", [], {"decode": 0, "prefill": 0})
    assert (found.answering, found.expected) == (3, 3)


def test_without_what_ray_serve_tells_the_replicas_that_answer_are_expected() -> None:
    found = assess(status(expected_replicas={}), None)
    assert (found.state, found.answering, found.expected) == ("ok", 3, 3)


def test_without_a_decode_replica_an_app_fails_unless_prefill_replicas_stand_in() -> None:
    alone = [replica("prefill1", "prefill")]
    found = assess(status(replicas=alone), None)
    assert (found.state, found.problems) == ("failing", ["no decode replica answers"])
    assert (found.answering, found.expected, found.missing["decode"]) == (1, 3, 2)
    found = assess(status(replicas=alone, gateway={"standing_in": 1}), None)
    assert (found.state, found.problems) == (
        "degraded",
        ["no decode replica answers, prefill replicas answer instead"],
    )


def test_an_app_whose_only_decode_replica_is_down_fails() -> None:
    one = status(replicas=[replica("decode11")], gateway=unhealthy(decode11="down"))
    assert assess(one, None).state == "failing"


def test_a_missing_replica_is_counted_by_role() -> None:
    found = assess(status(expected_replicas={"decode": 4, "prefill": 2}), None)
    assert found.problems == [
        "2 of 4 decode replicas do not answer",
        "1 of 2 prefill replicas does not answer",
    ]


def test_replicas_of_deployments_with_other_names_are_counted_with_their_role() -> None:
    replicas = [replica("a", deployment="decode:big"), replica("b", deployment="llm")]
    found = assess(status(replicas=replicas, expected_replicas={"decode:big": 2, "llm": 1}), None)
    assert found.problems == ["1 of 3 decode replicas does not answer"]


def test_a_replica_that_is_down_does_not_count_as_answering() -> None:
    found = assess(status(gateway=unhealthy(decode22="down", decode11="suspect")), None)
    assert found.problems == ["decode decode22 is down", "decode decode11 is suspect"]
    assert (found.answering, found.expected) == (2, 3)


def test_a_draining_replica_is_no_problem() -> None:
    assert assess(status(gateway=unhealthy(goingaway1="draining")), None).state == "ok"


OPEN = {"prefill": {"prefill1": {"breaker": {"state": "open", "reason": "it died"}}}}
ANY = {"prefill": {"": {"breaker": {"state": "half-open"}}}}


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (
            {"store": [{"machine": "m1", "down": "x"}]},
            "the KV store of machine m1 does not answer",
        ),
        (
            {"store": [{"machine": "m1", "tiers": {"nvme": {"state": "failing"}}}]},
            "the KV store's tier nvme of machine m1 is failing",
        ),
        ({"incomplete": ["advice: KeyError: 'x'"]}, "the status lacks advice: KeyError: 'x'"),
        (
            {"replicas": [replica("decode11", router=OPEN)], "expected_replicas": {}},
            "decode decode11 sends no prompts to prefill replica prefill1: it died",
        ),
        (
            {"replicas": [replica("decode11", router=ANY)], "expected_replicas": {}},
            "decode decode11 sends no prompts to any prefill replica",
        ),
        (
            {"gateway": {"keys_stale": True}},
            "the key file cannot be read, so the keys of before are in use",
        ),
    ],
)
def test_each_broken_part_degrades_the_app_and_is_named(
    parts: dict[str, Any], problem: str
) -> None:
    found = assess(status(**parts), None)
    assert (found.state, found.problems) == ("degraded", [problem])


@pytest.mark.parametrize(("rate", "state"), [(None, "ok"), (0.05, "ok"), (0.06, "degraded")])
def test_more_than_five_percent_of_failed_requests_degrade_the_app(
    rate: float | None, state: str
) -> None:
    assert assess(status(), {"error_rate": rate}).state == state


def test_a_tier_that_is_off_is_no_problem() -> None:
    store = [{"machine": "m1", "tiers": {"nvme": {"state": "off"}, "dram": {"state": "on"}}}]
    assert assess(status(store=store), None).state == "ok"


def of_models(**standing_in: int) -> dict[str, Any]:
    """The status of an app with the models `a` and `b`, whose replicas all answer."""
    replicas = [
        replica(f"{role}-{key}", role, deployment=f"{role}-{key}", model=key)
        for key in "ab"
        for role in ("decode", "prefill")
    ]
    expected = {f"{role}-{key}": 1 for key in "ab" for role in ("decode", "prefill")}
    models = {key: {"standing_in": standing_in.get(key, 0)} for key in "ab"}
    return {"replicas": replicas, "expected_replicas": expected, "gateway": {"models": models}}


def test_several_models_whose_replicas_all_answer_are_ok() -> None:
    found = assess(of_models(), None)
    assert (found.state, found.answering, found.expected) == ("ok", 4, 4)


def test_a_model_that_cannot_answer_degrades_the_app_and_is_named() -> None:
    status = of_models()
    status["replicas"] = [one for one in status["replicas"] if one["replica_id"] != "decode-a"]
    found = assess(status, None)
    assert (found.state, found.problems) == ("degraded", ["no decode replica of a answers"])
    assert found.missing == {"decode": 1, "prefill": 0}


def test_an_app_fails_if_none_of_its_models_can_answer() -> None:
    status = of_models()
    status["replicas"] = [one for one in status["replicas"] if one["role"] == "prefill"]
    assert assess(status, None).state == "failing"
    status["gateway"]["models"]["b"]["standing_in"] = 1
    assert assess(status, None).state == "degraded"


def test_a_replica_of_any_model_that_is_down_is_named() -> None:
    status = of_models()
    status["gateway"]["models"]["b"]["router"] = {"unhealthy": {"prefill-b": "suspect"}}
    assert assess(status, None).problems == ["prefill prefill- is suspect"]
